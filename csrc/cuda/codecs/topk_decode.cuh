// topk: decoding (codecs/topk.cuh encodes).
//
// A thread block has 4,096 elements of the sum in registers. The entries of a message that are among them are
// put where their elements are, in an array of zeros, and all of it is added, zeros too, as the definition does: it
// makes 0 of a sum that is -0.
#pragma once

#include "codecs/tile.cuh"
#include "rows.cuh"

namespace yafsdp_cc {

constexpr unsigned STRETCH_ROWS = STRETCH / (4 * TOPK_THREADS);

struct Spread {
    // In turns: one is added, and zeroed, while the other is filled. Read as float4, which want more than a float's own.
    alignas(16) float at[2][STRETCH];
};

__global__ void __launch_bounds__(TOPK_THREADS) decode_topk_kernel(const DecodeJob given) {
    const DecodeJob job = known(given);
    __shared__ Spread spread;
    for (unsigned i = threadIdx.x; i < STRETCH; i += TOPK_THREADS) spread.at[0][i] = spread.at[1][i] = 0.0f;
    __syncthreads();
    const unsigned of_each = unsigned((job.count + STRETCH - 1) / STRETCH);
    const unsigned units = of_each * (job.sum ? 1 : job.messages);
    bool odd = false;
    for (unsigned unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const unsigned row = unit / of_each;
        const long long first = static_cast<long long>(unit % of_each) * STRETCH; // in ``out``
        const unsigned tile_index = unsigned((job.start + first) / TILE), begin = unsigned((job.start + first) % TILE);
        float total[STRETCH_ROWS][1][4];
        bool empty = true;
        const auto take = [&](unsigned r, const float (&values)[4]) {
            for (int c = 0; c < 4; ++c) total[r][0][c] = empty ? values[c] : add(total[r][0][c], values[c]);
        };
        const auto take_own = [&] {
#pragma unroll
            for (unsigned r = 0; r < STRETCH_ROWS; ++r) {
                const long long at = first + 4 * (r * TOPK_THREADS + threadIdx.x);
                Raw<1> raw;
                float values[1][4];
                fetch(raw, job.own, at, at < job.count);
                convert(raw, job.own.dtype, 0.0f, values);
                take(r, values[0]);
            }
            empty = false;
        };
        const unsigned first_message = job.sum ? 0 : row, last_message = job.sum ? job.messages : row + 1;
        for (unsigned message = first_message; message < last_message; ++message, odd = !odd) {
            const Tile tile(tile_index, job.n, job.message + message * job.message_stride);
            float(&here)[STRETCH] = spread.at[odd]; // all zeros since the barrier of the message before
            for (unsigned i = threadIdx.x; i < tile.kept; i += TOPK_THREADS) {
                const unsigned place = unsigned(tile.positions[i]) - begin; // large if it is before
                if (place < STRETCH) here[place] = of_bf16(tile.values[i]);
            }
            __syncthreads();
            if (job.own.dtype != Dtype::none && message == job.place) take_own();
#pragma unroll
            for (unsigned r = 0; r < STRETCH_ROWS; ++r) {
                float4* const from = reinterpret_cast<float4*>(here) + r * TOPK_THREADS + threadIdx.x;
                const float4 four = *from;
                const float values[4] = {four.x, four.y, four.z, four.w};
                *from = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                take(r, values);
            }
            empty = false;
        }
        if (job.own.dtype != Dtype::none && job.place >= job.messages) take_own();
#pragma unroll
        for (unsigned r = 0; r < STRETCH_ROWS; ++r) {
            const long long at = first + 4 * (r * TOPK_THREADS + threadIdx.x);
            if (at < job.count) store(job.out, row * job.out.stride + at, total[r]);
        }
    }
}

} // namespace yafsdp_cc

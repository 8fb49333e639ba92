// The kernel that decodes, and that sums what it decodes: any codec of blocks. No thread needs another one here.
#pragma once

#include "codecs/floats.cuh"
#include "codecs/odd.cuh"
#include "codecs/onebit.cuh"
#include "codecs/ternary.cuh"
#include "codecs/whole.cuh"

namespace yafsdp_cc {

template <int ROWS> struct Total {
    float at[ROWS][4];
    bool empty = true;

    DEVICE void take(const float (&values)[ROWS][4]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) at[r][c] = empty ? values[r][c] : add(at[r][c], values[r][c]);
        empty = false;
    }
};

// Messages ``first`` to ``last``, added in their order; the next AHEAD are on their way while AHEAD are added. They
// come as a batch, not as a ring: a warp has six scoreboards to wait for loads with, so that in a ring of more messages
// one would be waited for together with those that were fetched after it.
template <class Reader, unsigned AHEAD, int ROWS>
DEVICE void take_messages(const DecodeJob& job, unsigned first, unsigned last, unsigned block, int patch,
                          Total<ROWS>& total) {
    if (first >= last) return;
    typename Reader::template Fetched<ROWS> here[AHEAD], next[AHEAD];
    const auto get = [&](unsigned begin) {
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i) {
            const unsigned message = begin + i;
            if (message < last) Reader::get(next[i], job, job.message + message * job.message_stride, block, patch);
        }
    };
    get(first);
    for (unsigned begin = first; begin < last; begin += AHEAD) {
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i) here[i] = next[i];
        get(begin + AHEAD);
#pragma unroll
        for (unsigned i = 0; i < AHEAD; ++i) {
            if (begin + i >= last) break;
            float values[ROWS][4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) values[r][c] = Reader::template value<ROWS>(here[i], block, r, c);
            total.take(values);
        }
    }
}

// Every team takes a patch; of a sum, that of each message. TOGETHER blocks that share their bytes are neighbours in
// the order of the teams. A sum of many messages has few teams for its bytes, so each has AHEAD messages on their way.
template <class Reader, int ROWS, unsigned TOGETHER, unsigned AHEAD>
__global__ void __launch_bounds__(DECODE_THREADS) decode_kernel(const DecodeJob given) {
    const DecodeJob job = known(given);
    const unsigned first_block = unsigned(job.start / job.block), blocks = unsigned(job.count / job.block);
    const unsigned patches = unsigned(job.block) / (ROWS * LANES);
    const unsigned of_each = (blocks + TOGETHER - 1) / TOGETHER * TOGETHER * patches;
    const unsigned units = of_each * (job.sum ? 1 : job.messages), teams = gridDim.x * (DECODE_THREADS / TEAM);
    unsigned unit = (blockIdx.x * DECODE_THREADS + threadIdx.x) / TEAM;
    for (Walk walk(unit, teams, of_each); unit < units; unit += teams, walk.go_on()) {
        const unsigned row = walk.row, of_row = walk.of_row;
        const unsigned block = of_row / (TOGETHER * patches) * TOGETHER + of_row % TOGETHER;
        const int patch = int(of_row / TOGETHER % patches);
        if (block >= blocks) continue;
        const long long at = static_cast<long long>(block) * job.block + patch * 256 + 4 * thread_of_team();
        Total<ROWS> total;
        if (!job.sum) {
            take_messages<Reader, AHEAD>(job, row, row + 1, first_block + block, patch, total);
        } else {
            take_messages<Reader, AHEAD>(job, 0, job.place, first_block + block, patch, total);
            if (job.own.dtype != Dtype::none) {
                Raw<ROWS> raw;
                float values[ROWS][4];
                fetch(raw, job.own, at, true);
                convert(raw, job.own.dtype, 0.0f, values);
                total.take(values);
            }
            take_messages<Reader, AHEAD>(job, job.place, job.messages, first_block + block, patch, total);
        }
        store(job.out, row * job.out.stride + at, total.at);
    }
}

} // namespace yafsdp_cc

// topk: of each tile of 65,536 elements the largest hundredth (compression/codecs/topk.py). One thread block has one tile.
//
// Encoding goes over the tile three times, and only the first time is it likely to come from memory:
//     1. how many elements there are in each of 2,048 buckets of magnitude, which gives the threshold;
//     2. in the order of positions, who is above the threshold, and who of those at it still has a place: a count of
//        both over the threads of the block gives the place of each;
//     3. what is left of each block, as after any other codec (block.cuh).
#pragma once

#include "block.cuh"

namespace yafsdp_cc {

constexpr int TOPK_WARPS = TOPK_THREADS / 32;
constexpr unsigned SHARE = 100;
constexpr unsigned BUCKETS = 2048, SHIFT = 20, COPIES = 4, FIRST_INFINITE = (INFINITE >> SHIFT) - 1;

struct Tile {
    unsigned start, length, kept;
    unsigned short* positions;
    unsigned short* values;

    DEVICE Tile(unsigned tile, long long n, const unsigned char* row)
        : start(tile * TILE), length(unsigned(min(static_cast<long long>(TILE), n - start))),
          kept((length + SHARE - 1) / SHARE) {
        constexpr unsigned FULL = (TILE + SHARE - 1) / SHARE;
        const unsigned char* place = row + static_cast<long long>(tile) * 4 * FULL;
        positions = reinterpret_cast<unsigned short*>(const_cast<unsigned char*>(place));
        values = positions + kept;
    }
};

// What step 3 takes for a codec: finite is what a bit is set for.
struct Chosen : Codec<float> {
    const unsigned* bits;

    DEVICE explicit Chosen(const unsigned* bits_) : bits(bits_) {}
    DEVICE float code(float h, unsigned at) const {
        const unsigned place = at % TILE;
        return bits[place / 32] >> place % 32 & 1 ? add(as_bf16(h), 0.0f) : 0.0f;
    }
    DEVICE float worth(float code) const { return code; }
    template <int ROWS, bool MANY> DEVICE void write(const Place&, int, const float (&)[ROWS][4]) const {}
};

// How much the threads before this one have together, and all of them. ``shared`` has room for a number of each warp.
struct Before {
    unsigned here, all;
};
DEVICE Before before(unsigned mine, unsigned* shared) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const auto up_to = [lane](unsigned sum) {
        for (unsigned apart = 1; apart < WARP; apart *= 2) {
            const unsigned lower = __shfl_up_sync(EVERYONE, sum, apart);
            if (lane >= apart) sum += lower;
        }
        return sum;
    };
    const unsigned in_warp = up_to(mine);
    if (lane == WARP - 1) shared[warp] = in_warp;
    __syncthreads();
    const unsigned of_warps = up_to(lane < TOPK_WARPS ? shared[lane] : 0);
    const unsigned lower_warps = __shfl_sync(EVERYONE, of_warps, int(warp > 0 ? warp - 1 : 0));
    return {in_warp - mine + (warp > 0 ? lower_warps : 0), __shfl_sync(EVERYONE, of_warps, int(WARP - 1))};
}

struct Workspace {
    unsigned histogram[BUCKETS * COPIES]; // copies side by side, so that alike neighbours do not queue for one counter
    unsigned chosen[TILE / 32];
    unsigned sums[2][TOPK_WARPS]; // in turns: one is read while the other is filled
    unsigned threshold, room, bad;
};

// Step 1.
template <int ROWS>
DEVICE void count_magnitudes(const EncodeJob& job, unsigned message, const Tile& tile, Workspace& at) {
    for (unsigned i = threadIdx.x; i < BUCKETS * COPIES; i += TOPK_THREADS) at.histogram[i] = 0;
    for (unsigned i = threadIdx.x; i < TILE / 32; i += TOPK_THREADS) at.chosen[i] = 0;
    __syncthreads();
    for (unsigned first = threadIdx.x / TEAM * (ROWS * LANES); first < tile.length;
         first += TOPK_THREADS / TEAM * (ROWS * LANES)) {
        Place place(job, message, (tile.start + first) / unsigned(job.block), true);
        place.element = static_cast<long long>(tile.start) + first + 4 * thread_of_team();
        Due<ROWS> it;
        read(job, place, 0, it);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                atomicAdd(&at.histogram[(magnitude(it.h[r][c]) >> SHIFT) * COPIES + threadIdx.x % COPIES], 1u);
    }
    __syncthreads();

    // From the highest bucket down, four to a thread.
    constexpr unsigned OF_EACH = BUCKETS / TOPK_THREADS;
    const unsigned highest = BUCKETS - 1 - OF_EACH * threadIdx.x;
    unsigned counts[OF_EACH], all = 0;
    for (unsigned i = 0; i < OF_EACH; ++i) {
        counts[i] = 0;
        for (unsigned copy = 0; copy < COPIES; ++copy) counts[i] += at.histogram[(highest - i) * COPIES + copy];
        all += counts[i];
    }
    unsigned higher = before(all, at.sums[0]).here;
    for (unsigned i = 0; i < OF_EACH; ++i) {
        if (highest - i == FIRST_INFINITE) at.bad = higher + counts[i];
        if (higher < tile.kept && higher + counts[i] >= tile.kept)
            at.threshold = highest - i, at.room = tile.kept - higher;
        higher += counts[i];
    }
    __syncthreads();
}

// Step 2.
DEVICE void choose(const EncodeJob& job, unsigned message, const Tile& tile, Workspace& at) {
    unsigned larger_before = 0, alike_before = 0;
    bool odd = true; // sums[0] was used last
    const auto place_of = [&](unsigned mine) {
        Place place(job, message, (tile.start + mine) / unsigned(job.block), mine < tile.length);
        place.element = static_cast<long long>(tile.start) + mine;
        return place;
    };
    // What comes next is on its way while counts go from thread to thread.
    Place place = place_of(4 * threadIdx.x);
    Operands<1> next;
    fetch(job, place, 0, next);
    for (unsigned first = 0; first < tile.length; first += 4 * TOPK_THREADS, odd = !odd) {
        const unsigned mine = first + 4 * threadIdx.x;
        unsigned larger = 0, alike = 0;
        Due<1> it;
        add_up(job, place, next, it);
        place = place_of(mine + 4 * TOPK_THREADS);
        fetch(job, place, 0, next);
        if (mine < tile.length) {
            for (int c = 0; c < 4; ++c) {
                const unsigned bucket = magnitude(it.h[0][c]) >> SHIFT;
                larger |= unsigned(bucket > at.threshold) << c;
                alike |= unsigned(bucket == at.threshold) << c;
            }
        }
        // Both counts in one word: neither exceeds 2,048.
        const Before sums = before(unsigned(__popc(larger)) << 16 | unsigned(__popc(alike)), at.sums[odd]);
        unsigned larger_here = larger_before + (sums.here >> 16), alike_here = alike_before + (sums.here & 0xffffu);
        unsigned chosen = 0;
        for (int c = 0; c < 4; ++c) {
            const bool is_larger = larger >> c & 1, is_alike = alike >> c & 1;
            if (is_larger || (is_alike && alike_here < at.room)) {
                const unsigned to = larger_here + min(alike_here, at.room);
                tile.positions[to] = (unsigned short)(mine + c);
                tile.values[to] = (unsigned short)(bf16_pair(add(as_bf16(it.h[0][c]), 0.0f), 0.0f));
                chosen |= 1u << c;
            }
            larger_here += is_larger, alike_here += is_alike;
        }
        if (chosen) atomicOr(&at.chosen[mine / 32], chosen << mine % 32);
        larger_before += sums.all >> 16, alike_before += sums.all & 0xffffu;
    }
    __syncthreads();
}

template <int ROWS, bool MANY>
__global__ void __launch_bounds__(TOPK_THREADS) encode_topk_kernel(const EncodeJob job) {
    __shared__ Workspace at;
    const unsigned tiles = unsigned((job.n + TILE - 1) / TILE);
    for (unsigned unit = blockIdx.x; unit < tiles * job.messages; unit += gridDim.x) {
        const unsigned message = unit / tiles;
        const Tile tile(unit % tiles, job.n, job.message + message * job.message_stride);
        count_magnitudes<ROWS>(job, message, tile, at);
        if (at.bad > 0) {
            for (unsigned i = threadIdx.x; i < tile.kept; i += TOPK_THREADS)
                tile.positions[i] = (unsigned short)i, tile.values[i] = (unsigned short)(NOT_A_NUMBER >> 16);
        } else {
            choose(job, message, tile, at);
            const unsigned first = tile.start / unsigned(job.block), last = first + tile.length / unsigned(job.block);
            const unsigned pair = first + threadIdx.x / WARP * 2;
            for (unsigned block = pair; job.residual.dtype != Dtype::none && block < last; block += 2 * TOPK_WARPS) {
                Chosen codec(at.chosen);
                const unsigned mine = block + team_of_warp();
                encode_block<Chosen, ROWS, MANY>(job, Place(job, message, mine, mine < last), codec);
            }
        }
        __syncthreads(); // before the next tile takes the workspace
    }
}

// Decoding: a thread block has 4,096 elements of the sum in registers. The entries of a message that are among them are
// put where their elements are, in an array of zeros, and all of it is added, zeros too, as the definition does: it
// makes 0 of a sum that is -0.

constexpr unsigned STRETCH_ROWS = STRETCH / (4 * TOPK_THREADS);

struct Spread {
    // In turns: one is added, and zeroed, while the other is filled. Read as float4, which want more than a float's own.
    alignas(16) float at[2][STRETCH];
};

__global__ void __launch_bounds__(TOPK_THREADS) decode_topk_kernel(const DecodeJob job) {
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

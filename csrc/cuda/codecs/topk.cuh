// topk: of each tile of 65,536 elements the largest hundredth (compression/codecs.py). One thread block has one tile:
//     1. It counts how many elements there are in each of 2,048 buckets of magnitude. Now and then it takes from that a
//        bound that the threshold cannot be below. Only what is above the bound is counted from then on, and what is
//        not below it is noted: the candidates.
//     2. The last bound is the threshold. Candidates become two maps of the tile's elements: who is above it, and who is
//        at it. From these comes the order of positions, and who of those at the threshold still has a place.
//     3. What is sent is read once more, and so is the tile for what is left of each block, as after any other codec
//        (block.cuh).
// Of usual numbers 3,000 to 4,000 are candidates. Where there is no room for all, as where most elements are 0, the maps
// are made by going over the tile again.
#pragma once

#include "block.cuh"
#include "codecs/tile.cuh"

namespace yafsdp_cc {

constexpr int TOPK_WARPS = TOPK_THREADS / 32;
constexpr unsigned BUCKETS = 2048, SHIFT = 20, COPIES = 2, FIRST_INFINITE = (INFINITE >> SHIFT) - 1;
constexpr unsigned CANDIDATES = 7168;

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

// Of a warp: what the threads up to this one have together, its own included.
DEVICE unsigned up_to_this(unsigned sum) {
    for (unsigned apart = 1; apart < WARP; apart *= 2) {
        const unsigned lower = __shfl_up_sync(EVERYONE, sum, apart);
        if (threadIdx.x % WARP >= apart) sum += lower;
    }
    return sum;
}

// How much the threads before this one have together, and all of them. ``shared`` has room for a number of each warp.
struct Before {
    unsigned here, all;
};
DEVICE Before before(unsigned mine, unsigned* shared) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, in_warp = up_to_this(mine);
    if (lane == WARP - 1) shared[warp] = in_warp;
    __syncthreads();
    const unsigned of_warps = up_to_this(lane < TOPK_WARPS ? shared[lane] : 0);
    const unsigned lower_warps = __shfl_sync(EVERYONE, of_warps, int(warp > 0 ? warp - 1 : 0));
    return {in_warp - mine + (warp > 0 ? lower_warps : 0), __shfl_sync(EVERYONE, of_warps, int(WARP - 1))};
}

struct Workspace {
    union { // one after the other
        alignas(16) unsigned histogram[BUCKETS][COPIES]; // alike neighbours do not all queue for one counter
        struct {
            unsigned larger[TILE / 32], alike[TILE / 32]; // a bit for each element; the chosen are added to the first
        };
    };
    unsigned candidates[CANDIDATES]; // bucket and position; later, positions in the order of the message
    unsigned sums[TOPK_WARPS];
    unsigned bound, room, bad, found;
};

// A larger bound, if the elements that have been counted, which lie above ``bound``, give one; at the end the threshold.
DEVICE unsigned raised(unsigned bound, unsigned kept, Workspace& at) {
    constexpr unsigned OF_EACH = BUCKETS / TOPK_THREADS;
    static_assert(OF_EACH == 4 && COPIES == 2, "a thread reads four pairs");
    __syncthreads();
    const unsigned lowest = BUCKETS - OF_EACH * (threadIdx.x + 1); // of this thread's: the highest are the first one's
    const uint4* const from = reinterpret_cast<const uint4*>(at.histogram[lowest]);
    const uint4 low = from[0], high = from[1];
    unsigned counts[OF_EACH] = {low.x + low.y, low.z + low.w, high.x + high.y, high.z + high.w}, all = 0;
#pragma unroll
    for (unsigned i = 0; i < OF_EACH; ++i) {
        if (lowest + i <= bound) counts[i] = 0;
        all += counts[i];
    }
    const Before sums = before(all, at.sums);
    unsigned higher = sums.here;
#pragma unroll
    for (unsigned i = OF_EACH; i-- > 0;) {
        const unsigned bucket = lowest + i, with_it = higher + counts[i];
        if (bucket == FIRST_INFINITE) at.bad = with_it > 0 || bound >= FIRST_INFINITE;
        if (higher < kept && with_it >= kept) at.bound = bucket, at.room = kept - higher;
        higher = with_it;
    }
    if (threadIdx.x == 0 && sums.all < kept) at.room = kept - sums.all; // of those at the bound, which stays
    __syncthreads();
    return at.bound;
}

// The tile patch by patch, each team one at a time: ``take(buckets, first, exists, step, is_last)``, where ``first`` is
// the position of the thread's first element. All threads take part in every step.
template <int ROWS, class Take>
DEVICE void go_over(const EncodeJob& job, unsigned message, const Tile& tile, const Take& take) {
    constexpr unsigned STEP = TOPK_THREADS / TEAM * (ROWS * LANES);
    unsigned step = 1;
    for (unsigned begin = 0; begin < tile.length; begin += STEP, ++step) {
        const unsigned first = begin + threadIdx.x / TEAM * (ROWS * LANES);
        Place place(job, message, unsigned((tile.start + first) / job.block), first < tile.length);
        place.element = tile.start + first + 4 * thread_of_team();
        Due<ROWS> it;
        read(job, place, 0, it);
        unsigned buckets[ROWS][4];
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) buckets[r][c] = magnitude(it.h[r][c]) >> SHIFT;
        take(buckets, first + 4 * thread_of_team(), place.exists, step, begin + STEP >= tile.length);
    }
}

// Step 1. The threshold is left in at.bound.
template <int ROWS>
DEVICE void find_candidates(const EncodeJob& job, unsigned message, const Tile& tile, Workspace& at) {
    for (unsigned i = threadIdx.x; i < BUCKETS * COPIES; i += TOPK_THREADS) at.histogram[i / COPIES][i % COPIES] = 0;
    if (threadIdx.x == 0) at.bound = at.found = 0;
    __syncthreads();
    unsigned bound = 0;
    const auto take = [&](const unsigned(&buckets)[ROWS][4], unsigned first, bool exists, unsigned step, bool is_last) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (exists && buckets[r][c] > bound) atomicAdd(&at.histogram[buckets[r][c]][threadIdx.x % COPIES], 1u);
        if (is_last || (step & (step - 1)) == 0) bound = raised(bound, tile.kept, at);
        unsigned mine = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) mine += exists && buckets[r][c] >= bound;
        const unsigned up_to = up_to_this(mine);
        unsigned to = 0;
        if (threadIdx.x % WARP == WARP - 1) to = atomicAdd(&at.found, up_to);
        to = __shfl_sync(EVERYONE, to, int(WARP - 1)) + up_to - mine;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (exists && buckets[r][c] >= bound) {
                    if (to < CANDIDATES) at.candidates[to] = buckets[r][c] << 16 | (first + r * LANES + c);
                    ++to;
                }
    };
    go_over<ROWS>(job, message, tile, take);
}

// Step 2, the maps.
template <int ROWS>
DEVICE void map_candidates(const EncodeJob& job, unsigned message, const Tile& tile, Workspace& at) {
    for (unsigned i = threadIdx.x; i < TILE / 32; i += TOPK_THREADS) at.larger[i] = at.alike[i] = 0;
    __syncthreads();
    const unsigned threshold = at.bound, found = at.found;
    const auto note = [&](unsigned bucket, unsigned position) {
        if (bucket >= threshold)
            atomicOr(bucket > threshold ? &at.larger[position / 32] : &at.alike[position / 32], 1u << position % 32);
    };
    if (found <= CANDIDATES) {
        for (unsigned i = threadIdx.x; i < found; i += TOPK_THREADS)
            note(at.candidates[i] >> 16, at.candidates[i] & 0xffffu);
    } else {
        go_over<ROWS>(job, message, tile,
                      [&](const unsigned(&buckets)[ROWS][4], unsigned first, bool exists, unsigned, bool) {
#pragma unroll
                          for (int r = 0; r < ROWS; ++r)
#pragma unroll
                              for (int c = 0; c < 4; ++c)
                                  if (exists) note(buckets[r][c], first + r * LANES + c);
                      });
    }
    __syncthreads();
}

// Step 2, the order.
DEVICE void choose(Workspace& at) {
    constexpr unsigned OF_EACH = TILE / 32 / TOPK_THREADS; // words
    const unsigned first = threadIdx.x * OF_EACH, room = at.room;
    unsigned counts = 0;
    for (unsigned i = first; i < first + OF_EACH; ++i)
        counts += unsigned(__popc(at.alike[i])) << 16 | unsigned(__popc(at.larger[i]));
    // Both counts in one word: those larger are fewer than 656, and those alike that are before another thread's fewer
    // than 65,536.
    const unsigned here = before(counts, at.sums).here;
    unsigned larger_here = here & 0xffffu, alike_here = here >> 16;
    for (unsigned i = first; i < first + OF_EACH; ++i) {
        const unsigned alike = at.alike[i];
        unsigned chosen = 0;
        for (unsigned bits = at.larger[i] | (alike_here < room ? alike : 0); bits; bits &= bits - 1) {
            const unsigned bit = bits & (0u - bits);
            const bool is_alike = alike & bit;
            if (!is_alike || alike_here < room) {
                at.candidates[larger_here + min(alike_here, room)] = 32 * i + unsigned(31 - __clz(int(bit)));
                chosen |= bit;
            }
            is_alike ? ++alike_here : ++larger_here;
        }
        at.larger[i] = chosen;
    }
    __syncthreads();
}

// Step 3, the message.
DEVICE void write_chosen(const EncodeJob& job, unsigned message, const Tile& tile, const Workspace& at) {
    for (unsigned i = threadIdx.x; i < tile.kept; i += TOPK_THREADS) {
        const unsigned position = at.candidates[i];
        Place place(job, message, unsigned((tile.start + position) / job.block), true);
        place.element = tile.start + position / 4 * 4;
        Due<1> it;
        read(job, place, 0, it);
        const float(&h)[4] = it.h[0];
        const float even = position & 2 ? h[2] : h[0], odd = position & 2 ? h[3] : h[1];
        tile.positions[i] = (unsigned short)position;
        tile.values[i] = (unsigned short)(bf16_pair(add(as_bf16(position & 1 ? odd : even), 0.0f), 0.0f));
    }
}

template <int ROWS, bool MANY>
__global__ void __launch_bounds__(TOPK_THREADS, 2) encode_topk_kernel(const EncodeJob given) {
    __shared__ Workspace at;
    const EncodeJob job = known(given);
    const unsigned tiles = unsigned((job.n + TILE - 1) / TILE);
    for (unsigned unit = blockIdx.x; unit < tiles * job.messages; unit += gridDim.x) {
        const unsigned message = unit / tiles;
        const Tile tile(unit % tiles, job.n, job.message + message * job.message_stride);
        find_candidates<ROWS>(job, message, tile, at);
        if (at.bad) {
            for (unsigned i = threadIdx.x; i < tile.kept; i += TOPK_THREADS)
                tile.positions[i] = (unsigned short)i, tile.values[i] = (unsigned short)(NOT_A_NUMBER >> 16);
        } else {
            map_candidates<ROWS>(job, message, tile, at);
            choose(at);
            write_chosen(job, message, tile, at);
            __syncthreads(); // before the residual that this has read is another one
            // From the last block to the first: step 1 has read the last ones last, so the L2 still has them. The tiles
            // of all thread blocks together are larger than the L2, which has lost the first blocks of each meanwhile.
            const unsigned blocks = tile.length / unsigned(job.block);
            const unsigned last = unsigned(tile.start / job.block) + blocks - 1;
            for (unsigned pair = threadIdx.x / WARP * 2; job.residual.dtype != Dtype::none && pair < blocks;
                 pair += 2 * TOPK_WARPS) {
                Chosen codec(at.larger);
                const unsigned turn = pair + team_of_warp(); // of an odd number of blocks, the last turn has none
                encode_block<Chosen, ROWS, MANY>(job, Place(job, message, last - turn, turn < blocks), codec);
            }
        }
        __syncthreads(); // before the next tile takes the workspace
    }
}

} // namespace yafsdp_cc

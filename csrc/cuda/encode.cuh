// The kernel that encodes, and the one that accumulates, which encodes into nothing: any codec of blocks.
#pragma once

#include "block.cuh"
#include "codecs/floats.cuh"
#include "codecs/nothing.cuh"
#include "codecs/odd.cuh"
#include "codecs/onebit.cuh"
#include "codecs/ternary.cuh"
#include "codecs/whole.cuh"

namespace yafsdp_cc {

// Every team takes a unit of TOGETHER blocks, then the unit as far ahead as there are teams in the grid.
template <class C, int ROWS, bool MANY>
__global__ void __launch_bounds__(ENCODE_THREADS) encode_kernel(const EncodeJob given) {
    const EncodeJob job = known(given);
    const unsigned blocks = unsigned(job.n / job.block);
    const unsigned of_each = (blocks + C::TOGETHER - 1) / C::TOGETHER, units = of_each * job.messages;
    const unsigned warps = gridDim.x * (ENCODE_THREADS / WARP);
    unsigned warp = (blockIdx.x * ENCODE_THREADS + threadIdx.x) / WARP;
    Walk walk(2 * warp + team_of_warp(), 2 * warps, of_each);
    // Whole warps go round the loop: both their teams are needed for shuffles.
    for (; 2 * warp < units; warp += warps, walk.go_on()) {
        const bool exists = walk.row < job.messages;
        const unsigned message = exists ? walk.row : 0, of_message = exists ? walk.of_row : of_each;
        C codec(job, message);
        for (unsigned i = 0; i < C::TOGETHER; ++i) {
            const unsigned block = of_message * C::TOGETHER + i;
            encode_block<C, ROWS, MANY>(job, Place(job, message, block, block < blocks), codec);
        }
    }
}

} // namespace yafsdp_cc

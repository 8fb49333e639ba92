// The kernel that encodes, and the one that accumulates, which encodes into nothing: any codec of blocks.
#pragma once

#include "block.cuh"
#include "launch.cuh"

namespace yafsdp_cc {

// Few, so that thread blocks fill the registers of a multiprocessor well, and find room next to others.
constexpr int ENCODE_THREADS = 128;

// Every team takes a unit of TOGETHER blocks, then the unit as far ahead as there are teams in the grid.
template <class C, int ROWS, bool MANY>
__global__ void __launch_bounds__(ENCODE_THREADS) encode_kernel(const EncodeJob job) {
    const unsigned blocks = unsigned(job.n / job.block);
    const unsigned of_each = (blocks + C::TOGETHER - 1) / C::TOGETHER, units = of_each * job.messages;
    const unsigned warps = gridDim.x * (ENCODE_THREADS / WARP);
    // Whole warps go round the loop: both their teams are needed for shuffles.
    for (unsigned warp = (blockIdx.x * ENCODE_THREADS + threadIdx.x) / WARP; 2 * warp < units; warp += warps) {
        const unsigned unit = 2 * warp + team_of_warp();
        const unsigned message = unit < units ? unit / of_each : 0;
        const unsigned of_message = unit < units ? unit % of_each : of_each; // one that there is not
        C codec(job, message);
        for (unsigned i = 0; i < C::TOGETHER; ++i) {
            const unsigned block = of_message * C::TOGETHER + i;
            encode_block<C, ROWS, MANY>(job, Place(job, message, block, block < blocks), codec);
        }
    }
}

template <class C> const char* launch_encode(const EncodeJob& job, void* stream) {
    const unsigned long long units = (job.n / job.block + C::TOGETHER - 1) / C::TOGETHER * job.messages;
    const unsigned long long most = (units * TEAM + ENCODE_THREADS - 1) / ENCODE_THREADS;
    if (job.block == 64) return launch(encode_kernel<C, 1, false>, job, most, ENCODE_THREADS, stream);
    if (job.block == 128) return launch(encode_kernel<C, 2, false>, job, most, ENCODE_THREADS, stream);
    if (job.block == 256) return launch(encode_kernel<C, 4, false>, job, most, ENCODE_THREADS, stream);
    return launch(encode_kernel<C, 4, true>, job, most, ENCODE_THREADS, stream);
}

// In files of their own, so that they are compiled at the same time.
const char* encode_steps(const EncodeJob& job, CodecNumber codec, void* stream); // int8, int4, fp8
const char* encode_signs(const EncodeJob& job, CodecNumber codec, void* stream); // ternary, onebit

} // namespace yafsdp_cc

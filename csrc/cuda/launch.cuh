// How many thread blocks a kernel is given, and its launch.
//
// The kernels go round a loop, so that a grid of any size does the work. They move memory and nothing else, and a GPU
// has more multiprocessors than it takes to keep its memory busy: of an H200 (4.8 TB/s, latency near 0.8 µs) some 4 MB
// have to be under way. A thread that encodes has up to 128 bytes of loads under way, 600 to 750 threads fit on a
// multiprocessor, and about half of them wait for loads at a time: 80 to 100 of the 132. So by default the grid is what
// fits on three quarters of them, and the rest is left to a matmul that runs at the same time. YAFSDP_CC_CUDA_SMS=n
// makes it what fits on n. All this is reckoned, not measured: bench/kernels.py measures.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "numbers.cuh"

namespace yafsdp_cc {

#ifndef YAFSDP_CC_SIMT // else the emulator's own

template <class Job>
const char* launch(void (*kernel)(Job), const Job& job, unsigned long long most, int threads, void* stream) {
    if (most == 0) return nullptr;
    int device = 0, processors = 0, on_each = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&on_each, kernel, threads, 0);
    if (error == cudaSuccess) {
        const char* asked = std::getenv("YAFSDP_CC_CUDA_SMS");
        const int used = asked && std::atoi(asked) > 0 ? std::min(std::atoi(asked), processors) : processors * 3 / 4;
        const unsigned long long grid = std::min<unsigned long long>(most, std::max(1, used * on_each));
        void* arguments[] = {const_cast<Job*>(&job)};
        error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(grid)), dim3(unsigned(threads)),
                                 arguments, 0, static_cast<cudaStream_t>(stream));
    }
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#endif

} // namespace yafsdp_cc

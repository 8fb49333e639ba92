// The kernels that the emulated driver can launch.
#pragma once

#include <iterator>

struct Kernel {
    const char* name; // as csrc/cuda/launch.cpp spells it
    const void* address;
    void (*run)(const void* job);
};

const Kernel* simt_kernels(unsigned& count);

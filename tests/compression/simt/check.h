// The checks of what kernels access, and what they ask of the emulator.
#pragma once

#include "simt.h"

constexpr unsigned WARP = 32;

// Begin a launch; a thread block, which does not see the shared memory of another.
void check_launch();
void check_block(unsigned threads);
// All threads of the warp, or of the block, have come.
void check_warp_barrier();
void check_barrier();

// Ends the kernel with an error.
void simt_fail(const char* format, ...);
bool simt_is_running();
bool simt_is_private(const void* at);

extern "C" {
struct Extent {
    std::uintptr_t begin, end;
    bool writable;
};
// What kernels may access from now on.
void simt_allow(const Extent* extents, unsigned count);
void simt_seed(unsigned seed);
}

// A GPU made of one CPU thread, for tests: what csrc/cuda uses of CUDA, so that the very same source runs here.
//
// Every thread of a thread block is a fibre with a stack of its own. It runs until it meets others, in a shuffle or at
// a barrier, and all that meet there have to come: threads that do not are a deadlock, which is reported, as is a warp
// whose threads meet in different places. Which thread and which thread block runs first, and how many thread blocks
// there are, is drawn anew every time.
//
// Every load and store of a kernel is checked (check.cpp): it lies in a tensor of the call, or in shared memory; shared
// memory was written by this thread block before; and what two threads access, one of them to write, has a barrier
// between. Accesses of 16 bytes at odd addresses, indices out of an array and overflows are errors. Shared memory and
// local variables hold a pattern until they are written.
//
// Arithmetic is the CPU's, with -ffp-contract=off: one IEEE rounding for each operation, denormals kept. Of NaNs only
// that they are is told; their bits are not those of a GPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
// One thread block runs at a time. These variables are the only ones of a thread in this library, so its segment of
// them is the shared memory: its bounds are known, and it can be filled.
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim {
    unsigned x;
};
struct dim3 : Dim {
    explicit dim3(unsigned x_) : Dim{x_} {}
};
extern Dim threadIdx, blockIdx, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int simt_int(float whole) {
    return std::isnan(whole) ? 0 : whole >= 0x1p31f ? INT32_MAX : whole <= -0x1p31f ? INT32_MIN : int(whole);
}
inline int __float2int_rn(float x) { return simt_int(std::nearbyint(x)); }
inline int __float2int_rd(float x) { return simt_int(std::floor(x)); }
inline int __clz(int bits) { return bits ? __builtin_clz(unsigned(bits)) : 32; }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return unsigned((uint64_t(high) << 32 | low) << (by & 31) >> 32);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned word = 0;
    for (int i = 0; i < 4; ++i) word |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return word;
}

// Small floats, from their definitions: a double holds what is halfway between two of them exactly.

inline unsigned simt_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    return std::isnan(x) ? 0x7fff : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
inline float simt_of_fp16(unsigned bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                        : exponent     ? std::ldexp(1024 + mantissa, exponent - 25)
                                       : std::ldexp(mantissa, -24);
    return float(bits >> 15 ? -size : size);
}
inline unsigned simt_fp16(float x) {
    const unsigned sign = __float_as_uint(x) >> 16 & 0x8000u;
    const double size = std::fabs(double(x));
    if (std::isnan(x)) return 0x7fff;
    if (size >= 65520) return sign | 0x7c00u;
    const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
    // In units of the last place; a carry into the exponent comes out right by itself.
    const unsigned steps = unsigned(std::nearbyint(std::ldexp(size, 10 - exponent)));
    return sign | (unsigned(exponent + 14) * 1024 + steps);
}

// Meeting

enum class Meeting : unsigned { exchange_xor, exchange_up, exchange, warp, block };

// Waits for the others of the warp; all have to bring the same ``about``. What each of the 32 brought.
const unsigned* simt_meet(Meeting meeting, unsigned about, unsigned brought);
void simt_meet_block();

inline unsigned simt_lane() { return threadIdx.x % 32; }
inline unsigned __shfl_xor_sync(unsigned, unsigned word, int apart) {
    return simt_meet(Meeting::exchange_xor, unsigned(apart), word)[simt_lane() ^ unsigned(apart)];
}
inline float __shfl_xor_sync(unsigned everyone, float x, int apart) {
    return __uint_as_float(__shfl_xor_sync(everyone, __float_as_uint(x), apart));
}
inline unsigned __shfl_up_sync(unsigned, unsigned word, unsigned apart) {
    const unsigned lane = simt_lane(), from = lane >= apart ? lane - apart : lane;
    return simt_meet(Meeting::exchange_up, apart, word)[from];
}
inline unsigned __shfl_sync(unsigned, unsigned word, int from) {
    return simt_meet(Meeting::exchange, 0, word)[from % 32];
}
inline void __syncwarp() { simt_meet(Meeting::warp, 0, 0); }
inline void __syncthreads() { simt_meet_block(); }

void simt_atomic(const void* at, unsigned bytes);

[[gnu::no_sanitize("thread")]] inline unsigned atomicAdd(unsigned* at, unsigned by) {
    simt_atomic(at, 4);
    return (*at += by) - by;
}
[[gnu::no_sanitize("thread")]] inline void atomicOr(unsigned* at, unsigned bits) {
    simt_atomic(at, 4);
    *at |= bits;
}

// Launching

// Runs 1 to ``most`` thread blocks, seldom as many as there is work for: then each goes round its loop several times.
const char* simt_run(unsigned long long most, unsigned threads, void (*body)(const void*), const void* context);

template <auto KERNEL> struct Emulated;
template <class Job, void (*KERNEL)(Job)> struct Emulated<KERNEL> {
    [[gnu::no_sanitize("thread")]] static void run(const void* job) { // which is not in a tensor
        KERNEL(*static_cast<const Job*>(job));
    }
};

// Arithmetic that is the same on every machine: one rounding for each operation, denormals kept; and small floats.
//
// No operation here may become part of a fused multiply-add: the formats fix every rounding.
#pragma once

#ifdef YAFSDP_CC_SIMT
#include YAFSDP_CC_SIMT // the tests' emulator: the same source on a CPU
#endif

#define DEVICE __device__ __forceinline__

namespace yafsdp_cc {

DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }

constexpr unsigned MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u;

// Bits of a magnitude: as integers they are ordered as the magnitudes are, infinity and then NaN on top.
DEVICE unsigned magnitude(float x) { return __float_as_uint(x) & MAGNITUDE; }
DEVICE bool is_finite(float x) { return magnitude(x) < INFINITE; }
DEVICE float nan() { return __uint_as_float(NOT_A_NUMBER); }

DEVICE int clamped(int x, int levels) { return max(-levels, min(levels, x)); }

// Two of 16 bits, nearest even, the first one low. PTX, as the headers of CUDA's small floats are not everywhere.
#ifdef YAFSDP_CC_SIMT
DEVICE unsigned bf16_pair(float low, float high) { return simt_bf16(low) | unsigned(simt_bf16(high)) << 16; }
DEVICE unsigned fp16_pair(float low, float high) { return simt_fp16(low) | unsigned(simt_fp16(high)) << 16; }
DEVICE float of_fp16(unsigned bits) { return simt_of_fp16(bits); }
#else
DEVICE unsigned bf16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE unsigned fp16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
DEVICE float of_fp16(unsigned bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
#endif
DEVICE float of_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
DEVICE float as_bf16(float x) { return of_bf16(bf16_pair(x, 0.0f) & 0xffffu); }

// e4m3 (no infinity, one NaN), nearest even, of what is at most 448.
DEVICE unsigned as_fp8(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80u, rest = bits & MAGNITUDE;
    // Below 2^-6, steps are 2^-9 throughout: in a sum with 2^14 they are its last bit.
    const unsigned fixed = __float_as_uint(add(__uint_as_float(rest), 16384.0f)) - __float_as_uint(16384.0f);
    const unsigned floating = ((rest + 0x7ffffu + (rest >> 20 & 1u)) >> 20) - (120u << 3);
    return sign | (rest < 0x3c800000u ? fixed : floating);
}
DEVICE float of_fp8(unsigned code) {
    // Its exponent and mantissa, put where fp32 has them, are 2^-120 of the value, denormal where e4m3 is.
    const float value = mul(__uint_as_float((code & 0x7fu) << 20), 0x1p120f);
    const unsigned bits = (code & 0x7fu) == 0x7fu ? NOT_A_NUMBER : __float_as_uint(value);
    return __uint_as_float(bits | (code & 0x80u) << 24);
}

// The noise of element ``index``: in [0, 1), a multiple of 2^-24.
DEVICE float noise(unsigned index, unsigned seed) {
    unsigned word = index ^ seed;
    word = (word ^ word >> 16) * 0x7feb352du;
    word = (word ^ word >> 15) * 0x846ca68bu;
    return mul(float((word ^ word >> 16) >> 8), 0x1p-24f);
}

} // namespace yafsdp_cc

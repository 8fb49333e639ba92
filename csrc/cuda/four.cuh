// Elements of an optimizer's arrays, four at a time, as fp32.
#pragma once

#include "jobs.h"
#include "numbers.cuh"

namespace yafsdp_cc {

DEVICE float load_one(const void* data, Dtype dtype, long long at) {
    if (dtype == Dtype::fp32) return static_cast<const float*>(data)[at];
    const unsigned bits = static_cast<const unsigned short*>(data)[at];
    return dtype == Dtype::bf16 ? of_bf16(bits) : of_fp16(bits);
}

DEVICE void store_one(void* data, Dtype dtype, long long at, float x) {
    if (dtype == Dtype::fp32)
        static_cast<float*>(data)[at] = x;
    else
        static_cast<unsigned short*>(data)[at] =
            (unsigned short)(dtype == Dtype::bf16 ? bf16_pair(x, 0.0f) : fp16_pair(x, 0.0f));
}

// Four elements from ``at``; ``wide``: in one load.
DEVICE void load_four(const void* data, Dtype dtype, long long at, int n, bool wide, float (&to)[4]) {
    if (wide && dtype == Dtype::fp32) {
        const float4 four = static_cast<const float4*>(data)[at / 4];
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else if (wide) {
        const uint2 four = static_cast<const uint2*>(data)[at / 4];
        const unsigned bits[4] = {four.x & 0xffffu, four.x >> 16, four.y & 0xffffu, four.y >> 16};
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = dtype == Dtype::bf16 ? of_bf16(bits[i]) : of_fp16(bits[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = i < n ? load_one(data, dtype, at + i) : 0.0f;
    }
}

DEVICE void store_four(void* data, Dtype dtype, long long at, int n, bool wide, const float (&x)[4]) {
    if (wide && dtype == Dtype::fp32) {
        static_cast<float4*>(data)[at / 4] = make_float4(x[0], x[1], x[2], x[3]);
    } else if (wide) {
        const bool bf16 = dtype == Dtype::bf16;
        static_cast<uint2*>(data)[at / 4] = make_uint2(bf16 ? bf16_pair(x[0], x[1]) : fp16_pair(x[0], x[1]),
                                                       bf16 ? bf16_pair(x[2], x[3]) : fp16_pair(x[2], x[3]));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < n) store_one(data, dtype, at + i, x[i]);
    }
}

} // namespace yafsdp_cc

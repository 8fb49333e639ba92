// Formats of numbers, by integer arithmetic that every instruction set has and every compiler turns into vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "level.h"

namespace yafsdp_cc::cpu {
namespace {

constexpr uint32_t kSign = 0x80000000, kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
constexpr float kSmallest = 0x1p-126f;  // that is normal
constexpr int64_t kLanes = 64;
constexpr int64_t kLargestBlock = 4096;

// A loop over a multiple of 64 elements that do not depend on each other.
#if defined(__clang__)
#define YAFSDP_CC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define YAFSDP_CC_INDEPENDENT _Pragma("GCC ivdep")
#endif

template <class Body>
inline __attribute__((always_inline)) void each(int64_t n, Body body) {
    for (int64_t row = 0; row < n; row += kLanes) {
        YAFSDP_CC_INDEPENDENT
        for (int64_t lane = 0; lane < kLanes; ++lane) body(row + lane);
    }
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float magnitude(float x) { return float_of(bits_of(x) & kMagnitude); }
inline bool is_finite(float x) { return (bits_of(x) & kMagnitude) < kInfinity; }

// Scales lie anywhere in a message.
inline float read_float(const uint8_t* from) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline void write_float(uint8_t* to, float x) { std::memcpy(to, &x, sizeof x); }

// x to the nearest whole number, ties to even, for |x| < 2^22: the sum has no room for what is behind the point. What
// is then above the bits of kRound is that number.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
inline int32_t whole(float rounding) {
    return static_cast<int32_t>(bits_of(rounding)) - static_cast<int32_t>(0x4b400000);
}

inline uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & kMagnitude) > kInfinity ? 0x7fc0 : rounded);
}

inline float from_bf16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_f16(float x) {
    const uint32_t bits = bits_of(x), size = bits & kMagnitude;
    const uint32_t normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
    const uint32_t small = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);  // in steps of 2^-24
    uint32_t half = size < (113u << 23) ? small : normal;
    half = size >= (143u << 23) || half > 0x7c00 ? 0x7c00 : half;
    half = size > kInfinity ? 0x7e00 : half;
    return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

inline float from_f16(uint16_t x) {
    const uint32_t size = x & 0x7fff;
    const uint32_t shifted = size << 13;
    const uint32_t normal = shifted + ((size >= 0x7c00 ? 224u : 112u) << 23);
    const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f;
    return float_of((size < 0x400 ? bits_of(small) : normal) | (static_cast<uint32_t>(x & 0x8000) << 16));
}

// One type for each way in which numbers are stored.
struct F32 {
    using Stored = float;
    static float load(float x) { return x; }
    static float store(float x) { return x; }
};

struct BF16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return from_bf16(x); }
    static uint16_t store(float x) { return to_bf16(x); }
};

struct F16 {
    using Stored = uint16_t;
    static float load(uint16_t x) { return from_f16(x); }
    static uint16_t store(float x) { return to_f16(x); }
};

// The largest magnitude; not finite if one of them is not.
inline float largest_of(const float* x, int64_t n) {
    int32_t largest = 0;
    for (int64_t row = 0; row < n; row += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int32_t size = static_cast<int32_t>(bits_of(x[row + lane]) & kMagnitude);
            largest = size > largest ? size : largest;
        }
    }
    return float_of(static_cast<uint32_t>(largest));
}

// The sum of term(0) ... term(n - 1) in the order of the format: 64 lanes, then halves.
template <class Term>
inline __attribute__((always_inline)) float block_sum(int64_t n, Term term) {
    alignas(64) float lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = term(lane);
    for (int64_t row = kLanes; row < n; row += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(row + lane);
    for (int64_t lane = 0; lane < 32; ++lane) lanes[lane] += lanes[lane + 32];
    for (int64_t lane = 0; lane < 16; ++lane) lanes[lane] += lanes[lane + 16];
    for (int64_t lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
    for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// A scale that is `share` of `size`, and its inverse; or with which `largest` becomes `levels`. Both are 0 where the
// scale would be denormal.
struct Step {
    float scale, inverse;
};

inline Step step_by_share(float size, float share) {
    float scale = size * share;
    if (scale < kSmallest) scale = 0.0f;
    return {scale, scale > 0.0f ? 1.0f / scale : 0.0f};
}

inline Step step_of(float largest, float levels) { return step_by_share(largest, 1.0f / levels); }

}  // namespace
}  // namespace yafsdp_cc::cpu

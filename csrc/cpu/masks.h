// A bit for each of 64 numbers: the one thing that compilers do not make of a loop.
#pragma once

#include "numbers.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace yafsdp_cc::cpu {
namespace {

// Which are negative, -0.0 too.
inline uint64_t signs(const float* x) {
    uint64_t mask = 0;
#if defined(__AVX512DQ__)
    for (int i = 0; i < 64; i += 16) {
        mask |= static_cast<uint64_t>(_mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(x + i)))) << i;
    }
#elif defined(__AVX2__)
    for (int i = 0; i < 64; i += 8) {
        mask |= static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(x + i)))) << i;
    }
#else
    for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(bits_of(x[i]) >> 31) << i;
#endif
    return mask;
}

// Whose magnitude, as an integer, is at least `low`.
inline uint64_t at_least(const float* x, int32_t low) {
    uint64_t mask = 0;
#if defined(__AVX512F__)
    const __m512i magnitude = _mm512_set1_epi32(static_cast<int32_t>(kMagnitude)), least = _mm512_set1_epi32(low);
    for (int i = 0; i < 64; i += 16) {
        const __m512i size = _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x + i)), magnitude);
        mask |= static_cast<uint64_t>(_mm512_cmpge_epi32_mask(size, least)) << i;
    }
#elif defined(__AVX2__)
    const __m256i magnitude = _mm256_set1_epi32(static_cast<int32_t>(kMagnitude)), below = _mm256_set1_epi32(low - 1);
    for (int i = 0; i < 64; i += 8) {
        const __m256i size = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), magnitude);
        const auto found = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(size, below)));
        mask |= static_cast<uint64_t>(static_cast<uint32_t>(found)) << i;
    }
#else
    for (int i = 0; i < 64; ++i) {
        mask |= static_cast<uint64_t>(static_cast<int32_t>(bits_of(x[i]) & kMagnitude) >= low) << i;
    }
#endif
    return mask;
}

}  // namespace
}  // namespace yafsdp_cc::cpu

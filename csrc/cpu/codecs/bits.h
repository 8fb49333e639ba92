// Codes of 1 to 8 bits, cut into planes: split_bits and joined_bits of yafsdp_cc/compression/codec.py.
#pragma once

#include "../blocks.h"

namespace yafsdp_cc::cpu {
namespace {

// Elements of one plane's byte lie n / kEach apart. The loops are over a multiple of 8.
template <class Body>
inline __attribute__((always_inline)) void lanes(int64_t n, Body body) {
    for (int64_t row = 0; row < n; row += 8) {
        YAFSDP_CC_INDEPENDENT
        for (int64_t lane = 0; lane < 8; ++lane) body(row + lane);
    }
}

constexpr int widest(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }

// The planes of kBits bits, of which the lowest is bit kLow of a code.
template <int kBits, int kLow = 0>
void split_bits(const uint8_t* codes, int64_t n, uint8_t* bytes) {
    constexpr int width = widest(kBits), each = 8 / width;
    constexpr uint32_t mask = (1u << width) - 1;
    const int64_t part = n / each;
    lanes(part, [=](int64_t j) {
        uint32_t byte = 0;
        for (int k = 0; k < each; ++k) byte |= (codes[k * part + j] >> kLow & mask) << (k * width);
        bytes[j] = static_cast<uint8_t>(byte);
    });
    if constexpr (kBits > width) split_bits<kBits - width, kLow + width>(codes, n, bytes + part);
}

// Takes the planes of kBits bits, of which the lowest is bit kLow of a code, into `codes`.
template <int kBits, int kLow = 0>
void join_planes(const uint8_t* bytes, int64_t n, uint8_t* codes) {
    constexpr int width = widest(kBits), each = 8 / width;
    constexpr uint32_t mask = (1u << width) - 1;
    const int64_t part = n / each;
    for (int k = 0; k < each; ++k) {
        uint8_t* to = codes + k * part;
        lanes(part, [=](int64_t j) {
            const uint32_t below = kLow > 0 ? to[j] : 0;
            to[j] = static_cast<uint8_t>(below | (bytes[j] >> (k * width) & mask) << kLow);
        });
    }
    if constexpr (kBits > width) join_planes<kBits - width, kLow + width>(bytes + part, n, codes);
}

// Calls sink(element, code).
template <int kBits, class Sink>
inline __attribute__((always_inline)) void join_bits(const uint8_t* bytes, int64_t n, Sink sink) {
    if constexpr (kBits == 8) return each(n, [=](int64_t i) { sink(i, bytes[i]); });
    alignas(64) uint8_t codes[kLargestBlock];
    join_planes<kBits>(bytes, n, codes);
    each(n, [=, joined = static_cast<const uint8_t*>(codes)](int64_t i) { sink(i, joined[i]); });
}

}  // namespace
}  // namespace yafsdp_cc::cpu

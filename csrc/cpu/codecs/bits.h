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
constexpr int narrowest(int bits) { return bits & 1 ? 1 : bits & 2 ? 2 : bits & 4 ? 4 : 8; }

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

// The code of element `from` + j, where `from` is the first of an n / (8 / narrowest)'th.
template <int kBits, int kLow = 0>
inline __attribute__((always_inline)) uint32_t code_at(const uint8_t* bytes, int64_t n, int64_t from, int64_t j) {
    constexpr int width = widest(kBits), each = 8 / width;
    const int64_t part = n / each;
    const uint32_t code = (bytes[from % part + j] >> (from / part * width) & ((1u << width) - 1)) << kLow;
    if constexpr (kBits > width) return code | code_at<kBits - width, kLow + width>(bytes + part, n, from, j);
    return code;
}

// Calls sink(element, code).
template <int kBits, class Sink>
inline __attribute__((always_inline)) void join_bits(const uint8_t* bytes, int64_t n, Sink sink) {
    const int64_t part = n * narrowest(kBits) / 8;
    for (int64_t from = 0; from < n; from += part) {
        lanes(part, [=](int64_t j) { sink(from + j, code_at<kBits>(bytes, n, from, j)); });
    }
}

}  // namespace
}  // namespace yafsdp_cc::cpu

// int4: see yafsdp_cc/compression/codecs/int4.py.
#pragma once

#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

struct Int4 {
    static bool encode(const Block& x, const Place& to) {
        alignas(64) int8_t codes[kLargestBlock];
        const bool finite = whole_steps(x, 7.0f, to.scale(), codes);
        const int64_t half = x.n / 2;
        uint8_t* bytes = to.payload() + to.b * half;
        halves(half, [&](int64_t j) {
            bytes[j] = static_cast<uint8_t>((codes[j] & 15) | static_cast<uint8_t>(codes[half + j]) << 4);
        });
        return finite;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        const int64_t half = n / 2;
        const uint8_t* bytes = from.payload() + from.b * half;
        halves(half, [=](int64_t j) { sink(j, static_cast<float>(((bytes[j] & 15) ^ 8) - 8) * scale); });
        halves(half,
               [=](int64_t j) { sink(half + j, static_cast<float>(static_cast<int8_t>(bytes[j]) >> 4) * scale); });
    }

  private:
    // Half of a block is a multiple of 32.
    template <class Body>
    static inline __attribute__((always_inline)) void halves(int64_t n, Body body) {
        for (int64_t row = 0; row < n; row += 32) {
            YAFSDP_CC_INDEPENDENT
            for (int64_t lane = 0; lane < 32; ++lane) body(row + lane);
        }
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

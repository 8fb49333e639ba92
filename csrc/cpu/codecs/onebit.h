// onebit: see yafsdp_cc/compression/codecs.py.
#pragma once

#include "../masks.h"
#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

struct OneBit {
    static bool encode(const Block& x, const Place& to) {
        const float* h = x.h;
        const float scale = block_sum(x.n, [=](int64_t i) { return magnitude(h[i]); }) / x.size;
        uint8_t* bytes = to.payload() + to.b * (to.block / 8);
        if (mark_nonfinite(to.scale(), scale)) {
            std::memset(bytes, 0, static_cast<size_t>(x.n / 8));
            return false;
        }
        for (int64_t row = 0; row < x.n; row += 64) {
            const uint64_t negative = signs(h + row);
            std::memcpy(bytes + row / 8, &negative, sizeof negative);
        }
        each(x.n, [=, due = x.due, left = x.left, taken = x.taken](int64_t i) {
            left[i] = due[i] - taken * float_of(bits_of(scale) | (bits_of(h[i]) & kSign));
        });
        return true;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const uint32_t scale = bits_of(read_float(from.scale()));
        const uint8_t* bytes = from.payload() + from.b * (from.block / 8);
        for (int64_t row = 0; row < n; row += 32) {
            uint32_t negative;
            std::memcpy(&negative, bytes + row / 8, sizeof negative);
            YAFSDP_CC_INDEPENDENT
            for (int64_t i = 0; i < 32; ++i) sink(row + i, float_of(scale ^ ((negative << (31 - i)) & kSign)));
        }
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

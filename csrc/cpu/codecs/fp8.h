// fp8: see yafsdp_cc/compression/codecs.py.
#pragma once

#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

struct FP8 {
    static bool encode(const Block& x, const Place& to) {
        const Step step = step_of(largest_of(x.h, x.n), 448.0f);
        uint8_t* codes = to.payload() + to.b * to.block;
        if (mark_nonfinite(to.scale(), step.scale)) {
            std::memset(codes, 0, static_cast<size_t>(x.n));
            return false;
        }
        each(x.n, [=, h = x.h](int64_t i) { codes[i] = e4m3(h[i] * step.inverse); });
        each(x.n, [=, due = x.due, left = x.left, taken = x.taken](int64_t i) {
            left[i] = due[i] - taken * (value(codes[i]) * step.scale);
        });
        return true;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        const uint8_t* codes = from.payload() + from.b * from.block;
        each(n, [=](int64_t i) { sink(i, value(codes[i]) * scale); });
    }

  private:
    static uint8_t e4m3(float x) {
        const uint32_t bits = bits_of(x);
        uint32_t size = bits & kMagnitude;
        size = size > 0x43e00000 ? 0x43e00000 : size;  // 448
        const uint32_t normal = (size + 0x7ffff + ((size >> 20) & 1) - (120u << 23)) >> 20;
        const uint32_t small = bits_of(float_of(size) + 0x1p14f) - bits_of(0x1p14f);  // in steps of 2^-9
        return static_cast<uint8_t>((size < (121u << 23) ? small : normal) | (bits >> 24 & 0x80));
    }

    static float value(uint8_t code) {
        const uint32_t size = code & 0x7f;
        const uint32_t normal = (size << 20) + (120u << 23);
        const float small = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
        uint32_t bits = size < 8 ? bits_of(small) : normal;
        bits = size == 0x7f ? 0x7fc00000 : bits;
        return float_of(bits | (static_cast<uint32_t>(code & 0x80) << 24));
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

// int3 and int2: odd multiples of the scale, see _Odd in yafsdp_cc/compression/codecs.py.
#pragma once

#include "bits.h"
#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

template <int kBits>
struct Odd {
    static bool encode(const Block& x, const Place& to) {
        alignas(64) uint8_t codes[kLargestBlock];
        const bool finite = x.noise ? drawn(x, to.scale(), codes) : nearest(x, to.scale(), codes);
        if (!finite) std::memset(codes, 0, static_cast<size_t>(x.n));
        split_bits<kBits>(codes, x.n, to.payload() + to.b * (x.n / 8 * kBits));
        return finite;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        join_bits<kBits>(from.payload() + from.b * (n / 8 * kBits), n,
                         [=](int64_t i, uint32_t code) { sink(i, level(static_cast<float>(code)) * scale); });
    }

  private:
    static constexpr float kLast = (1 << kBits) - 1, kMiddle = 1 << (kBits - 1);
    static constexpr float kShare = kBits == 2 ? 0.624f : 0.367f;

    static float level(float code) { return code * 2.0f - kLast; }

    static bool nearest(const Block& x, uint8_t* scale_to, uint8_t* codes) {
        const float* h = x.h;
        const float mean = block_sum(x.n, [=](int64_t i) { return magnitude(h[i]); }) / x.size;
        const Step step = step_by_share(mean, kShare);
        if (mark_nonfinite(scale_to, step.scale)) return false;
        const float scale = step.scale, inverse = step.inverse;
        each(x.n, [=, due = x.due, left = x.left, taken = x.taken](int64_t i) {
            // An integer holds it: no magnitude is more than the block's elements times their mean.
            const float code = within(below(h[i] * inverse * 0.5f) + kMiddle);
            codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
            left[i] = due[i] - taken * (level(code) * scale);
        });
        return true;
    }

    static bool drawn(const Block& x, uint8_t* scale_to, uint8_t* codes) {
        const Step step = step_of(largest_of(x.h, x.n), kLast);
        if (mark_nonfinite(scale_to, step.scale)) return false;
        each(x.n, [=, h = x.h, noise = x.noise, inverse = step.inverse](int64_t i) {
            const float code = within(below(h[i] * inverse * 0.5f + kLast / 2 + noise[i]));
            codes[i] = static_cast<uint8_t>(static_cast<int32_t>(code));
        });
        return true;
    }

    static float within(float code) { return code > kLast ? kLast : code < 0.0f ? 0.0f : code; }
    static float below(float x) {
        const float whole = static_cast<float>(static_cast<int32_t>(x));
        return whole > x ? whole - 1.0f : whole;
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

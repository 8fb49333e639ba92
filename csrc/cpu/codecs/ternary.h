// ternary: see yafsdp_cc/compression/codecs.py.
#pragma once

#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

struct Ternary {
    static constexpr int64_t kFive = 5;

    static bool encode(const Block& x, const Place& to) {
        alignas(64) int8_t codes[kLargestBlock];  // -1, 0 or 1
        const bool finite = x.noise ? drawn(x, to.scale(), codes) : kept(x, to.scale(), codes);
        if (!finite) std::memset(codes, 0, static_cast<size_t>(x.n));
        // The first of the five puts down the digits of those that the last five lack.
        const int64_t k = to.b % kFive;
        uint32_t digits = 0;
        for (int64_t missing = to.blocks - to.b; k == 0 && missing < kFive; ++missing) digits += weight(missing);
        const auto times = static_cast<uint8_t>(weight(k)), plus = static_cast<uint8_t>(digits + times);
        uint8_t* bytes = to.payload() + (to.b - k) / kFive * to.block;
        if (k == 0) {
            each(x.n, [&](int64_t i) { bytes[i] = static_cast<uint8_t>(codes[i] * times + plus); });
        } else {
            each(x.n, [&](int64_t i) { bytes[i] = static_cast<uint8_t>(bytes[i] + codes[i] * times + plus); });
        }
        return finite;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        const int64_t k = from.b % kFive;
        const uint8_t* bytes = from.payload() + (from.b - k) / kFive * from.block;
        // A byte / 3^k, rounded down, by a multiplication: exact for all 256.
        const uint16_t by = k == 0 ? 1 : k == 1 ? 171 : k == 2 ? 57 : k == 3 ? 19 : 203;
        const int shift = k == 0 ? 0 : k == 4 ? 14 : 9;
        each(n, [=](int64_t i) {
            const auto rest = static_cast<uint16_t>(static_cast<uint16_t>(bytes[i] * by) >> shift);
            const auto third = static_cast<uint16_t>(static_cast<uint16_t>(rest * 171) >> 9);
            sink(i, static_cast<float>(static_cast<int32_t>(rest) - 3 * third - 1) * scale);
        });
    }

  private:
    static uint32_t weight(int64_t k) {
        constexpr uint32_t weights[kFive] = {1, 3, 9, 27, 81};
        return weights[k];
    }

    static bool kept(const Block& x, uint8_t* scale_to, int8_t* codes) {
        const float* h = x.h;
        const float threshold = block_sum(x.n, [=](int64_t i) { return magnitude(h[i]); }) / x.size * 0.7f;
        if (mark_nonfinite(scale_to, threshold)) return false;
        int32_t count = 0;
        const float total = block_sum(x.n, [=](int64_t i) {
            const float size = magnitude(h[i]);
            return size > threshold ? size : 0.0f;
        });
        for (int64_t i = 0; i < x.n; ++i) count += magnitude(h[i]) > threshold;
        const float scale = total / static_cast<float>(count > 1 ? count : 1);
        if (mark_nonfinite(scale_to, scale)) return false;
        each(x.n, [=, due = x.due, left = x.left, taken = x.taken](int64_t i) {
            const int32_t code = magnitude(h[i]) > threshold ? 1 - 2 * static_cast<int32_t>(bits_of(h[i]) >> 31) : 0;
            codes[i] = static_cast<int8_t>(code);
            left[i] = due[i] - taken * (static_cast<float>(code) * scale);
        });
        return true;
    }

    static bool drawn(const Block& x, uint8_t* scale_to, int8_t* codes) {
        const float largest = largest_of(x.h, x.n);
        if (mark_nonfinite(scale_to, largest)) return false;
        each(x.n, [=, h = x.h, noise = x.noise](int64_t i) {
            const bool kept = noise[i] < magnitude(h[i]) / largest;
            codes[i] = static_cast<int8_t>(kept ? 1 - 2 * static_cast<int32_t>(bits_of(h[i]) >> 31) : 0);
        });
        return true;
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

// int8, int6 and int4: whole steps, see _Whole in yafsdp_cc/compression/codecs.py.
#pragma once

#include "bits.h"
#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

template <int kBits>
struct Whole {
    static bool encode(const Block& x, const Place& to) {
        alignas(64) int8_t codes[kLargestBlock];
        uint8_t* bytes = to.payload() + to.b * (x.n / 8 * kBits);
        constexpr int levels = (1 << (kBits - 1)) - 1;
        if constexpr (kBits == 8) return whole_steps(x, levels, to.scale(), reinterpret_cast<int8_t*>(bytes));
        const bool finite = whole_steps(x, levels, to.scale(), codes);
        split_bits<kBits>(reinterpret_cast<const uint8_t*>(codes), x.n, bytes);
        return finite;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        constexpr int sign = 1 << (kBits - 1);
        join_bits<kBits>(from.payload() + from.b * (n / 8 * kBits), n, [=](int64_t i, uint32_t code) {
            sink(i, static_cast<float>((static_cast<int32_t>(code) ^ sign) - sign) * scale);
        });
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

// int8: see yafsdp_cc/compression/codecs/int8.py.
#pragma once

#include "steps.h"

namespace yafsdp_cc::cpu {
namespace {

struct Int8 {
    static bool encode(const Block& x, const Place& to) {
        return whole_steps(x, 127.0f, to.scale(), reinterpret_cast<int8_t*>(to.payload()) + to.b * to.block);
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const float scale = read_float(from.scale());
        const auto* codes = reinterpret_cast<const int8_t*>(from.payload()) + from.b * from.block;
        each(n, [=](int64_t i) { sink(i, static_cast<float>(codes[i]) * scale); });
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

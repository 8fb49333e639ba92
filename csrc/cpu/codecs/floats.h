// fp32 and bf16: see yafsdp_cc/compression/codecs.py.
#pragma once

#include "../blocks.h"

namespace yafsdp_cc::cpu {
namespace {

template <class G>
struct Floats {
    using Stored = typename G::Stored;

    static bool encode(const Block& x, const Place& to) {
        auto* numbers = reinterpret_cast<Stored*>(to.message) + to.b * to.block;
        each(x.n, [=, h = x.h](int64_t i) { numbers[i] = G::store(h[i] == h[i] ? h[i] : float_of(0x7fc00000)); });
        alignas(64) float decoded[kLargestBlock];
        each(x.n, [&](int64_t i) { decoded[i] = G::load(numbers[i]); });
        if (!is_finite(largest_of(decoded, x.n))) return false;
        each(x.n, [&, left = x.left, due = x.due, taken = x.taken](int64_t i) { left[i] = due[i] - taken * decoded[i]; });
        return true;
    }

    template <class Sink>
    static void decode(const Place& from, int64_t n, Sink sink) {
        const auto* numbers = reinterpret_cast<const Stored*>(from.message) + from.b * from.block;
        each(n, [=](int64_t i) { sink(i, G::load(numbers[i])); });
    }
};

}  // namespace
}  // namespace yafsdp_cc::cpu

// Blocks of gradients and residuals, between memory and the first-level cache.
#pragma once

#include "numbers.h"

namespace yafsdp_cc::cpu {
namespace {

// One block on its way into a message.
struct Block {
    const float* h;    // what the message should hold
    const float* due;  // what would be left if the message held nothing
    float* left;       // due - taken * decoded: written unless the block is not finite
    float taken;
    float size;          // how many elements there are, at least 1
    const float* noise;  // for stochastic rounding; null: to nearest
    int64_t n;
};

// Where the block is in its message.
struct Place {
    uint8_t* message;
    int64_t blocks, block, b;

    uint8_t* scale() const { return message + 4 * b; }
    uint8_t* payload() const { return message + 4 * blocks; }
};

// due = e + added * scale * g; and h = scale * g + carry * e, where that is another array.
template <class G, class R>
void load(const Encode& job, int64_t b, float* due, float* h) {
    const int64_t at = b * job.block;
    const auto* g = static_cast<const typename G::Stored*>(job.gradients) + at;
    const float scale = job.scale, carry = job.carry, added = job.added;
    const auto* e = static_cast<const typename R::Stored*>(job.residual.values) + at;
    each(job.block, [=](int64_t i) { due[i] = R::load(e[i]) + added * (G::load(g[i]) * scale); });
    if (h == due) return;
    each(job.block, [=](int64_t i) { h[i] = G::load(g[i]) * scale + carry * R::load(e[i]); });
}

template <class G>
void load_alone(const Encode& job, int64_t b, float* due, float*) {
    const auto* g = static_cast<const typename G::Stored*>(job.gradients) + b * job.block;
    const float scale = job.scale;
    each(job.block, [=](int64_t i) { due[i] = G::load(g[i]) * scale; });
}

template <class G>
void load_bytes(const Encode& job, int64_t b, float* due, float* h) {
    const int64_t at = b * job.block;
    const auto* g = static_cast<const typename G::Stored*>(job.gradients) + at;
    const float scale = job.scale, carry = job.carry, added = job.added, unit = job.residual.scales[b];
    const auto* e = static_cast<const int8_t*>(job.residual.values) + at;
    each(job.block, [=](int64_t i) { due[i] = static_cast<float>(e[i]) * unit + added * (G::load(g[i]) * scale); });
    if (h == due) return;
    each(job.block, [=](int64_t i) { h[i] = G::load(g[i]) * scale + carry * (static_cast<float>(e[i]) * unit); });
}

using Load = void (*)(const Encode&, int64_t, float*, float*);

template <class G>
Load loader_of(Number residual) {
    switch (residual) {
        case Number::f32:
            return load<G, F32>;
        case Number::bf16:
            return load<G, BF16>;
        case Number::i8:
            return load_bytes<G>;
        default:
            return load_alone<G>;
    }
}

inline Load loader_of(Number gradients, Number residual) {
    switch (gradients) {
        case Number::bf16:
            return loader_of<BF16>(residual);
        case Number::f16:
            return loader_of<F16>(residual);
        default:
            return loader_of<F32>(residual);
    }
}

// Numbers into memory, as they are stored there.
template <class G>
void put(const float* from, int64_t n, typename G::Stored* to) {
    each(n, [=](int64_t i) { to[i] = G::store(from[i]); });
}

// Where there is no element, nothing is left.
inline void forget_padding(float* left, int64_t count, int64_t block) {
    for (int64_t i = count > 0 ? count : 0; i < block; ++i) left[i] = 0.0f;
}

inline void keep(const Left& residual, int64_t block, int64_t b, const float* left) {
    const int64_t at = b * block;
    if (residual.kind == Number::f32) {
        put<F32>(left, block, static_cast<float*>(residual.values) + at);
    } else if (residual.kind == Number::bf16) {
        put<BF16>(left, block, static_cast<uint16_t*>(residual.values) + at);
    } else if (residual.kind == Number::i8) {
        const Step step = step_of(largest_of(left, block), 127.0f);
        auto* to = static_cast<int8_t*>(residual.values) + at;
        residual.scales[b] = step.scale;
        each(block, [=](int64_t i) { to[i] = static_cast<int8_t>(whole(left[i] * step.inverse + kRound)); });
    }
}

}  // namespace
}  // namespace yafsdp_cc::cpu

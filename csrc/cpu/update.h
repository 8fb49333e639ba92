// Optimizer updates of the 1-bit family, as yafsdp_cc/optim/update.py defines them: one rounding for each operation.
#pragma once

#include "numbers.h"

namespace yafsdp_cc::cpu {
namespace {

// What 16-bit numbers are converted in: several arrays of it fit into the first-level cache.
constexpr int64_t kStaged = 1024;

// The loops of `each` for any number of elements.
template <class Body>
inline __attribute__((always_inline)) void each_of_any(int64_t n, Body body) {
    YAFSDP_CC_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) body(i);
}

inline void update_adam(float* w, const float* g, float* m, const float* v, int64_t n, const float* settings) {
    const float carry = settings[0], taken = settings[1], unbias = settings[2], eps = settings[3];
    const float share = settings[4], most = settings[5], keep = settings[6], rate = settings[7];
    const auto moved = [=](float weight, float moment, float square) {
        float step = moment / ((__builtin_sqrtf(square * unbias) + eps) * share);
        step = step > most ? most : step;  // a NaN stays
        step = step < -most ? -most : step;
        return weight * keep - step * rate;
    };
    if (!m) return each_of_any(n, [=](int64_t i) { w[i] = moved(w[i], g[i], v[i]); });
    each_of_any(n, [=](int64_t i) {
        const float moment = m[i] * carry + g[i] * taken;
        m[i] = moment;
        w[i] = moved(w[i], moment, v[i]);
    });
}

inline void update_sgd(float* w, const float* g, float* m, int64_t n, const float* settings, bool of_gradient) {
    const float carry = settings[0], decay = settings[1], rate = settings[2];
    const bool decays = decay != 0.0f;
    const auto next = [=](float moment, float gradient) { return moment * carry + gradient; };
    if (of_gradient && decays) {
        each_of_any(n, [=](int64_t i) {
            const float moment = next(m[i], g[i] + w[i] * decay);
            m[i] = moment;
            w[i] -= moment * rate;
        });
    } else if (of_gradient) {
        each_of_any(n, [=](int64_t i) {
            const float moment = next(m[i], g[i]);
            m[i] = moment;
            w[i] -= moment * rate;
        });
    } else if (decays) {
        each_of_any(n, [=](int64_t i) {
            const float decayed = w[i] * decay;
            m[i] += decayed;
            w[i] -= (g[i] + decayed) * rate;
        });
    } else {
        each_of_any(n, [=](int64_t i) { w[i] -= g[i] * rate; });
    }
}

inline void update_floats(const Update& job, float* w, const float* g, int64_t at, int64_t n) {
    float* m = job.momentum ? job.momentum + at : nullptr;
    if (job.rule == Rule::adam_gradient || job.rule == Rule::adam_momentum) {
        update_adam(w, g, m, job.square + at, n, job.settings);
    } else {
        update_sgd(w, g, m, n, job.settings, job.rule == Rule::sgd_gradient);
    }
}

template <class G>
inline void load_some(const void* from, int64_t at, int64_t n, float* to) {
    const auto* x = static_cast<const typename G::Stored*>(from) + at;
    each_of_any(n, [=](int64_t i) { to[i] = G::load(x[i]); });
}

// Return the numbers as fp32: converted in `staged`, or where they are.
inline const float* floats_of(Number kind, const void* from, int64_t at, int64_t n, float* staged) {
    if (kind == Number::f32) return static_cast<const float*>(from) + at;
    kind == Number::bf16 ? load_some<BF16>(from, at, n, staged) : load_some<F16>(from, at, n, staged);
    return staged;
}

template <class G>
inline void store_some(const float* from, int64_t at, int64_t n, void* to) {
    auto* x = static_cast<typename G::Stored*>(to) + at;
    each_of_any(n, [=](int64_t i) { x[i] = G::store(from[i]); });
}

void update(const Update& job) {
    alignas(64) float weights[kStaged], gradients[kStaged];
    const bool direct = job.kind == Number::f32 && job.gradient_kind == Number::f32;
    const int64_t stretch = direct ? job.n : kStaged;
    for (int64_t at = 0; at < job.n; at += stretch) {
        const int64_t n = job.n - at < stretch ? job.n - at : stretch;
        auto* w = const_cast<float*>(floats_of(job.kind, job.weights, at, n, weights));
        update_floats(job, w, floats_of(job.gradient_kind, job.gradient, at, n, gradients), at, n);
        if (job.kind == Number::bf16) store_some<BF16>(w, at, n, job.weights);
        if (job.kind == Number::f16) store_some<F16>(w, at, n, job.weights);
    }
}

}  // namespace
}  // namespace yafsdp_cc::cpu

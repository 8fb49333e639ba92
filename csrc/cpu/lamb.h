// LAMB's updates and sums, as yafsdp_cc/optim/lamb.py defines them: one rounding for each operation.
#pragma once

#include "update.h"

namespace yafsdp_cc::cpu {
namespace {

constexpr int64_t kSummed = 512;  // elements whose squares are added in the order of the format

// Elements ahead of those that are worked on: on the next page, where a processor does not load ahead by itself.
constexpr int64_t kAhead = 1024;

// Load 64 numbers to come. Beyond an array that does nothing.
inline void fetch(const float* from, int64_t at) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(at + kAhead) * sizeof(float);
    for (uintptr_t line = 0; from && line < 256; line += 64) __builtin_prefetch(reinterpret_cast<void*>(first + line));
}

// What a block is measured by, in lanes.
struct Lanes {
    alignas(64) float first[kLanes];
    alignas(64) float second[kLanes];
    alignas(64) int32_t largest[kLanes];  // bits of magnitudes
};

template <LambRule rule, bool decays>
inline __attribute__((always_inline)) void lamb_block(const Lamb& job, float* w, const float* g, int64_t at, int64_t n,
                                                      Lanes& lanes) {
    const float* settings = job.settings;
    const float carry = settings[0], taken = settings[1], unbias = settings[2], eps = settings[3];
    const float share = settings[4], most = settings[5], keep = settings[6], rate = settings[7], decay = settings[8];
    const float carry2 = settings[9], taken2 = settings[10], unbias_fresh = settings[11], gain = settings[12];
    float *const m = job.momentum + at, *const v = job.square + at, *const fresh = job.fresh ? job.fresh + at : nullptr;
    const auto one = [&](int64_t i, int64_t lane) __attribute__((always_inline)) {
        const float x = w[i];
        float gradient = g[i], mean = gradient;
        if (rule == LambRule::momentum) {
            gradient = (gradient - m[i] * carry) * gain;
        } else {
            mean = m[i] * carry + gradient * taken;
        }
        m[i] = mean;
        float* const second = rule == LambRule::exact ? v : fresh;
        const float square = second[i] * carry2 + gradient * gradient * taken2;
        second[i] = square;
        const float root = __builtin_sqrtf(v[i] * unbias) + eps;
        float step = mean / (root * share), first = x;
        if (rule != LambRule::exact) {
            step = step > most ? most : step;  // a NaN stays
            step = step < -most ? -most : step;
            first = step;
            w[i] = x * keep - step * rate;
            const float ratio = root / (__builtin_sqrtf(square * unbias_fresh) + eps);
            const int32_t size = static_cast<int32_t>(bits_of(ratio) & kMagnitude);
            lanes.largest[lane] = size > lanes.largest[lane] ? size : lanes.largest[lane];
        }
        const float update = decays ? step + x * decay : step;
        lanes.first[lane] += first * first;
        lanes.second[lane] += update * update;
    };
    int64_t row = 0;
    for (; row + kLanes <= n; row += kLanes) {
        fetch(job.fresh, at + row), fetch(job.square, at + row), fetch(job.momentum, at + row);
        if (job.kind == Number::f32) fetch(w, row);
        if (job.gradient_kind == Number::f32) fetch(g, row);
        YAFSDP_CC_INDEPENDENT
        for (int64_t lane = 0; lane < kLanes; ++lane) one(row + lane, lane);
    }
    for (int64_t lane = 0; row + lane < n; ++lane) one(row + lane, lane);
}

template <LambRule rule, bool decays>
void lamb_stretch(const Lamb& job) {
    alignas(64) float weights[kSummed], gradients[kSummed];
    float first[kLanes] = {}, second[kLanes] = {};  // of blocks, 16 at most
    int32_t largest = 0;
    for (int64_t at = 0, b = 0; at < job.n; at += kSummed, ++b) {
        const int64_t n = job.n - at < kSummed ? job.n - at : kSummed;
        auto* w = const_cast<float*>(floats_of(job.kind, job.weights, at, n, weights));
        Lanes lanes{};
        lamb_block<rule, decays>(job, w, floats_of(job.gradient_kind, job.gradient, at, n, gradients), at, n, lanes);
        if (rule != LambRule::exact && job.kind == Number::bf16) store_some<BF16>(w, at, n, job.weights);
        if (rule != LambRule::exact && job.kind == Number::f16) store_some<F16>(w, at, n, job.weights);
        first[b] = block_sum(kLanes, [&](int64_t i) { return lanes.first[i]; });
        second[b] = block_sum(kLanes, [&](int64_t i) { return lanes.second[i]; });
        for (const int32_t each : lanes.largest) largest = each > largest ? each : largest;
    }
    job.sums[0] = block_sum(kLanes, [&](int64_t i) { return first[i]; });
    job.sums[job.apart] = block_sum(kLanes, [&](int64_t i) { return second[i]; });
    job.sums[2 * job.apart] = float_of(static_cast<uint32_t>(largest));
}

template <LambRule rule>
void lamb_by(const Lamb& job) {
    job.settings[8] != 0.0f ? lamb_stretch<rule, true>(job) : lamb_stretch<rule, false>(job);
}

void lamb(const Lamb& job) {
    if (job.rule == LambRule::exact) return lamb_by<LambRule::exact>(job);
    job.rule == LambRule::gradient ? lamb_by<LambRule::gradient>(job) : lamb_by<LambRule::momentum>(job);
}

}  // namespace
}  // namespace yafsdp_cc::cpu

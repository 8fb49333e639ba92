// Scale and whole steps from -levels to levels: what int8, int6, int4 and an int8 residual have in common.
#pragma once

#include "../blocks.h"

namespace yafsdp_cc::cpu {
namespace {

inline bool mark_nonfinite(uint8_t* scale, float value) {
    if (is_finite(value)) {
        write_float(scale, value);
        return false;
    }
    write_float(scale, float_of(0x7fc00000));
    return true;
}

inline bool whole_steps(const Block& x, float levels, uint8_t* scale_to, int8_t* codes) {
    const Step step = step_of(largest_of(x.h, x.n), levels);
    if (mark_nonfinite(scale_to, step.scale)) {
        std::memset(codes, 0, static_cast<size_t>(x.n));
        return false;
    }
    const float scale = step.scale, inverse = step.inverse;
    if (x.noise) {
        each(x.n, [=, h = x.h, noise = x.noise](int64_t i) {
            const float drawn = h[i] * inverse + noise[i];
            float below = static_cast<float>(static_cast<int32_t>(drawn));
            below = below > drawn ? below - 1.0f : below;
            below = below > levels ? levels : below < -levels ? -levels : below;
            codes[i] = static_cast<int8_t>(static_cast<int32_t>(below));
        });
    } else {
        // What is rounded is at most levels * (1 + 2^-21): no code is beyond them.
        each(x.n, [=, h = x.h, due = x.due, left = x.left, taken = x.taken](int64_t i) {
            const float rounding = h[i] * inverse + kRound;
            codes[i] = static_cast<int8_t>(whole(rounding));
            left[i] = due[i] - taken * ((rounding - kRound) * scale);
        });
    }
    return true;
}

}  // namespace
}  // namespace yafsdp_cc::cpu

// What a block is measured by, and the scale that comes of it.
#pragma once

#include "team.cuh"

namespace yafsdp_cc {

constexpr float SMALLEST_NORMAL = 0x1p-126f;

struct Step {
    float scale, inverse;
};

// With which a magnitude becomes ``levels``; both 0 where the scale would be denormal. ``share`` is 1 / levels.
DEVICE Step step_of(unsigned largest, float share) {
    float scale = mul(__uint_as_float(largest), share);
    scale = scale < SMALLEST_NORMAL ? 0.0f : scale;
    return {scale, scale > 0.0f ? quotient(1.0f, scale) : 0.0f};
}

// To the nearest step. No clamp is needed to ``levels`` of step_of: what is at most its largest magnitude is at most
// levels · (1 + 2^-22) steps, after the roundings of the scale, its inverse and the product.
DEVICE int nearest(float steps) { return __float2int_rn(steps); }

// The largest magnitude, as bits.
struct Largest {
    unsigned bits = 0;
    DEVICE void take(float x) { bits = max(bits, magnitude(x)); }
    DEVICE unsigned of_team() const { return team_largest(bits); }
};

// The sum of magnitudes.
struct Sum {
    float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    DEVICE void take(int lane, float x) { lanes[lane] = add(lanes[lane], fabsf(x)); }
    DEVICE float of_team() const { return team_sum(lanes); }
};

} // namespace yafsdp_cc

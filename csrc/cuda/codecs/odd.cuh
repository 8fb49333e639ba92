// int3 and int2: odd multiples of the scale (compression/codecs.py, _Odd).
#pragma once

#include "codecs/planes.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

// To the nearest level, with a scale by the mean magnitude; or with noise, with one by the largest.
template <int BITS, bool NOISY> struct Odd : Codec<int> {
    static constexpr int LAST = (1 << BITS) - 1;
    static constexpr float SHARE = NOISY ? float(1.0 / LAST) : BITS == 2 ? 0.624f : 0.367f;
    Largest largest;
    Sum sum;
    Step step;
    unsigned first, seed;

    DEVICE Odd(const EncodeJob& job, unsigned message)
        : first(job.first + message * unsigned(job.n)), seed(job.seed) {}
    DEVICE void open() { largest = Largest(), sum = Sum(); }
    DEVICE void take(int lane, float h) {
        if constexpr (NOISY)
            largest.take(h);
        else
            sum.take(lane, h);
    }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        if constexpr (NOISY)
            step = step_of(largest.of_team(), SHARE);
        else
            step = step_of(magnitude(quotient(sum.of_team(), place.size())), SHARE);
        finite = is_finite(step.scale);
        place.write_scale(step.scale);
    }
    DEVICE int code(float h, unsigned at) const {
        const float steps = mul(mul(h, step.inverse), 0.5f);
        const int code = NOISY ? __float2int_rd(add(add(steps, 0.5f * LAST), noise(first + at, seed)))
                               : __float2int_rd(steps) + (LAST + 1) / 2;
        return max(0, min(code, int(LAST)));
    }
    DEVICE float worth(int code) const { return mul(float(2 * code - LAST), step.scale); }
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) const {
        write_codes<BITS, ROWS, MANY>(place, patch, finite, codes);
    }
};

template <int BITS> struct OddReader : PlaneReader<BITS> {
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        const int code = int(raw.words[r] >> 8 * c & 0xffu);
        return mul(float(2 * code - ((1 << BITS) - 1)), raw.scale);
    }
};

} // namespace yafsdp_cc

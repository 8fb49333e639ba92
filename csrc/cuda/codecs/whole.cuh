// int8, int6 and int4: whole steps (compression/codecs.py, _Whole); and fp8, which has a scale like theirs.
#pragma once

#include "codecs/planes.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

// A codec whose scale is the largest magnitude / LEVELS.
template <int LEVELS> struct Stepped : Codec<int> {
    static constexpr float SHARE = float(1.0 / LEVELS);
    Largest largest;
    Step step;

    DEVICE void open() { largest = Largest(); }
    DEVICE void take(int, float h) { largest.take(h); }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        step = step_of(largest.of_team(), SHARE);
        finite = is_finite(step.scale);
        place.write_scale(step.scale);
    }
};

constexpr int levels_of(int bits) { return (1 << (bits - 1)) - 1; }

// To the nearest step, or with noise the next one as often as it is near.
template <int BITS, bool NOISY> struct Whole : Stepped<levels_of(BITS)> {
    unsigned first, seed;

    DEVICE Whole(const EncodeJob& job, unsigned message)
        : first(job.first + message * unsigned(job.n)), seed(job.seed) {}
    DEVICE int code(float h, unsigned at) const {
        const float steps = mul(h, this->step.inverse);
        if constexpr (NOISY) return clamped(__float2int_rd(add(steps, noise(first + at, seed))), levels_of(BITS));
        return nearest(steps);
    }
    DEVICE float worth(int code) const { return mul(float(code), this->step.scale); }
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) const {
        write_codes<BITS, ROWS, MANY>(place, patch, this->finite, codes);
    }
};

struct FP8 : Stepped<448> {
    DEVICE FP8(const EncodeJob&, unsigned) {}
    DEVICE int code(float h, unsigned) const {
        const float steps = fminf(fmaxf(mul(h, step.inverse), -448.0f), 448.0f);
        return int(as_fp8(steps));
    }
    DEVICE float worth(int code) const { return mul(of_fp8(unsigned(code)), step.scale); }
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) const {
        write_codes<8, ROWS, MANY>(place, patch, finite, codes);
    }
};

template <int BITS> struct WholeReader : PlaneReader<BITS> {
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        return mul(float(int(raw.words[r] << (32 - BITS - 8 * c)) >> (32 - BITS)), raw.scale);
    }
};

struct FP8Reader : PlaneReader<8> {
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        return mul(of_fp8(raw.words[r] >> 8 * c & 0xffu), raw.scale);
    }
};

} // namespace yafsdp_cc

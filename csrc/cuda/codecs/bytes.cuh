// int8 and fp8: a byte an element (compression/codecs/int8.py and fp8.py); and the whole steps that int4 shares.
#pragma once

#include "place.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

// A codec whose scale is the largest magnitude / LEVELS.
template <int LEVELS, class Code> struct Stepped : Codec<Code> {
    static constexpr float SHARE = float(1.0 / LEVELS);
    Largest largest;
    Step step;

    DEVICE void open() { largest = Largest(); }
    DEVICE void take(int, float h) { largest.take(h); }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        step = step_of(largest.of_team(), SHARE);
        this->finite = is_finite(step.scale);
        place.write_scale(step.scale);
    }
};

// Whole steps: to the nearest, or with noise the next one as often as it is near.
template <int LEVELS, bool NOISY> struct Whole : Stepped<LEVELS, int> {
    unsigned first, seed;

    DEVICE Whole(const EncodeJob& job, unsigned message)
        : first(job.first + message * unsigned(job.n)), seed(job.seed) {}
    DEVICE int code(float h, unsigned at) const {
        const float steps = mul(h, this->step.inverse);
        const int whole = NOISY ? __float2int_rd(add(steps, noise(first + at, seed))) : __float2int_rn(steps);
        return this->finite ? clamped(whole, LEVELS) : 0;
    }
    DEVICE float worth(int code) const { return mul(float(code), this->step.scale); }
};

template <bool NOISY> struct Int8 : Whole<127, NOISY> {
    using Whole<127, NOISY>::Whole;
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) const {
        if (!place.exists) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            *place.payload(unsigned(place.element / 4 + patch * 64 + r * 16)) = bytes_of(codes[r]);
    }
};

struct FP8 : Stepped<448, int> {
    DEVICE FP8(const EncodeJob&, unsigned) {}
    DEVICE int code(float h, unsigned) const {
        const float steps = fminf(fmaxf(mul(h, step.inverse), -448.0f), 448.0f);
        return finite ? int(as_fp8(steps)) : 0;
    }
    DEVICE float worth(int code) const { return mul(of_fp8(unsigned(code)), step.scale); }
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) const {
        if (!place.exists) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            *place.payload(unsigned(place.element / 4 + patch * 64 + r * 16)) = bytes_of(codes[r]);
    }
};

// Reading: a scale, and words of payload.
template <int WORDS> struct Scaled {
    float scale;
    unsigned words[WORDS];
};

template <bool IS_FP8> struct ByteReader {
    template <int ROWS> using Fetched = Scaled<ROWS>;
    template <int ROWS>
    DEVICE static void get(Scaled<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block,
                           int patch) {
        const unsigned* words = reinterpret_cast<const unsigned*>(row);
        raw.scale = __uint_as_float(words[block]);
        words += job.n / job.block + static_cast<long long>(block) * (job.block / 4) + patch * 64 + thread_of_team();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) raw.words[r] = words[r * 16];
    }
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        return mul(IS_FP8 ? of_fp8(raw.words[r] >> 8 * c & 0xffu) : of_int8(raw.words[r], c), raw.scale);
    }
};

} // namespace yafsdp_cc

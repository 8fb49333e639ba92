// ternary: -scale, 0 or scale, the digits of five blocks in one byte (compression/codecs.py).
#pragma once

#include "codecs/planes.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

// What rounding to nearest and at random have in common: digits, and their place in the message.
struct Digits : Codec<int> {
    static constexpr unsigned TOGETHER = TERNARY_TOGETHER;
    float scale;
    unsigned words[4] = {}; // of blocks of one patch, until the five are complete
    unsigned weight = 0;    // of this block's digits: 1, 3, 9, 27, 81

    DEVICE void open() { weight = weight == 0 ? 1 : 3 * weight; }
    DEVICE void weigh_up(const Place& place) {
        finite = is_finite(scale);
        place.write_scale(scale);
    }
    DEVICE float worth(int code) const { return mul(float(code), scale); }

    // Where a block has many patches, its digits are added to the message's words block by block instead: each word is
    // written and read by one thread alone.
    template <int ROWS, bool MANY> DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const int digits[4] = {codes[r][0] + 1, codes[r][1] + 1, codes[r][2] + 1, codes[r][3] + 1};
            const unsigned word = weight * (place.exists ? bytes_of(digits) : 0x01010101u);
            if constexpr (!MANY) {
                words[r] += word;
            } else if (has_one(place)) {
                unsigned* const to = five(place) + patch * 64 + r * 16;
                *to = weight == 1 ? word : *to + word;
            }
            if constexpr (!MANY)
                if (weight == 81 && has_one(place)) five(place)[r * 16] = words[r];
        }
    }
    DEVICE static bool has_one(const Place& place) { return place.block / TOGETHER * TOGETHER < place.blocks; }
    DEVICE static unsigned* five(const Place& place) {
        return place.payload(place.block / TOGETHER * (place.length / 4) + thread_of_team());
    }
};

template <bool NOISY> struct Ternary;

template <> struct Ternary<false> : Digits {
    static constexpr bool TWICE = true;
    Sum all, kept;
    unsigned count;
    float threshold;

    DEVICE Ternary(const EncodeJob&, unsigned) {}
    DEVICE void open() {
        Digits::open();
        all = kept = Sum(), count = 0;
    }
    DEVICE void take(int lane, float h) { all.take(lane, h); }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        threshold = mul(quotient(all.of_team(), place.size()), 0.7f);
    }
    DEVICE void take_again(int lane, float h) {
        const bool keeps = fabsf(h) > threshold;
        kept.take(lane, keeps ? h : 0.0f);
        count += keeps;
    }
    DEVICE void weigh_again(const Place& place) {
        const float mean = quotient(kept.of_team(), float(max(team_count(count), 1u)));
        scale = is_finite(threshold) ? mean : threshold;
        weigh_up(place);
    }
    DEVICE int code(float h, unsigned) const {
        return finite && fabsf(h) > threshold ? (__float_as_uint(h) >> 31 ? -1 : 1) : 0;
    }
};

template <> struct Ternary<true> : Digits {
    Largest largest;
    unsigned first, seed;

    DEVICE Ternary(const EncodeJob& job, unsigned message)
        : first(job.first + message * unsigned(job.n)), seed(job.seed) {}
    DEVICE void open() {
        Digits::open();
        largest = Largest();
    }
    DEVICE void take(int, float h) { largest.take(h); }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        scale = __uint_as_float(largest.of_team());
        weigh_up(place);
    }
    DEVICE int code(float h, unsigned at) const {
        const bool keeps = noise(first + at, seed) < quotient(fabsf(h), scale);
        return finite && keeps ? (__float_as_uint(h) >> 31 ? -1 : 1) : 0;
    }
};

struct TernaryReader {
    template <int ROWS> using Fetched = Scaled<ROWS>;
    template <int ROWS>
    DEVICE static void get(Scaled<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block,
                           int patch) {
        const unsigned* words = reinterpret_cast<const unsigned*>(row);
        raw.scale = __uint_as_float(words[block]);
        words += job.n / job.block + static_cast<long long>(block / 5) * (job.block / 4);
        words += patch * 64 + thread_of_team();
#pragma unroll
        for (int r = 0; r < ROWS; ++r) raw.words[r] = words[r * 16];
    }
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned block, int r, int c) {
        const unsigned place = block % 5;
        const unsigned weight = place == 0 ? 1 : place == 1 ? 3 : place == 2 ? 9 : place == 3 ? 27 : 81;
        // Of a byte, · ⌈2^16 / weight⌉ / 2^16 rounds down as · 1 / weight does.
        const unsigned rest = (raw.words[r] >> 8 * c & 0xffu) * (65535u / weight + 1u) >> 16;
        return mul(float(int(rest % 3) - 1), raw.scale);
    }
};

} // namespace yafsdp_cc

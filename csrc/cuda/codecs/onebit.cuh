// onebit: signs, and the mean magnitude (compression/codecs.py).
#pragma once

#include "codecs/planes.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

struct OneBit : Codec<unsigned> { // whose highest bit counts
    Sum sum;
    float scale;

    DEVICE OneBit(const EncodeJob&, unsigned) {}
    DEVICE void open() { sum = Sum(); }
    DEVICE void take(int lane, float h) { sum.take(lane, h); }
    DEVICE void weigh(const EncodeJob&, const Place& place) {
        scale = quotient(sum.of_team(), place.size());
        finite = is_finite(scale);
        place.write_scale(scale);
    }
    DEVICE unsigned code(float h, unsigned) const { return __float_as_uint(h); }
    DEVICE float worth(unsigned code) const { return __uint_as_float(__float_as_uint(scale) | (code & ~MAGNITUDE)); }

    // A thread has four bits of each row. Two threads make a byte of each, eight of those the row's two words.
    template <int ROWS, bool MANY>
    DEVICE void write(const Place& place, int patch, const unsigned (&codes)[ROWS][4]) const {
        const unsigned t = thread_of_team();
        unsigned word = 0;
#pragma unroll
        for (int r = ROWS; r-- > 0;) {
            word <<= 4;
#pragma unroll
            for (int c = 4; c-- > 0;) word = __funnelshift_l(codes[r][c], word, 1); // its sign, as the lowest bit
        }
        word = finite ? word << 4 * (t % 2) : 0;
        word = transposed_bytes(word | from_peer(word, 1));
        const unsigned row = t / 2 % 4, half = t / 8;
        if (place.exists && t % 2 == 0 && row < ROWS)
            *place.payload(place.block * (place.length / 32) + patch * 8 + 2 * row + half) = word;
    }
};

struct OneBitReader {
    template <int ROWS> using Fetched = Scaled<ROWS>;
    template <int ROWS>
    DEVICE static void get(Scaled<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block,
                           int patch) {
        const unsigned* words = reinterpret_cast<const unsigned*>(row);
        raw.scale = __uint_as_float(words[block]);
        words += job.n / job.block + static_cast<long long>(block) * (job.block / 32);
        words += patch * 8 + thread_of_team() / 8;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) raw.words[r] = words[2 * r] >> 4 * (thread_of_team() % 8);
    }
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        return raw.words[r] >> c & 1 ? -raw.scale : raw.scale;
    }
};

} // namespace yafsdp_cc

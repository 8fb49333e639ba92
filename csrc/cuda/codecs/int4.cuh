// int4: 15 levels, elements half a block apart in one byte (compression/codecs/int4.py).
#pragma once

#include "codecs/bytes.cuh"

namespace yafsdp_cc {

template <bool NOISY> struct Int4 : Whole<7, NOISY> {
    using Whole<7, NOISY>::Whole;
    unsigned low[4]; // of a patch whose other half is another one, which comes next

    DEVICE int turn(int i, int patches) const { return i / 2 + i % 2 * (patches / 2); }

    template <int ROWS, bool MANY> DEVICE void write(const Place& place, int patch, const int (&codes)[ROWS][4]) {
        const unsigned t = thread_of_team();
        unsigned* const payload = place.payload(place.block * (place.length / 8) + t);
        if constexpr (MANY) {
            const int half = int(place.length / 512);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (patch < half)
                    low[r] = nibbles(codes[r]);
                else if (place.exists)
                    payload[(patch - half) * 64 + r * 16] = low[r] | nibbles(codes[r]) << 4;
            }
        } else if constexpr (ROWS == 1) { // elements 32 and up are with threads 8 and up
            const unsigned word = nibbles(codes[0]), upper = from_peer(word, 8);
            if (place.exists && t < 8) *payload = word | upper << 4;
        } else {
#pragma unroll
            for (int r = 0; r < ROWS / 2; ++r)
                if (place.exists) payload[r * 16] = nibbles(codes[r]) | nibbles(codes[r + ROWS / 2]) << 4;
        }
    }
    DEVICE static unsigned nibbles(const int (&codes)[4]) { return bytes_of(codes) & 0x0f0f0f0fu; }
};

struct Int4Reader {
    template <int ROWS> using Fetched = Scaled<ROWS>;
    template <int ROWS>
    DEVICE static void get(Scaled<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block,
                           int patch) {
        const unsigned* words = reinterpret_cast<const unsigned*>(row);
        raw.scale = __uint_as_float(words[block]);
        words += job.n / job.block + static_cast<long long>(block) * (job.block / 8);
        const unsigned half = unsigned(job.block) / 2;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const unsigned element = patch * 256 + r * LANES + 4 * thread_of_team();
            raw.words[r] = words[element % half / 4] >> (element < half ? 0 : 4);
        }
    }
    template <int ROWS> DEVICE static float value(const Scaled<ROWS>& raw, unsigned, int r, int c) {
        return mul(float(int(raw.words[r] << (28 - 8 * c)) >> 28), raw.scale);
    }
};

} // namespace yafsdp_cc

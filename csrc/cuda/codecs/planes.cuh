// Codes of 1 to 8 bits, cut into planes (split_bits and joined_bits of compression/codec.py), four of a row in a word.
#pragma once

#include "place.cuh"

namespace yafsdp_cc {

constexpr int widest(int bits) { return bits >= 8 ? 8 : bits >= 4 ? 4 : bits >= 2 ? 2 : 1; }
constexpr unsigned in_each_byte(int width) { return ((1u << width) - 1) * 0x01010101u; }
DEVICE int log2_of(unsigned power) { return 31 - __clz(int(power)); }

// The planes of the codes of a patch, of which the lowest is bit LOW. ``to`` is the word where the block's begin.
//
// A plane of w bits has 8 / w pieces of its block in a byte. Where the block has many patches, pieces are added to the
// message's words one by one: each word is written and read by one thread alone, and the first piece comes first.
template <int BITS, int ROWS, bool MANY, int LOW = 0>
DEVICE void write_planes(const Place& place, unsigned to, int patch, const unsigned (&codes)[ROWS]) {
    constexpr int WIDTH = widest(BITS), PIECES = 8 / WIDTH;
    const unsigned t = thread_of_team();
    unsigned* const own = place.payload(to) + t;
    unsigned bits[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) bits[r] = codes[r] >> LOW & in_each_byte(WIDTH);
    if constexpr (MANY) {
        const unsigned part = place.length / PIECES, log = log2_of(part);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const unsigned element = patch * 256 + r * LANES, piece = element >> log;
            unsigned* const word = place.payload(to + (element & (part - 1)) / 4 + t);
            if (place.exists) *word = piece == 0 ? bits[r] : *word | bits[r] << WIDTH * piece;
        }
    } else if constexpr (ROWS >= PIECES) { // a piece has whole rows
        constexpr int APART = ROWS / PIECES;
#pragma unroll
        for (int r = 0; r < APART; ++r) {
            unsigned word = 0;
#pragma unroll
            for (int k = 0; k < PIECES; ++k) word |= bits[k * APART + r] << WIDTH * k;
            if (place.exists) own[r * 16] = word;
        }
    } else { // a row has several pieces, each of so many threads
        constexpr unsigned IN_ROW = PIECES / ROWS, THREADS = TEAM / IN_ROW;
        unsigned word = 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) word |= bits[r] << WIDTH * IN_ROW * r;
#pragma unroll
        for (unsigned together = 1; together < IN_ROW; together *= 2)
            word |= from_peer(word, together * THREADS) << WIDTH * together;
        if (place.exists && t < THREADS) *own = word;
    }
    if constexpr (BITS > WIDTH)
        write_planes<BITS - WIDTH, ROWS, MANY, LOW + WIDTH>(place, to + place.length * WIDTH / 32, patch, codes);
}

// A block that is not finite has codes of 0 in the message, whatever they are here.
template <int BITS, int ROWS, bool MANY>
DEVICE void write_codes(const Place& place, int patch, bool finite, const int (&codes)[ROWS][4]) {
    unsigned words[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) words[r] = finite ? bytes_of(codes[r]) : 0;
    write_planes<BITS, ROWS, MANY>(place, place.block * (place.length * BITS / 32), patch, words);
}

// The codes of four elements from ``element`` on, a byte each, of a block whose planes begin at ``words``.
template <int BITS, int LOW = 0>
DEVICE unsigned joined(const unsigned* words, unsigned length, unsigned element) {
    constexpr int WIDTH = widest(BITS);
    if constexpr (WIDTH == 8) return words[element / 4];
    const unsigned part = length * WIDTH / 8, piece = element >> log2_of(part);
    unsigned codes = (words[(element & (part - 1)) / 4] >> WIDTH * piece & in_each_byte(WIDTH)) << LOW;
    if constexpr (BITS > WIDTH) codes |= joined<BITS - WIDTH, LOW + WIDTH>(words + part / 4, length, element);
    return codes;
}

// Reading: a scale, and words of payload.
template <int WORDS> struct Scaled {
    float scale;
    unsigned words[WORDS];
};

template <int BITS> struct PlaneReader {
    template <int ROWS> using Fetched = Scaled<ROWS>;
    template <int ROWS>
    DEVICE static void get(Scaled<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block,
                           int patch) {
        const unsigned* words = reinterpret_cast<const unsigned*>(row);
        raw.scale = __uint_as_float(words[block]);
        words += job.n / job.block + static_cast<long long>(block) * (job.block * BITS / 32);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
            raw.words[r] = joined<BITS>(words, unsigned(job.block), patch * 256 + r * LANES + 4 * thread_of_team());
    }
};

} // namespace yafsdp_cc

// Patches of matrices, ROWS rows of 64 elements, in the registers of a team, four of each row a thread (team.cuh).
//
// Words are fetched first and converted later, so that the loads of all operands are under way before one is waited
// for. What dtype a matrix has is asked by branches that whole warps take together, where it is not known.
#pragma once

#include "team.cuh"

// Assignments to ``job``: what launch.cpp says that all jobs of this compilation have. To the job they are no news. But
// the compiler leaves out what is for other jobs, which is most of a kernel and nearly half of its registers.
#ifndef YAFSDP_CC_KNOWN
#define YAFSDP_CC_KNOWN
#endif

namespace yafsdp_cc {

template <class Job> DEVICE Job known(Job job) {
    YAFSDP_CC_KNOWN;
    return job;
}

template <int ROWS> struct Raw { // four elements a row; of 16-bit ones two words are used, of bytes one
    unsigned words[ROWS][4];
};

namespace rows_detail {

DEVICE void put(unsigned (&words)[4], uint4 from) {
    words[0] = from.x, words[1] = from.y, words[2] = from.z, words[3] = from.w;
}
DEVICE void put(unsigned (&words)[4], uint2 from) { words[0] = from.x, words[1] = from.y; }
DEVICE void put(unsigned (&words)[4], unsigned from) { words[0] = from; }

template <class Four, int ROWS> DEVICE void fetch_wide(Raw<ROWS>& raw, const void* data, long long at) {
    const Four* from = static_cast<const Four*>(data) + at / 4;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) put(raw.words[r], from[r * int(LANES / 4)]);
}

template <class One, int ROWS> DEVICE void fetch_each(Raw<ROWS>& raw, const void* data, long long at) {
    constexpr int PER_WORD = 4 / sizeof(One);
    const One* from = static_cast<const One*>(data) + at;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int w = 0; w < int(sizeof(One)); ++w) {
            unsigned word = 0;
#pragma unroll
            for (int i = 0; i < PER_WORD; ++i)
                word |= unsigned(from[r * int(LANES) + w * PER_WORD + i]) << (i * int(8 * sizeof(One)) % 32);
            raw.words[r][w] = word;
        }
}

DEVICE void keep(void* to, const unsigned (&w)[4]) { *static_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]); }
DEVICE void keep(void* to, const unsigned (&w)[2]) { *static_cast<uint2*>(to) = make_uint2(w[0], w[1]); }
DEVICE void keep(void* to, const unsigned (&w)[1]) { *static_cast<unsigned*>(to) = w[0]; }

// Four elements, as WORDS words, to element ``at``.
template <int WORDS> DEVICE void store_four(void* data, long long at, bool wide, const unsigned (&words)[WORDS]) {
    unsigned char* to = static_cast<unsigned char*>(data) + at * WORDS;
    if (wide) {
        keep(to, words);
    } else if (WORDS == 4) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) reinterpret_cast<unsigned*>(to)[i] = words[i];
    } else if (WORDS == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            reinterpret_cast<unsigned short*>(to)[i] = (unsigned short)(words[i / 2 % WORDS] >> i % 2 * 16);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = (unsigned char)(words[0] >> i * 8);
    }
}

} // namespace rows_detail

// The patch that begins at element ``at - 4 · thread`` of the matrix, rows counted in; zeros where there is none.
template <int ROWS> DEVICE void fetch(Raw<ROWS>& raw, const Rows& rows, long long at, bool exists) {
    using namespace rows_detail;
    if (!exists) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) put(raw.words[r], make_uint4(0, 0, 0, 0));
    } else if (rows.dtype == Dtype::fp32) {
        rows.wide ? fetch_wide<uint4>(raw, rows.data, at) : fetch_each<unsigned>(raw, rows.data, at);
    } else if (rows.dtype == Dtype::int8) {
        rows.wide ? fetch_wide<unsigned>(raw, rows.data, at) : fetch_each<unsigned char>(raw, rows.data, at);
    } else {
        rows.wide ? fetch_wide<uint2>(raw, rows.data, at) : fetch_each<unsigned short>(raw, rows.data, at);
    }
}

DEVICE float of_int8(unsigned word, int byte) { return float(int(word << (24 - 8 * byte)) >> 24); }

// As fp32; ``scale`` is that of the block, for int8 alone.
template <int ROWS>
DEVICE void convert(const Raw<ROWS>& raw, Dtype dtype, float scale, float (&values)[ROWS][4]) {
    const auto each = [&](auto value_of) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) values[r][c] = value_of(raw.words[r], c);
    };
    if (dtype == Dtype::fp32)
        each([](const unsigned(&words)[4], int c) { return __uint_as_float(words[c]); });
    else if (dtype == Dtype::bf16)
        each([](const unsigned(&words)[4], int c) { return of_bf16(words[c / 2] >> c % 2 * 16); });
    else if (dtype == Dtype::fp16)
        each([](const unsigned(&words)[4], int c) { return of_fp16(words[c / 2] >> c % 2 * 16 & 0xffffu); });
    else
        each([=](const unsigned(&words)[4], int c) { return mul(of_int8(words[0], c), scale); });
}

// ``values`` to the patch at ``at``, rounded to the dtype, a floating-point one.
template <int ROWS> DEVICE void store(const Rows& rows, long long at, const float (&values)[ROWS][4]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const float(&v)[4] = values[r];
        const long long to = at + r * int(LANES);
        if (rows.dtype == Dtype::fp32) {
            const unsigned words[4] = {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                       __float_as_uint(v[3])};
            rows_detail::store_four(rows.data, to, rows.wide, words);
        } else if (rows.dtype == Dtype::bf16) {
            const unsigned words[2] = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3])};
            rows_detail::store_four(rows.data, to, rows.wide, words);
        } else {
            const unsigned words[2] = {fp16_pair(v[0], v[1]), fp16_pair(v[2], v[3])};
            rows_detail::store_four(rows.data, to, rows.wide, words);
        }
    }
}

// Four small integers as the bytes of a word.
DEVICE unsigned bytes_of(const int (&codes)[4]) {
    return (codes[0] & 0xff) | (codes[1] & 0xff) << 8 | (codes[2] & 0xff) << 16 | unsigned(codes[3] & 0xff) << 24;
}

} // namespace yafsdp_cc

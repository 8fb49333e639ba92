// fp32 and bf16: the numbers themselves, or rounded (compression/codecs.py).
#pragma once

#include "place.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

template <bool HALF> struct Float : Codec<float> {
    Largest largest;
    Rows rows; // the message as a matrix

    DEVICE Float(const EncodeJob& job, unsigned) {
        rows.dtype = HALF ? Dtype::bf16 : Dtype::fp32, rows.wide = job.message_wide;
    }
    DEVICE void open() { largest = Largest(); }
    DEVICE void take(int, float h) { largest.take(HALF ? as_bf16(h) : h); } // rounding can overflow
    DEVICE void weigh(const EncodeJob&, const Place&) { finite = largest.of_team() < INFINITE; }
    DEVICE float code(float h, unsigned) const { return HALF ? as_bf16(h) : h; }
    DEVICE float worth(float code) const { return code; }
    template <int ROWS, bool MANY> DEVICE void write(const Place& place, int patch, const float (&codes)[ROWS][4]) {
        rows.data = place.row;
        if (place.exists) store(rows, place.element + patch * 256, codes);
    }
};

// Reading.
template <bool HALF> struct FloatReader {
    template <int ROWS> using Fetched = Raw<ROWS>;
    template <int ROWS>
    DEVICE static void get(Raw<ROWS>& raw, const DecodeJob& job, const unsigned char* row, unsigned block, int patch) {
        Rows rows;
        rows.data = const_cast<unsigned char*>(row), rows.dtype = HALF ? Dtype::bf16 : Dtype::fp32;
        rows.wide = job.message_wide;
        fetch(raw, rows, static_cast<long long>(block) * job.block + patch * 256 + 4 * thread_of_team(), true);
    }
    template <int ROWS> DEVICE static float value(const Raw<ROWS>& raw, unsigned, int r, int c) {
        return HALF ? of_bf16(raw.words[r][c / 2] >> c % 2 * 16) : __uint_as_float(raw.words[r][c]);
    }
};

} // namespace yafsdp_cc

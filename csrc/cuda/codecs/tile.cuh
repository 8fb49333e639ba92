// Where a tile of a message of topk is (compression/codecs.py).
#pragma once

#include "jobs.h"
#include "numbers.cuh"

namespace yafsdp_cc {

constexpr unsigned SHARE = 100; // of so many elements one is kept

struct Tile {
    long long start;
    unsigned length, kept;
    unsigned short* positions;
    unsigned short* values;

    DEVICE Tile(unsigned tile, long long n, const unsigned char* row)
        : start(static_cast<long long>(tile) * TILE), length(unsigned(min(static_cast<long long>(TILE), n - start))),
          kept((length + SHARE - 1) / SHARE) {
        constexpr unsigned FULL = (TILE + SHARE - 1) / SHARE;
        const unsigned char* place = row + static_cast<long long>(tile) * 4 * FULL;
        positions = reinterpret_cast<unsigned short*>(const_cast<unsigned char*>(place));
        values = positions + kept;
    }
};

} // namespace yafsdp_cc

// A team: the sixteen threads, half a warp, that have one block between them.
//
// Of each row of 64 elements, thread t has elements 4t ... 4t + 3: its four lanes. A load or store of a row is then one
// instruction of 16 bytes a thread (8 for 16-bit elements, 4 for bytes), of adjacent threads from adjacent addresses.
//
//     row 0    |0 1 2 3|4 5 6 7| ... |60 61 62 63|      block of 256: rows 0 to 3, sixteen elements a thread
//     thread   |   0   |   1   | ... |    15     |
//
// Running sums go down the rows within a thread, and the halving adds of the format come out as lanes 32 apart (threads
// 8 apart), 16 (4), 8 (2), 4 (1), and at last 2 and 1, which one thread's lanes are apart.
//
// Both teams of a warp run together and always take part in shuffles, whether or not there is a block for them.
#pragma once

#include "jobs.h"
#include "numbers.cuh"

namespace yafsdp_cc {

constexpr unsigned WARP = 32, EVERYONE = 0xffffffffu;

DEVICE unsigned thread_of_team() { return threadIdx.x % TEAM; }
DEVICE unsigned team_of_warp() { return threadIdx.x % WARP / TEAM; }

DEVICE unsigned from_peer(unsigned word, unsigned apart) { return __shfl_xor_sync(EVERYONE, word, int(apart)); }
DEVICE float from_peer(float x, unsigned apart) { return __shfl_xor_sync(EVERYONE, x, int(apart)); }

DEVICE unsigned team_largest(unsigned bits) {
    for (unsigned apart = TEAM / 2; apart > 0; apart /= 2) bits = max(bits, from_peer(bits, apart));
    return bits;
}

DEVICE unsigned team_count(unsigned count) {
    for (unsigned apart = TEAM / 2; apart > 0; apart /= 2) count += from_peer(count, apart);
    return count;
}

// The sum over the 64 lanes, in the order of the format; every thread gets it.
//
// The first two steps divide the work: of the four lanes, threads 8 and up go on with the upper two, and of those,
// threads with bit 4 set with the odd one. a + b is b + a to the bit, so it does not matter who adds.
DEVICE float team_sum(const float (&lanes)[4]) {
    const bool upper = thread_of_team() & 8, odd = thread_of_team() & 4;
    const float got0 = from_peer(upper ? lanes[0] : lanes[2], 8), got1 = from_peer(upper ? lanes[1] : lanes[3], 8);
    const float even_lane = add(upper ? lanes[2] : lanes[0], got0), odd_lane = add(upper ? lanes[3] : lanes[1], got1);
    const float got = from_peer(odd ? even_lane : odd_lane, 4);
    float sum = add(odd ? odd_lane : even_lane, got);
    sum = add(sum, from_peer(sum, 2));
    sum = add(sum, from_peer(sum, 1));
    sum = add(sum, from_peer(sum, 8)); // lanes 0 and 2, 1 and 3
    return add(sum, from_peer(sum, 4));
}

// For four threads two apart, each with a byte for each of four rows: all four bytes of row 0 to the first, of row 1
// to the second, and so on. Threads next to each other have, and get, the same.
DEVICE unsigned transposed_bytes(unsigned word) {
    const unsigned near = from_peer(word, 2);
    word = __byte_perm(word, near, thread_of_team() & 2 ? 0x3715 : 0x6240);
    const unsigned far = from_peer(word, 4);
    return __byte_perm(word, far, thread_of_team() & 4 ? 0x3276 : 0x5410);
}

} // namespace yafsdp_cc

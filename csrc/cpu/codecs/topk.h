// topk: see yafsdp_cc/wire/codecs/topk.py. Its unit is a tile, not a block.
#pragma once

#include "../blocks.h"
#include "../masks.h"

namespace yafsdp_cc {
namespace {

struct TopK {
    static constexpr int kBuckets = 2048, kShift = 20;
    static constexpr int64_t kShare = 100;

    static int64_t kept_of(int64_t size) { return (size + kShare - 1) / kShare; }
    static int64_t byte_of(int64_t tile) { return 4 * kept_of(kTile) * tile; }

    static void encode(const Encode& job) {
        alignas(64) float due[kLargestBlock], other[kLargestBlock];
        const Load load = loader_of(job.kind, job.residual.kind);
        const bool apart = job.residual.kind != Number::none && job.carry != 1.0f;
        float* h = job.scratch->values;
        int32_t guess = kBuckets;  // the bucket of the threshold, as in the tile before
        for (int64_t start = 0; start < job.n; start += kTile) {
            const int64_t size = job.n - start < kTile ? job.n - start : kTile, kept = kept_of(size);
            uint8_t* positions = job.message + byte_of(start / kTile);
            float largest = 0.0f;
            for (int64_t at = 0; at < size; at += job.block) {
                load(job, (start + at) / job.block, apart ? due : h + at, h + at);
                const float here = largest_of(h + at, job.block);
                largest = bits_of(here) > bits_of(largest) ? here : largest;
            }
            if (!is_finite(from_bf16(to_bf16(largest)))) {
                for (int64_t i = 0; i < kept; ++i) {
                    write(positions, i, static_cast<uint16_t>(i));
                    write(positions + 2 * kept, i, 0x7fc0);
                }
                continue;
            }
            choose(*job.scratch, size, kept, guess);
            const uint16_t* chosen = job.scratch->positions;
            for (int64_t i = 0; i < kept; ++i) {
                write(positions, i, chosen[i]);
                write(positions + 2 * kept, i, to_bf16(h[chosen[i]]));
            }
            if (job.residual.kind == Number::none) continue;
            int64_t next = 0;
            for (int64_t at = 0; at < size; at += job.block) {
                const int64_t b = (start + at) / job.block;
                float* left = h + at;
                if (apart) load(job, b, left = due, other);
                for (; next < kept && chosen[next] < at + job.block; ++next) {
                    left[chosen[next] - at] -= job.taken * from_bf16(to_bf16(h[chosen[next]]));
                }
                if (job.counts) forget_padding(left, job.counts[b], job.block);
                keep(job.residual, job.block, b, left);
            }
        }
    }

    // Calls sparse(position, value) for what tile `tile` says.
    template <class Sink>
    static void decode(const uint8_t* message, int64_t n, int64_t tile, Sink sparse) {
        const int64_t start = tile * kTile, size = n - start < kTile ? n - start : kTile, kept = kept_of(size);
        const uint8_t* positions = message + byte_of(tile);
        for (int64_t i = 0; i < kept; ++i) {
            const uint16_t position = read(positions, i);
            // A damaged message must not write beyond the tile.
            if (position < size) sparse(position, from_bf16(read(positions + 2 * kept, i)));
        }
    }

  private:
    static void write(uint8_t* to, int64_t i, uint16_t x) { std::memcpy(to + 2 * i, &x, sizeof x); }
    static uint16_t read(const uint8_t* from, int64_t i) {
        uint16_t x;
        std::memcpy(&x, from + 2 * i, sizeof x);
        return x;
    }

    static int32_t bucket_of(float x) { return static_cast<int32_t>((bits_of(x) & kMagnitude) >> kShift); }

    // The positions of the `kept` largest into scratch, ascending. Those not below a guessed bucket are found first: if
    // they are enough, the rest need not be counted.
    static void choose(Scratch& scratch, int64_t size, int64_t kept, int32_t& guess) {
        const float* h = scratch.values;
        uint16_t* chosen = scratch.positions;
        constexpr int32_t margin = 2;
        int64_t found = guess == kBuckets ? 0 : find(h, size, guess > margin ? guess - margin : 0, chosen);
        uint16_t counts[4][kBuckets] = {};
        if (found < kept) {
            for (int64_t i = 0; i < size; i += 4)
                for (int k = 0; k < 4; ++k) ++counts[k][bucket_of(h[i + k])];
        } else {
            for (int64_t i = 0; i < found; ++i) ++counts[i & 3][bucket_of(h[chosen[i]])];
        }
        int64_t above = 0;  // how many are in higher buckets than the threshold
        int32_t threshold = kBuckets;
        for (int64_t here = 0; above + here < kept;) {
            above += here;
            --threshold;
            here = 0;
            for (int k = 0; k < 4; ++k) here += counts[k][threshold];
        }
        if (found < kept) found = find(h, size, threshold, chosen);
        int64_t alike = kept - above, used = 0;
        for (int64_t i = 0; i < found; ++i) {
            const uint16_t position = chosen[i];
            const int32_t bucket = bucket_of(h[position]);
            const bool take = bucket > threshold || (bucket == threshold && alike-- > 0);
            chosen[used] = position;
            used += take;
        }
        guess = threshold;
    }

    static int64_t find(const float* h, int64_t size, int32_t bucket, uint16_t* positions) {
        int64_t found = 0;
        for (int64_t at = 0; at < size; at += 64) {
            for (uint64_t mask = at_least(h + at, bucket << kShift); mask; mask &= mask - 1) {
                positions[found++] = static_cast<uint16_t>(at + __builtin_ctzll(mask));
            }
        }
        return found;
    }
};

}  // namespace
}  // namespace yafsdp_cc

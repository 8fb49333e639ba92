// topk: see yafsdp_cc/compression/codecs.py. Its unit is a tile, not a block.
#pragma once

#include "../blocks.h"
#include "../masks.h"

namespace yafsdp_cc::cpu {
namespace {

struct TopK {
    static constexpr int kBuckets = 2048, kShift = 20, kTooLarge = 2039;
    static constexpr int64_t kShare = 100;

    static int64_t kept_of(int64_t size) { return (size + kShare - 1) / kShare; }
    static int64_t byte_of(int64_t tile) { return 4 * kept_of(kTile) * tile; }

    static void encode(const Encode& job) {
        const Load load = loader_of(job.kind, job.residual.kind);
        const bool remembers = job.residual.kind != Number::none;
        float* h = job.scratch->h;
        float* due = remembers && (job.carry != 1.0f || job.added != 1.0f) ? job.scratch->due : h;
        Choice choice{h, job.scratch->positions};
        for (int64_t start = 0; start < job.n; start += kTile) {
            const int64_t size = job.n - start < kTile ? job.n - start : kTile, kept = kept_of(size);
            const int64_t first = start / job.block;
            uint8_t* positions = job.message + byte_of(start / kTile);
            float largest = 0.0f;
            choice.found = 0;
            for (int64_t at = 0; at < size; at += job.block) {
                load(job, first + at / job.block, due + at, h + at);
                const float here = largest_of(h + at, job.block);
                largest = bits_of(here) > bits_of(largest) ? here : largest;
                choice.find(at, at + job.block, choice.guess);
            }
            if (bucket_of(largest) >= kTooLarge) {
                for (int64_t i = 0; i < kept; ++i) {
                    write(positions, i, static_cast<uint16_t>(i));
                    write(positions + 2 * kept, i, 0x7fc0);
                }
                continue;
            }
            choice.choose(size, kept);
            for (int64_t i = 0; i < kept; ++i) {
                const uint16_t position = choice.positions[i], rounded = to_bf16(h[position]);
                const uint16_t sent = rounded == 0x8000 ? 0 : rounded;
                write(positions, i, position);
                write(positions + 2 * kept, i, sent);
                due[position] -= job.taken * from_bf16(sent);
            }
            if (!remembers) continue;
            for (int64_t at = 0; at < size; at += job.block) {
                const int64_t b = first + at / job.block;
                if (job.counts) forget_padding(due + at, job.counts[b], job.block);
                keep(job.residual, job.block, b, due + at);
            }
        }
    }

    // Calls sparse(position, value) for each element that tile `tile` holds.
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

    // The largest of a tile. Those not below a guessed bucket, a little under the threshold of the tile before, are
    // found while the tile comes by: if they are enough, the rest need not be counted.
    struct Choice {
        const float* h;
        uint16_t* positions;  // ascending
        int64_t found = 0;
        int32_t guess = kBuckets;

        void find(int64_t begin, int64_t end, int32_t bucket) {
            if (bucket == kBuckets) return;
            for (int64_t at = begin; at < end; at += 64) {
                for (uint64_t mask = at_least(h + at, bucket << kShift); mask; mask &= mask - 1) {
                    positions[found++] = static_cast<uint16_t>(at + __builtin_ctzll(mask));
                }
            }
        }

        // Leaves the `kept` largest alone in `positions`.
        void choose(int64_t size, int64_t kept) {
            constexpr int32_t margin = 2;
            uint16_t counts[4][kBuckets] = {};  // four, because one would be waited for when it is added to again
            const bool enough = found >= kept;
            if (enough) {
                for (int64_t i = 0; i < found; ++i) ++counts[i & 3][bucket_of(h[positions[i]])];
            } else {
                for (int64_t i = 0; i < size; i += 4)
                    for (int k = 0; k < 4; ++k) ++counts[k][bucket_of(h[i + k])];
            }
            int64_t above = 0;  // how many are in higher buckets than the threshold
            int32_t threshold = kBuckets;
            for (int64_t here = 0; above + here < kept;) {
                above += here;
                --threshold;
                here = 0;
                for (int k = 0; k < 4; ++k) here += counts[k][threshold];
            }
            if (!enough) {
                found = 0;
                find(0, size, threshold);
            }
            int64_t room = kept - above, used = 0;
            for (int64_t i = 0; i < found; ++i) {
                const uint16_t position = positions[i];
                const int32_t bucket = bucket_of(h[position]);
                const bool alike = bucket == threshold;
                positions[used] = position;
                used += (bucket > threshold) | (alike & (room > 0));
                room -= alike;
            }
            guess = threshold > margin ? threshold - margin : 0;
        }
    };
};

}  // namespace
}  // namespace yafsdp_cc::cpu

// Decodes random and damaged messages with one instruction set's kernels, each message in an allocation of exactly the
// size that the operators ask for: `decode_fuzz COUNT SEED`. Compiled with sanitizers by test_decode_fuzz.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/arguments.h"
#include "cpu/level.h"

namespace yafsdp_cc::cpu {
extern const Level YAFSDP_CC_LEVEL;
}

using namespace yafsdp_cc::cpu;

namespace {

std::mt19937_64 chance;

int64_t below(int64_t n) { return static_cast<int64_t>(chance() % static_cast<uint64_t>(n)); }

// Memory without room behind it.
struct Exact {
    std::unique_ptr<uint8_t[]> data;
    explicit Exact(int64_t bytes) : data(new uint8_t[static_cast<size_t>(bytes)]) {
        for (int64_t i = 0; i < bytes; i += 8) {
            const uint64_t drawn = chance();
            std::memcpy(&data[static_cast<size_t>(i)], &drawn, static_cast<size_t>(bytes - i < 8 ? bytes - i : 8));
        }
    }
};

void damage(uint8_t* message, int64_t bytes) {
    for (int64_t flips = below(4); flips > 0; --flips) message[below(bytes)] ^= static_cast<uint8_t>(1 << below(8));
}

// A message of real numbers.
void encode(const Level& kernels, const Shape& shape, uint8_t* message) {
    std::vector<float> gradients(static_cast<size_t>(shape.n));
    for (float& x : gradients) x = static_cast<float>(below(2001) - 1000) * 1e-3f;
    Encode job{};
    job.codec = shape.codec, job.n = shape.n, job.block = shape.block, job.kind = Number::f32;
    job.gradients = gradients.data(), job.message = message;
    job.carry = job.taken = job.scale = 1.0f;
    static const auto scratch = std::make_unique<Scratch>();
    job.scratch = scratch.get();
    kernels.encode(job);
}

}  // namespace

int main(int, char** argv) {
    const int64_t count = std::atoll(argv[1]);
    chance.seed(static_cast<uint64_t>(std::atoll(argv[2])));
    const Level& kernels = YAFSDP_CC_LEVEL;
    const Number kinds[] = {Number::f32, Number::bf16, Number::f16};
    for (int64_t done = 0; done < count;) {
        const bool large = below(1000) == 0;  // more than one tile of topk
        const int64_t block = int64_t{64} << below(large ? 7 : 2);
        const Shape shape(below(8), block * (large ? 1 + below(2 * kTile / block) : 1 + below(7)), block);
        const int64_t bytes = shape.body_bytes(), messages = 1 + below(3);
        // decode_sum has them in one allocation, whose last one ends with it.
        Exact received(bytes * messages);
        for (int64_t m = 0; m < messages; ++m) {
            uint8_t* message = &received.data[static_cast<size_t>(m * bytes)];
            if (below(2)) encode(kernels, shape, message), damage(message, bytes);
        }
        const Number kind = kinds[below(3)];
        const Exact values(shape.n * (kind == Number::f32 ? 4 : 2)), total(shape.n * 4);
        const int64_t last = (messages - 1) * bytes;
        const Exact alone(bytes);
        std::memcpy(alone.data.get(), &received.data[static_cast<size_t>(last)], static_cast<size_t>(bytes));
        kernels.decode({shape.codec, shape.n, block, alone.data.get(), kind, values.data.get()});
        const int64_t unit = shape.codec == Code::topk ? kTile : block, units = (shape.n + unit - 1) / unit;
        const int64_t start = below(units) * unit, end = below(2) ? shape.n : std::min(start + unit, shape.n);
        const Exact own((end - start) * (kind == Number::f32 ? 4 : 2)), part((end - start) * 4);
        kernels.decode_sum({shape.codec, shape.n, block, received.data.get(), messages, bytes, kind,
                            below(2) ? own.data.get() : nullptr, below(messages + 1),
                            reinterpret_cast<float*>(part.data.get()), start, end - start});
        done += 1 + messages;
    }
    std::puts("decoded");
}

// The kernels of one instruction set: YAFSDP_CC_LEVEL names it, the compiler's flags make it.
#include "level.h"

#include "codecs/floats.h"
#include "codecs/fp8.h"
#include "codecs/odd.h"
#include "codecs/onebit.h"
#include "codecs/ternary.h"
#include "codecs/topk.h"
#include "codecs/whole.h"
#include "lamb.h"
#include "update.h"

namespace yafsdp_cc::cpu {
namespace {

// Random numbers in [0, 1) for elements first, first + 1, ...: see yafsdp_cc.compression.codec.Noise.
void uniform(uint32_t seed, uint32_t first, int64_t n, float* to) {
    each(n, [=](int64_t i) {
        uint32_t word = (first + static_cast<uint32_t>(i)) ^ seed;
        word = (word ^ word >> 16) * 0x7feb352du;
        word = (word ^ word >> 15) * 0x846ca68bu;
        word ^= word >> 16;
        to[i] = static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
    });
}

// Calls visit(codec) with the one that has blocks.
template <class Visit>
inline void with(Code code, Visit visit) {
    switch (code) {
        case Code::fp32:
            return visit(Floats<F32>());
        case Code::bf16:
            return visit(Floats<BF16>());
        case Code::fp8:
            return visit(FP8());
        case Code::int8:
            return visit(Whole<8>());
        case Code::int4:
            return visit(Whole<4>());
        case Code::ternary:
            return visit(Ternary());
        case Code::onebit:
            return visit(OneBit());
        case Code::int6:
            return visit(Whole<6>());
        case Code::int3:
            return visit(Odd<3>());
        case Code::int2:
            return visit(Odd<2>());
        case Code::topk:
            return;
    }
}

template <class Codec>
void encode_blocks(const Encode& job) {
    alignas(64) float due[kLargestBlock], other[kLargestBlock], scratch[kLargestBlock], noise[kLargestBlock];
    const Load load = loader_of(job.kind, job.residual.kind);
    const bool remembers = job.residual.kind != Number::none;
    const bool in_place = job.residual.kind == Number::f32;
    float* h = remembers && (job.carry != 1.0f || job.added != 1.0f) ? other : due;
    Block block{h, due, scratch, job.taken, static_cast<float>(job.block), job.noisy ? noise : nullptr, job.block};
    Place place{job.message, job.n / job.block, job.block, 0};
    for (int64_t& b = place.b; b < place.blocks; ++b) {
        load(job, b, due, h);
        if (job.noisy) uniform(job.seed, job.first + static_cast<uint32_t>(b * job.block), job.block, noise);
        if (job.counts) block.size = static_cast<float>(job.counts[b] > 1 ? job.counts[b] : 1);
        if (in_place) block.left = static_cast<float*>(job.residual.values) + b * job.block;
        if (!Codec::encode(block, place) || !remembers) continue;
        if (job.counts) forget_padding(block.left, job.counts[b], job.block);
        if (!in_place) keep(job.residual, job.block, b, block.left);
    }
}

void encode(const Encode& job) {
    if (job.codec == Code::topk) return TopK::encode(job);
    with(job.codec, [&](auto codec) { encode_blocks<decltype(codec)>(job); });
}

void accumulate(const Accumulate& from) {
    alignas(64) float due[kLargestBlock];
    Encode job{};
    job.n = from.n, job.block = from.block, job.kind = from.kind, job.gradients = from.gradients;
    job.residual = from.residual, job.scale = from.scale, job.added = 1.0f;
    const Load load = loader_of(job.kind, job.residual.kind);
    for (int64_t b = 0; b < job.n / job.block; ++b) {
        load(job, b, due, due);
        if (is_finite(largest_of(due, job.block))) keep(job.residual, job.block, b, due);
    }
}

// Numbers from memory, as they are stored there: set, or added.
template <class G, class Sink>
inline void take(const void* from, int64_t n, Sink sink) {
    const auto* x = static_cast<const typename G::Stored*>(from);
    each(n, [=](int64_t i) { sink(i, G::load(x[i])); });
}

template <class Sink>
void take(Number kind, const void* from, int64_t at, int64_t n, Sink sink) {
    if (kind == Number::bf16) {
        take<BF16>(static_cast<const uint16_t*>(from) + at, n, sink);
    } else if (kind == Number::f16) {
        take<F16>(static_cast<const uint16_t*>(from) + at, n, sink);
    } else {
        take<F32>(static_cast<const float*>(from) + at, n, sink);
    }
}

// The parts of a sum in order: part(message) for each message, part(-1) for this rank's own.
template <class Part>
inline void in_order(const DecodeSum& job, Part part) {
    for (int64_t m = 0; m < job.count; ++m) {
        if (job.own && m == job.place) part(-1);
        part(m);
    }
    if (job.own && job.place >= job.count) part(-1);
}

template <class Codec>
void sum_blocks(const DecodeSum& job) {
    // As much of each message at a time as leaves the sum in the first-level cache.
    constexpr int64_t stretch = kLargestBlock;
    for (int64_t at = 0; at < job.length; at += stretch) {
        const int64_t size = job.length - at < stretch ? job.length - at : stretch;
        bool first = true;
        in_order(job, [&](int64_t m) {
            float* total = job.total + at;
            const auto set = [](float* to) { return [to](int64_t i, float x) { to[i] = x; }; };
            const auto add = [](float* to) { return [to](int64_t i, float x) { to[i] += x; }; };
            if (m < 0) {
                first ? take(job.kind, job.own, at, size, set(total)) : take(job.kind, job.own, at, size, add(total));
            } else {
                auto* message = const_cast<uint8_t*>(job.messages) + m * job.stride;
                Place place{message, job.n / job.block, job.block, (job.start + at) / job.block};
                for (int64_t done = 0; done < size; done += job.block, ++place.b) {
                    first ? Codec::decode(place, job.block, set(total + done))
                          : Codec::decode(place, job.block, add(total + done));
                }
            }
            first = false;
        });
    }
}

void sum_tiles(const DecodeSum& job) {
    for (int64_t at = 0; at < job.length; at += kTile) {
        const int64_t size = job.length - at < kTile ? job.length - at : kTile;
        float* total = job.total + at;
        bool first = true, signed_zeros = true;
        in_order(job, [&](int64_t m) {
            if (m >= 0 && !first && signed_zeros) {
                // An element that a message does not hold is 0, and that makes +0 of -0.
                each(size, [=](int64_t i) { total[i] += 0.0f; });
                signed_zeros = false;
            }
            if (m < 0) {
                first ? take(job.kind, job.own, at, size, [=](int64_t i, float x) { total[i] = x; })
                      : take(job.kind, job.own, at, size, [=](int64_t i, float x) { total[i] += x; });
            } else {
                if (first) std::memset(total, 0, static_cast<size_t>(size) * sizeof(float));
                const uint8_t* message = job.messages + m * job.stride;
                const int64_t tile = (job.start + at) / kTile;
                if (first) {
                    TopK::decode(message, job.n, tile, [=](int64_t i, float x) { total[i] = x; });
                } else {
                    TopK::decode(message, job.n, tile, [=](int64_t i, float x) { total[i] += x; });
                }
            }
            first = false;
        });
    }
}

void decode_sum(const DecodeSum& job) {
    if (job.codec == Code::topk) return sum_tiles(job);
    with(job.codec, [&](auto codec) { sum_blocks<decltype(codec)>(job); });
}

// Fills memory with numbers as they are stored there.
template <class G>
void decode_into(const Decode& job) {
    auto* values = static_cast<typename G::Stored*>(job.values);
    const auto set = [](typename G::Stored* to) { return [to](int64_t i, float x) { to[i] = G::store(x); }; };
    if (job.codec == Code::topk) {
        std::memset(values, 0, static_cast<size_t>(job.n) * sizeof *values);
        for (int64_t start = 0; start < job.n; start += kTile) {
            TopK::decode(job.message, job.n, start / kTile, set(values + start));
        }
        return;
    }
    Place place{const_cast<uint8_t*>(job.message), job.n / job.block, job.block, 0};
    with(job.codec, [&](auto codec) {
        for (; place.b < place.blocks; ++place.b) codec.decode(place, job.block, set(values + place.b * job.block));
    });
}

void decode(const Decode& job) {
    if (job.kind == Number::bf16) return decode_into<BF16>(job);
    if (job.kind == Number::f16) return decode_into<F16>(job);
    decode_into<F32>(job);
}

}  // namespace

#define YAFSDP_CC_TEXT_(x) #x
#define YAFSDP_CC_TEXT(x) YAFSDP_CC_TEXT_(x)
extern const Level YAFSDP_CC_LEVEL;
const Level YAFSDP_CC_LEVEL{YAFSDP_CC_TEXT(YAFSDP_CC_LEVEL), encode, accumulate, decode_sum, decode, update,
                            lamb};

}  // namespace yafsdp_cc::cpu

// The operators on a CPU: arguments checked, the widest instruction set of this machine chosen, one row after another.
#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <memory>

#include "arguments.h"
#include "level.h"

namespace yafsdp_cc::cpu {

extern const Level scalar;
#if defined(__x86_64__)
extern const Level sse2, avx2, avx512;
#elif defined(__aarch64__)
extern const Level neon;
#endif

namespace {

// What this machine has, the best one first.
const Level* available(int i) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi");
    const Level* const levels[] = {has_avx512 ? &avx512 : nullptr, has_avx2 ? &avx2 : nullptr, &sse2, &scalar};
#elif defined(__aarch64__)
    const Level* const levels[] = {&neon, &scalar};
#else
    const Level* const levels[] = {&scalar};
#endif
    constexpr int count = sizeof levels / sizeof *levels;
    int seen = 0;
    for (int k = 0; k < count; ++k)
        if (levels[k] && seen++ == i) return levels[k];
    return nullptr;
}

// The best one, or that of YAFSDP_CC_SIMD. Read at every call, so that tests can go from one to another.
const Level& level() {
    static const Level* const best = available(0);
    const char* wanted = std::getenv("YAFSDP_CC_SIMD");
    if (!wanted || !*wanted) return *best;
    std::string names;
    for (int i = 0; const Level* one = available(i); ++i) {
        if (std::string(wanted) == one->name) return *one;
        names += std::string(i ? ", " : "") + one->name;
    }
    require(false, "YAFSDP_CC_SIMD=", wanted, ": this machine has ", names);
    return *best;
}

using Maybe = std::optional<Tensor>;

void check_residual(const Rows& residual, const Rows& scales, int64_t rows, int64_t n, int64_t block) {
    require_shape("residual", residual, rows, n);
    if (residual.kind == Number::i8) require_shape("residual_scales", scales, rows, n / block);
}

void encode(const Tensor& gradients, const Tensor& message, int64_t codec, int64_t block, const Maybe& counts,
            const Maybe& residual, const Maybe& residual_scales, double carry, double taken, double scale, int64_t seed,
            int64_t first, int64_t /*stream*/) {
    const Rows from = rows_of("gradients", gradients, kFloats);
    const Rows to = rows_of("message", message, {ScalarType::Byte});
    const Shape shape(codec, from.columns, block);
    shape.require_message(to);
    require(to.rows == from.rows, "there are ", from.rows, " rows of gradients and ", to.rows, " messages");
    Rows sizes, left, scales;
    if (counts) {
        sizes = rows_of("counts", *counts, {ScalarType::Int});
        require_shape("counts", sizes, from.rows, shape.n / block);
    }
    if (residual) {
        left = rows_of("residual", *residual, kResiduals);
        if (residual_scales) {
            scales = rows_of("residual_scales", *residual_scales, {ScalarType::Float});
        }
        check_residual(left, scales, from.rows, shape.n, block);
    }
    const bool draws = shape.codec == Code::int8 || shape.codec == Code::int4 || shape.codec == Code::ternary;
    const Level& kernels = level();
    std::unique_ptr<Scratch>* scratch = nullptr;
    if (shape.codec == Code::topk) {
        static thread_local std::unique_ptr<Scratch> kept;
        if (!kept) kept.reset(new Scratch);
        scratch = &kept;
    }
    Encode job{};
    job.codec = shape.codec, job.n = shape.n, job.block = block, job.kind = from.kind;
    job.carry = static_cast<float>(carry), job.taken = static_cast<float>(taken), job.scale = static_cast<float>(scale);
    job.noisy = seed >= 0 && draws && !residual;
    job.seed = static_cast<uint32_t>(seed);
    job.scratch = scratch ? scratch->get() : nullptr;
    for (int64_t i = 0; i < from.rows; ++i) {
        job.gradients = from.row<void>(i), job.message = to.row<uint8_t>(i), job.counts = sizes.row<int32_t>(i);
        job.residual = {left.kind, left.row<void>(i), scales.row<float>(i)};
        job.first = static_cast<uint32_t>(first + i * shape.n);
        kernels.encode(job);
    }
}

void accumulate(const Tensor& gradients, const Tensor& residual, const Tensor& residual_scales, int64_t block,
                double scale, int64_t /*stream*/) {
    const Rows from = rows_of("gradients", gradients, kFloats);
    const Rows left = rows_of("residual", residual, kResiduals);
    const Rows scales = rows_of("residual_scales", residual_scales, {ScalarType::Float});
    const Shape shape(0, from.columns, block);
    check_residual(left, scales, from.rows, shape.n, block);
    const Level& kernels = level();
    for (int64_t i = 0; i < from.rows; ++i) {
        kernels.accumulate({shape.n,
                            block,
                            from.kind,
                            from.row<void>(i),
                            {left.kind, left.row<void>(i), scales.row<float>(i)},
                            static_cast<float>(scale)});
    }
}

void decode_sum(const Tensor& messages, int64_t codec, int64_t block, int64_t n, const Maybe& own, int64_t place,
                const Tensor& total, int64_t start, int64_t /*stream*/) {
    const Shape shape(codec, n, block);
    const Rows from = rows_of("messages", messages, {ScalarType::Byte});
    const Rows to = rows_of("total", total, {ScalarType::Float});
    shape.require_message(from);
    const int64_t unit = shape.codec == Code::topk ? kTile : block, end = start + to.columns;
    require(to.rows == 1 && start >= 0 && start % unit == 0 && end <= n && (end == n || end % unit == 0),
            "total is elements ", start, " to ", end, " of ", n, ": it has to begin at a multiple of ", unit,
            " and to end at one or at the last element");
    Rows mine;
    if (own) {
        mine = rows_of("own", *own, kFloats);
        require_shape("own", mine, 1, to.columns);
        require(place >= 0 && place <= from.rows, "place=", place, " among ", from.rows, " messages");
    }
    require(own || from.rows > 0, "there is nothing to be summed");
    level().decode_sum({shape.codec, n, block, from.row<uint8_t>(0), from.rows, from.stride, mine.kind,
                        mine.row<void>(0), place, to.row<float>(0), start, to.columns});
}

void decode(const Tensor& messages, int64_t codec, int64_t block, const Tensor& values, int64_t /*stream*/) {
    const Rows from = rows_of("messages", messages, {ScalarType::Byte});
    const Rows to = rows_of("values", values, kFloats);
    const Shape shape(codec, to.columns, block);
    shape.require_message(from);
    require(to.rows == from.rows, "there are ", from.rows, " messages and ", to.rows, " rows of values");
    const Level& kernels = level();
    for (int64_t i = 0; i < from.rows; ++i) {
        kernels.decode({shape.codec, shape.n, block, from.row<uint8_t>(i), to.kind, to.row<void>(i)});
    }
}

}  // namespace
}  // namespace yafsdp_cc::cpu

STABLE_TORCH_LIBRARY_IMPL(yafsdp_cc, CPU, m) {
    m.impl("encode", TORCH_BOX(&yafsdp_cc::cpu::encode));
    m.impl("accumulate", TORCH_BOX(&yafsdp_cc::cpu::accumulate));
    m.impl("decode_sum", TORCH_BOX(&yafsdp_cc::cpu::decode_sum));
    m.impl("decode", TORCH_BOX(&yafsdp_cc::cpu::decode));
}

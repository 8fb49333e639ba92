// The operators on a CPU: arguments checked, the widest instruction set of this machine chosen, one row after another.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

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
            const Maybe& residual, const Maybe& residual_scales, double carry, double taken, double added,
            double scale, int64_t seed, int64_t first, int64_t /*stream*/) {
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
    const bool draws = shape.codec == Code::int8 || shape.codec == Code::int4 || shape.codec >= Code::int6 ||
                       shape.codec == Code::ternary;
    const Level& kernels = level();
    std::unique_ptr<Scratch>* scratch = nullptr;
    if (shape.codec == Code::topk) {
        static thread_local std::unique_ptr<Scratch> kept;
        if (!kept) kept.reset(new Scratch);
        scratch = &kept;
    }
    Encode job{};
    job.codec = shape.codec, job.n = shape.n, job.block = block, job.kind = from.kind;
    job.carry = static_cast<float>(carry), job.taken = static_cast<float>(taken);
    job.added = static_cast<float>(added), job.scale = static_cast<float>(scale);
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

// The elements of a contiguous tensor of any shape.
template <class Number_>
Number_* elements_of(const char* what, const Tensor& tensor, int64_t n, std::initializer_list<ScalarType> types) {
    const bool fits = std::find(types.begin(), types.end(), tensor.scalar_type()) != types.end();
    require(fits && tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == n, what, " has to be ", n,
            " contiguous floating-point numbers on a CPU, moments fp32, not ", seen(tensor));
    return static_cast<Number_*>(tensor.data_ptr());
}

Number number_of(const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Float      ? Number::f32
           : tensor.scalar_type() == ScalarType::BFloat16 ? Number::bf16
                                                          : Number::f16;
}

// Threads take turns at stretches of this many elements: a few microseconds of work each.
constexpr int64_t kUpdated = 8192;

void update(int64_t rule, const std::vector<Tensor> weights, const std::vector<Tensor> gradients,
            const std::vector<Tensor> momenta, const std::vector<Tensor> squares, const Tensor settings,
            int64_t /*stream*/) {
    require(rule >= 0 && rule <= static_cast<int64_t>(Rule::adam_momentum), "there is no rule number ", rule);
    const Rule kind = static_cast<Rule>(rule);
    const bool is_adam = kind == Rule::adam_gradient || kind == Rule::adam_momentum;
    const size_t count = weights.size();
    require(gradients.size() == count && momenta.size() == (kind == Rule::adam_momentum ? 0 : count) &&
                squares.size() == (is_adam ? count : 0),
            "rule ", rule, " of ", count, " weights does not go with ", gradients.size(), " gradients, ",
            momenta.size(), " momenta and ", squares.size(), " squares");
    const Rows numbers = rows_of("settings", settings, {ScalarType::Float});
    require_shape("settings", numbers, static_cast<int64_t>(count), is_adam ? kAdamSettings : kSgdSettings);
    std::vector<Update> jobs;
    std::vector<int64_t> ends;  // of each job, in stretches of all
    int64_t stretches = 0;
    for (size_t i = 0; i < count; ++i) {
        const int64_t n = weights[i].numel();
        jobs.push_back({kind, n, number_of(weights[i]), elements_of<void>("weights", weights[i], n, kFloats),
                        number_of(gradients[i]), elements_of<void>("gradients", gradients[i], n, kFloats),
                        momenta.empty() ? nullptr : elements_of<float>("momenta", momenta[i], n, {ScalarType::Float}),
                        squares.empty() ? nullptr : elements_of<float>("squares", squares[i], n, {ScalarType::Float}),
                        numbers.row<float>(static_cast<int64_t>(i))});
        ends.push_back(stretches += (n + kUpdated - 1) / kUpdated);
    }
    const Level& kernels = level();
    torch::stable::parallel_for(0, stretches, 4, [&](int64_t first, int64_t last) {
        size_t i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), first) - ends.begin());
        while (first < last) {
            Update job = jobs[i];
            const int64_t begin = i ? ends[i - 1] : 0, end = std::min(last, ends[i]), at = (first - begin) * kUpdated;
            const auto advance = [at](void* data, Number of) {
                return static_cast<char*>(data) + at * (of == Number::f32 ? 4 : 2);
            };
            job.n = std::min(job.n - at, (end - first) * kUpdated);
            job.weights = advance(job.weights, job.kind);
            job.gradient = advance(const_cast<void*>(job.gradient), job.gradient_kind);
            if (job.momentum) job.momentum += at;
            if (job.square) job.square += at;
            kernels.update(job);
            first = end, ++i;
        }
    });
}

void update_lamb(int64_t rule, const std::vector<Tensor> weights, const std::vector<Tensor> gradients,
                 const std::vector<Tensor> momenta, const std::vector<Tensor> squares, const std::vector<Tensor> fresh,
                 const Tensor settings, const Tensor sums, int64_t /*stream*/) {
    require(rule >= 0 && rule <= static_cast<int64_t>(LambRule::momentum), "there is no rule number ", rule);
    const LambRule kind = static_cast<LambRule>(rule);
    const size_t count = weights.size();
    require(gradients.size() == count && momenta.size() == count && squares.size() == count &&
                fresh.size() == (kind == LambRule::exact ? 0 : count),
            "rule ", rule, " of ", count, " weights does not go with ", gradients.size(), " gradients, ",
            momenta.size(), " momenta, ", squares.size(), " squares and ", fresh.size(), " fresh ones");
    const Rows numbers = rows_of("settings", settings, {ScalarType::Float});
    require_shape("settings", numbers, static_cast<int64_t>(count), kLambSettings);
    require(sums.dim() == 3 && sums.size(0) == 3 && sums.size(1) == static_cast<int64_t>(count),
            "sums have to be [3, ", count, ", stretches], not ", seen(sums));
    const int64_t most = sums.size(2);
    auto* to = elements_of<float>("sums", sums, sums.numel(), {ScalarType::Float});
    std::vector<Lamb> jobs;
    for (size_t i = 0; i < count; ++i) {
        const int64_t n = weights[i].numel();
        require((n + kLambStretch - 1) / kLambStretch <= most, "sums have ", most, " stretches, too few for ", n,
                " elements");
        Lamb job{};
        job.rule = kind, job.apart = static_cast<int64_t>(count) * most;
        job.kind = number_of(weights[i]), job.weights = elements_of<void>("weights", weights[i], n, kFloats);
        job.gradient_kind = number_of(gradients[i]);
        job.gradient = elements_of<void>("gradients", gradients[i], n, kFloats);
        job.momentum = elements_of<float>("momenta", momenta[i], n, {ScalarType::Float});
        job.square = elements_of<float>("squares", squares[i], n, {ScalarType::Float});
        if (!fresh.empty()) job.fresh = elements_of<float>("fresh", fresh[i], n, {ScalarType::Float});
        job.settings = numbers.row<float>(static_cast<int64_t>(i));
        for (int64_t at = 0, k = 0; at < n; at += kLambStretch, ++k) {
            jobs.push_back(job);
            Lamb& one = jobs.back();
            one.n = std::min(n - at, kLambStretch);
            one.weights = static_cast<char*>(job.weights) + at * (job.kind == Number::f32 ? 4 : 2);
            one.gradient = static_cast<const char*>(job.gradient) + at * (job.gradient_kind == Number::f32 ? 4 : 2);
            one.momentum += at, one.square += at;
            if (one.fresh) one.fresh += at;
            one.sums = to + static_cast<int64_t>(i) * most + k;
        }
    }
    const Level& kernels = level();
    torch::stable::parallel_for(0, static_cast<int64_t>(jobs.size()), 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) kernels.lamb(jobs[static_cast<size_t>(i)]);
    });
}

}  // namespace
}  // namespace yafsdp_cc::cpu

STABLE_TORCH_LIBRARY_IMPL(yafsdp_cc, CPU, m) {
    m.impl("encode", TORCH_BOX(&yafsdp_cc::cpu::encode));
    m.impl("accumulate", TORCH_BOX(&yafsdp_cc::cpu::accumulate));
    m.impl("decode_sum", TORCH_BOX(&yafsdp_cc::cpu::decode_sum));
    m.impl("decode", TORCH_BOX(&yafsdp_cc::cpu::decode));
    m.impl("update", TORCH_BOX(&yafsdp_cc::cpu::update));
    m.impl("update_lamb", TORCH_BOX(&yafsdp_cc::cpu::update_lamb));
}

// The operators on CUDA tensors: what they are given is checked here, and handed on as plain numbers (jobs.h).
//
// Schemas are registered with the library, not here. A tensor that would make a kernel touch what is not its own is an
// error; what only has an odd alignment is read and written in smaller steps.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "jobs.h"

namespace yafsdp_cc {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t PART = 5 * TILE;

Dtype dtype_of(const Tensor& tensor, const char* name) {
    switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::fp32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::fp16;
    case ScalarType::Char: return Dtype::int8;
    default: STD_TORCH_CHECK(false, name, " has a dtype that no kernel takes");
    }
    return Dtype::none;
}

void on_device(const Tensor& tensor, const Tensor& other, const char* name) {
#ifndef YAFSDP_CC_SIMT
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == other.get_device_index(), name,
                    " is not on the GPU that the other tensors are on");
#else
    (void)tensor, (void)other, (void)name;
#endif
}

bool aligned(const void* data, int64_t stride_bytes, int64_t to) {
    return reinterpret_cast<std::uintptr_t>(data) % to == 0 && stride_bytes % to == 0;
}

// [messages, n], or [n] as one row.
Rows rows_of(const Tensor& tensor, int64_t messages, int64_t n, const char* name) {
    const int64_t columns = tensor.dim() - 1;
    STD_TORCH_CHECK(columns == 0 || columns == 1, name, " is not a matrix");
    STD_TORCH_CHECK((columns == 0 ? 1 : tensor.size(0)) == messages && tensor.size(columns) == n, name, " should be [",
                    messages, ", ", n, "]");
    STD_TORCH_CHECK(n <= 1 || tensor.stride(columns) == 1, name, " has rows that are not contiguous");
    Rows rows;
    rows.data = tensor.data_ptr();
    rows.stride = columns == 0 ? n : tensor.stride(0);
    rows.dtype = dtype_of(tensor, name);
    const int64_t size = int64_t(tensor.element_size());
    rows.wide = aligned(rows.data, rows.stride * size, 4 * size);
    return rows;
}

int64_t message_bytes(CodecNumber codec, int64_t n, int64_t block) {
    const int64_t scales = 4 * (n / block), whole = n / TILE, rest = n % TILE;
    const auto kept = [](int64_t of) { return (of + 99) / 100; };
    switch (codec) {
    case CodecNumber::fp32: return 4 * n;
    case CodecNumber::bf16: return 2 * n;
    case CodecNumber::fp8:
    case CodecNumber::int8: return scales + n;
    case CodecNumber::int6: return scales + n / 8 * 6;
    case CodecNumber::int4: return scales + n / 2;
    case CodecNumber::int3: return scales + n / 8 * 3;
    case CodecNumber::int2: return scales + n / 4;
    case CodecNumber::ternary: return scales + (n + 5 * block - 1) / (5 * block) * block;
    case CodecNumber::onebit: return scales + n / 8;
    case CodecNumber::topk: return 4 * (whole * kept(TILE) + kept(rest));
    }
    return 0;
}

CodecNumber codec_of(int64_t number) {
    STD_TORCH_CHECK(number >= 0 && number <= int64_t(CodecNumber::int2), "there is no codec ", number);
    return CodecNumber(number);
}

void check_message(const Tensor& message, CodecNumber codec, int64_t n, int64_t block) {
    STD_TORCH_CHECK(message.dim() == 2 && message.scalar_type() == ScalarType::Byte, "messages are not bytes");
    STD_TORCH_CHECK(message.size(1) >= message_bytes(codec, n, block), "messages of ", message.size(1),
                    " bytes are too short for ", n, " elements");
    STD_TORCH_CHECK(message.size(1) <= 1 || message.stride(1) == 1, "messages are not contiguous");
    STD_TORCH_CHECK(aligned(message.data_ptr(), message.stride(0), 4), "messages are not aligned to 4 bytes");
}

void check_sizes(int64_t messages, int64_t n, int64_t block) {
    bool known = false;
    for (int64_t each = 64; each <= 4096; each *= 2) known |= block == each;
    STD_TORCH_CHECK(known, "there are no blocks of ", block, " elements");
    STD_TORCH_CHECK(n % block == 0, n, " elements are not a multiple of the block, ", block);
    // Pieces of 64 elements are counted in 32 bits, rounded up to fives of blocks of each message; so are its words.
    STD_TORCH_CHECK(n < (int64_t(1) << 33) && messages * (n / 64 + 5 * block / 64) < (int64_t(1) << 31),
                    "too many elements: ", messages, " messages of ", n);
}

Stream stream_of(const Tensor& tensor, int64_t handle) {
    return {tensor.get_device_index(), reinterpret_cast<void*>(handle)};
}

void set_residual(EncodeJob& job, const Tensor& residual, const std::optional<Tensor>& scales) {
    const int64_t messages = job.messages, blocks = job.n / job.block;
    job.residual = rows_of(residual, messages, job.n, "the residual");
    STD_TORCH_CHECK(job.residual.dtype != Dtype::fp16, "a residual is not stored as fp16");
    if (job.residual.dtype != Dtype::int8) return;
    STD_TORCH_CHECK(scales.has_value() && scales->scalar_type() == ScalarType::Float,
                    "an int8 residual has fp32 scales");
    on_device(*scales, residual, "the residual's scales");
    const Rows rows = rows_of(*scales, messages, blocks, "the residual's scales");
    job.residual_scales = static_cast<float*>(rows.data), job.residual_scales_stride = rows.stride;
}

EncodeJob job_of(const Tensor& gradients, int64_t block, double scale) {
    STD_TORCH_CHECK(gradients.dim() == 2, "gradients are not [messages, n]");
    check_sizes(gradients.size(0), gradients.size(1), block);
    EncodeJob job;
    job.gradients = rows_of(gradients, gradients.size(0), gradients.size(1), "gradients");
    STD_TORCH_CHECK(job.gradients.dtype != Dtype::int8, "gradients are not floating-point");
    job.messages = unsigned(gradients.size(0)), job.n = gradients.size(1), job.block = int(block);
    job.scale = float(scale);
    return job;
}

void encode_op(const Tensor gradients, const Tensor message, int64_t codec, int64_t block,
               const std::optional<Tensor> counts, const std::optional<Tensor> residual,
               const std::optional<Tensor> residual_scales, double carry, double taken, double added, double scale,
               int64_t seed, int64_t first, int64_t stream) {
    const CodecNumber number = codec_of(codec);
    EncodeJob job = job_of(gradients, block, scale);
    check_message(message, number, job.n, block);
    STD_TORCH_CHECK(message.size(0) == gradients.size(0), "there are not as many messages as rows of gradients");
    on_device(message, gradients, "the message");
    job.message = static_cast<unsigned char*>(message.data_ptr()), job.message_stride = message.stride(0);
    job.message_wide = aligned(job.message, job.message_stride, 16);
    if (counts) {
        on_device(*counts, gradients, "counts");
        const bool fits = counts->dim() == 2 && counts->size(0) == gradients.size(0) &&
                          counts->size(1) == job.n / block && (counts->size(1) <= 1 || counts->stride(1) == 1);
        STD_TORCH_CHECK(fits && counts->scalar_type() == ScalarType::Int, "counts are not [messages, blocks] int32");
        job.counts = static_cast<const int*>(counts->data_ptr()), job.counts_stride = counts->stride(0);
    }
    if (residual) {
        on_device(*residual, gradients, "the residual");
        set_residual(job, *residual, residual_scales);
    }
    job.carry = float(carry), job.taken = float(taken), job.added = float(added);
    job.noisy = seed >= 0 && !residual; // with a residual, codecs round to nearest
    job.seed = unsigned(seed), job.first = unsigned(first);
    if (job.messages > 0 && job.n > 0) encode(job, number, stream_of(gradients, stream));
}

void accumulate_op(const Tensor gradients, const Tensor residual, const Tensor residual_scales, int64_t block,
                   double scale, int64_t stream) {
    EncodeJob job = job_of(gradients, block, scale);
    on_device(residual, gradients, "the residual");
    set_residual(job, residual, residual_scales);
    if (job.messages > 0 && job.n > 0) accumulate(job, stream_of(gradients, stream));
}

DecodeJob job_of(const Tensor& messages, CodecNumber codec, int64_t n, int64_t block) {
    check_message(messages, codec, n, block);
    check_sizes(messages.size(0), n, block);
    DecodeJob job;
    job.message = static_cast<const unsigned char*>(messages.data_ptr()), job.message_stride = messages.stride(0);
    job.message_wide = aligned(job.message, job.message_stride, 16);
    job.messages = unsigned(messages.size(0)), job.n = n, job.block = int(block);
    return job;
}

void decode_sum_op(const Tensor messages, int64_t codec, int64_t block, int64_t n, const std::optional<Tensor> own,
                   int64_t place, const Tensor total, int64_t start, int64_t stream) {
    const CodecNumber number = codec_of(codec);
    DecodeJob job = job_of(messages, number, n, block);
    STD_TORCH_CHECK(total.dim() == 1 && total.scalar_type() == ScalarType::Float, "the total is not [count] fp32");
    on_device(total, messages, "the total");
    job.start = start, job.count = total.size(0), job.sum = true;
    STD_TORCH_CHECK(start >= 0 && start % PART == 0 && start + job.count <= n && job.count % block == 0,
                    "elements ", start, " to ", start + job.count, " of ", n, " are not a part of a message");
    job.out = rows_of(total, 1, job.count, "the total");
    job.place = job.messages;
    if (own) {
        on_device(*own, messages, "this rank's own part");
        job.own = rows_of(*own, 1, job.count, "this rank's own part");
        STD_TORCH_CHECK(job.own.dtype != Dtype::int8, "this rank's own part is not floating-point");
        if (place < job.messages) job.place = unsigned(place < 0 ? 0 : place);
    }
    STD_TORCH_CHECK(own || job.messages > 0, "there is nothing to sum");
    if (job.count > 0) decode(job, number, stream_of(messages, stream));
}

void decode_op(const Tensor messages, int64_t codec, int64_t block, const Tensor values, int64_t stream) {
    STD_TORCH_CHECK(values.dim() == 2, "values are not [messages, n]");
    const CodecNumber number = codec_of(codec);
    DecodeJob job = job_of(messages, number, values.size(1), block);
    on_device(values, messages, "values");
    job.out = rows_of(values, messages.size(0), values.size(1), "values");
    STD_TORCH_CHECK(job.out.dtype != Dtype::int8, "values are not floating-point");
    job.count = job.n;
    if (job.messages > 0 && job.n > 0) decode(job, number, stream_of(messages, stream));
}

// The elements of a contiguous tensor of any shape.
void* elements_of(const Tensor& tensor, const Tensor& weights, bool& wide, const char* name) {
    on_device(tensor, weights, name);
    STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == weights.numel(), name, " should be ", weights.numel(),
                    " contiguous elements");
    STD_TORCH_CHECK(dtype_of(tensor, name) != Dtype::int8, name, " are not floating-point");
    wide = wide && aligned(tensor.data_ptr(), 0, 4 * int64_t(tensor.element_size()));
    return tensor.data_ptr();
}

float* moments_of(const std::vector<Tensor>& tensors, size_t i, const Tensor& weights, bool& wide, const char* name) {
    if (tensors.empty()) return nullptr;
    STD_TORCH_CHECK(tensors[i].scalar_type() == ScalarType::Float, name, " are not fp32");
    return static_cast<float*>(elements_of(tensors[i], weights, wide, name));
}

// They are read here, and go with the kernel's arguments.
void check_settings(const Tensor& settings, size_t count, int columns) {
    STD_TORCH_CHECK(settings.is_cpu() && settings.scalar_type() == ScalarType::Float && settings.dim() == 2 &&
                        settings.size(0) == int64_t(count) && settings.size(1) == columns && settings.is_contiguous(),
                    "settings are not [", count, ", ", columns, "] fp32 on the CPU");
}

// What the updates of all rules read and write of the i-th parameter.
template <class Parameter>
void take_in(Parameter& each, size_t i, const std::vector<Tensor>& weights, const std::vector<Tensor>& gradients,
             const std::vector<Tensor>& momenta, const std::vector<Tensor>& squares, const float* settings,
             int columns) {
    on_device(weights[i], weights[0], "weights");
    each.wide = true;
    each.n = weights[i].numel();
    each.weights = elements_of(weights[i], weights[i], each.wide, "weights");
    each.gradient = elements_of(gradients[i], weights[i], each.wide, "gradients");
    each.momentum = moments_of(momenta, i, weights[i], each.wide, "momenta");
    each.square = moments_of(squares, i, weights[i], each.wide, "squares");
    each.dtype = dtype_of(weights[i], "weights"), each.gradient_dtype = dtype_of(gradients[i], "gradients");
    std::copy_n(settings, columns, each.settings);
}

void update_op(int64_t rule, const std::vector<Tensor> weights, const std::vector<Tensor> gradients,
               const std::vector<Tensor> momenta, const std::vector<Tensor> squares, const Tensor settings,
               int64_t stream) {
    STD_TORCH_CHECK(rule >= 0 && rule <= int64_t(Rule::adam_momentum), "there is no rule ", rule);
    UpdateJob job;
    job.rule = Rule(rule);
    const bool is_adam = job.rule == Rule::adam_gradient || job.rule == Rule::adam_momentum;
    const size_t count = weights.size();
    const int columns = is_adam ? ADAM_SETTINGS : SGD_SETTINGS;
    STD_TORCH_CHECK(gradients.size() == count && momenta.size() == (job.rule == Rule::adam_momentum ? 0 : count) &&
                        squares.size() == (is_adam ? count : 0),
                    "rule ", rule, " of ", count, " weights does not go with ", gradients.size(), " gradients, ",
                    momenta.size(), " momenta and ", squares.size(), " squares");
    check_settings(settings, count, columns);
    if (count == 0) return;
    const float* row = static_cast<const float*>(settings.data_ptr());
    unsigned long long end = 0;
    for (size_t i = 0; i < count; ++i, row += columns) {
        Updated& each = job.of[job.count++];
        take_in(each, i, weights, gradients, momenta, squares, row, columns);
        each.end = end += (each.n + UPDATE_STRETCH - 1) / UPDATE_STRETCH;
        if (job.count < UPDATED_TOGETHER && i + 1 < count) continue;
        update(job, stream_of(weights[0], stream));
        job.count = 0, end = 0;
    }
}

void update_lamb_op(int64_t rule, const std::vector<Tensor> weights, const std::vector<Tensor> gradients,
                    const std::vector<Tensor> momenta, const std::vector<Tensor> squares,
                    const std::vector<Tensor> fresh, const Tensor settings, const Tensor sums, int64_t stream) {
    STD_TORCH_CHECK(rule >= 0 && rule <= int64_t(LambRule::momentum), "there is no rule ", rule);
    LambJob job;
    job.rule = LambRule(rule);
    const size_t count = weights.size();
    STD_TORCH_CHECK(gradients.size() == count && momenta.size() == count && squares.size() == count &&
                        fresh.size() == (job.rule == LambRule::exact ? 0 : count),
                    "rule ", rule, " of ", count, " weights does not go with ", gradients.size(), " gradients, ",
                    momenta.size(), " momenta, ", squares.size(), " squares and ", fresh.size(), " fresh ones");
    check_settings(settings, count, LAMB_SETTINGS);
    STD_TORCH_CHECK(sums.scalar_type() == ScalarType::Float && sums.dim() == 3 && sums.size(0) == 3 &&
                        sums.size(1) == int64_t(count) && sums.is_contiguous(),
                    "sums are not [3, ", count, ", stretches] fp32");
    if (count == 0) return;
    on_device(sums, weights[0], "sums");
    const float* row = static_cast<const float*>(settings.data_ptr());
    job.most = sums.size(2), job.apart = int64_t(count) * job.most;
    job.sums = static_cast<float*>(sums.data_ptr());
    unsigned long long end = 0;
    for (size_t i = 0; i < count; ++i, row += LAMB_SETTINGS) {
        LambUpdated& each = job.of[job.count++];
        take_in(each, i, weights, gradients, momenta, squares, row, LAMB_SETTINGS);
        each.fresh = moments_of(fresh, i, weights[i], each.wide, "fresh ones");
        const long long stretches = (each.n + LAMB_STRETCH - 1) / LAMB_STRETCH;
        STD_TORCH_CHECK(stretches <= job.most, "sums have ", job.most, " stretches, too few for ", each.n, " elements");
        each.end = end += stretches;
        if (job.count < LAMB_TOGETHER && i + 1 < count) continue;
        update_lamb(job, stream_of(weights[0], stream));
        job.sums += job.count * job.most, job.count = 0, end = 0;
    }
}

} // namespace
} // namespace yafsdp_cc

#ifndef YAFSDP_CC_SIMT
STABLE_TORCH_LIBRARY_IMPL(yafsdp_cc, CUDA, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(yafsdp_cc_simt, CPU, m) {
#endif
    m.impl("encode", TORCH_BOX(&yafsdp_cc::encode_op));
    m.impl("accumulate", TORCH_BOX(&yafsdp_cc::accumulate_op));
    m.impl("decode_sum", TORCH_BOX(&yafsdp_cc::decode_sum_op));
    m.impl("decode", TORCH_BOX(&yafsdp_cc::decode_op));
    m.impl("update", TORCH_BOX(&yafsdp_cc::update_op));
    m.impl("update_lamb", TORCH_BOX(&yafsdp_cc::update_lamb_op));
}

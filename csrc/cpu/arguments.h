// Tensors as kernels want them, or an error with what was seen.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "level.h"

namespace yafsdp_cc::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows of numbers, each of them contiguous.
struct Rows {
    char* data = nullptr;
    int64_t rows = 0, columns = 0, stride = 0;  // bytes from row to row
    Number kind = Number::none;

    template <class T>
    T* row(int64_t i) const {
        return data ? reinterpret_cast<T*>(data + i * stride) : nullptr;
    }
};

inline const char* name_of(ScalarType type) {
    switch (type) {
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Half:
            return "float16";
        case ScalarType::Char:
            return "int8";
        case ScalarType::Byte:
            return "uint8";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        default:
            return "another dtype";
    }
}

inline std::string seen(const Tensor& tensor) {
    std::ostringstream text;
    text << "a tensor of " << name_of(tensor.scalar_type()) << " [";
    for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.size(d);
    text << "] with strides [";
    for (int64_t d = 0; d < tensor.dim(); ++d) text << (d ? ", " : "") << tensor.stride(d);
    text << "] on " << (tensor.is_cpu() ? "cpu" : tensor.is_cuda() ? "cuda" : "another device");
    return text.str();
}

template <class... Text>
inline void require(bool holds, const Text&... text) {
    if (holds) return;
    std::ostringstream message;
    (message << ... << text);
    throw std::runtime_error(message.str());
}

// A tensor as rows; one with a single dimension is one row.
inline Rows rows_of(const char* what, const Tensor& tensor, std::initializer_list<ScalarType> types) {
    bool fits = false;
    for (const ScalarType type : types) fits = fits || tensor.scalar_type() == type;
    if (!fits || !tensor.is_cpu() || tensor.dim() < 1 || tensor.dim() > 2 ||
        (tensor.size(-1) > 1 && tensor.stride(tensor.dim() - 1) != 1)) {
        std::ostringstream text;
        text << what << " has to be";
        const char* between = " ";
        for (const ScalarType type : types) text << between << name_of(type), between = " or ";
        text << ", of one or two dimensions, with contiguous rows and on a CPU, not " << seen(tensor);
        throw std::runtime_error(text.str());
    }
    Rows rows;
    rows.data = static_cast<char*>(tensor.data_ptr());
    rows.columns = tensor.size(tensor.dim() - 1);
    rows.rows = tensor.dim() == 2 ? tensor.size(0) : 1;
    rows.stride = (tensor.dim() == 2 ? tensor.stride(0) : rows.columns) * static_cast<int64_t>(tensor.element_size());
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            rows.kind = Number::f32;
            break;
        case ScalarType::BFloat16:
            rows.kind = Number::bf16;
            break;
        case ScalarType::Half:
            rows.kind = Number::f16;
            break;
        case ScalarType::Char:
            rows.kind = Number::i8;
            break;
        default:
            break;
    }
    return rows;
}

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
constexpr std::initializer_list<ScalarType> kResiduals = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Char};

inline void require_shape(const char* what, const Rows& seen, int64_t rows, int64_t columns) {
    require(seen.rows == rows && seen.columns == columns, what, " has to be [", rows, ", ", columns, "], not [",
            seen.rows, ", ", seen.columns, "]");
}

// A codec and the size of its messages.
struct Shape {
    Code codec;
    int64_t n, block;

    Shape(int64_t codec, int64_t n, int64_t block) : codec(static_cast<Code>(codec)), n(n), block(block) {
        require(codec >= 0 && codec <= static_cast<int64_t>(Code::int2), "there is no codec number ", codec);
        require(block >= 64 && block <= 4096 && (block & (block - 1)) == 0, "block=", block,
                ": a block has a power of two of elements, from 64 to 4096");
        require(n > 0 && n % block == 0, "a message holds whole blocks of ", block, ", not ", n, " elements");
    }

    // Without the padding at the end of a message.
    int64_t body_bytes() const {
        const int64_t scales = n / block * 4;
        switch (codec) {
            case Code::fp32:
                return 4 * n;
            case Code::bf16:
                return 2 * n;
            case Code::fp8:
            case Code::int8:
                return scales + n;
            case Code::int6:
                return scales + n / 8 * 6;
            case Code::int4:
                return scales + n / 2;
            case Code::int3:
                return scales + n / 8 * 3;
            case Code::int2:
                return scales + n / 4;
            case Code::ternary:
                return scales + (n + 5 * block - 1) / (5 * block) * block;
            case Code::onebit:
                return scales + n / 8;
            case Code::topk:
                break;
        }
        const int64_t whole = n / kTile, rest = n % kTile;
        return 4 * (whole * ((kTile + 99) / 100) + (rest + 99) / 100);
    }

    void require_message(const Rows& message) const {
        require(message.columns >= body_bytes(), "a message of ", n, " elements has at least ", body_bytes(),
                " bytes, not ", message.columns);
        require(reinterpret_cast<uintptr_t>(message.data) % 4 == 0 && message.stride % 4 == 0,
                "messages have to begin at multiples of 4 bytes, not at ", static_cast<void*>(message.data),
                " with strides of ", message.stride);
    }
};

}  // namespace yafsdp_cc::cpu

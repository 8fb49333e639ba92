// What the kernels are asked to do, in plain numbers and addresses: no torch here, and nothing of CUDA.
#pragma once

namespace yafsdp_cc {

enum class Dtype : int { none, fp32, bf16, fp16, int8 };

// The codecs, by the numbers that compression/error_feedback.py gives them.
enum class CodecNumber : int { fp32, bf16, fp8, int8, int4, ternary, onebit, topk };

// A matrix whose rows lie anywhere, but each in one piece.
struct Rows {
    void* data = nullptr;
    long long stride = 0;      // elements from row to row
    Dtype dtype = Dtype::none; // none: there is no such matrix
    bool wide = false;         // four elements that begin at a multiple of four are aligned to their common size
};

struct EncodeJob {
    Rows gradients;
    Rows residual;
    float* residual_scales = nullptr; // of an int8 residual: one for each block
    long long residual_scales_stride = 0;
    unsigned char* message = nullptr; // null: gradients are only accumulated in the residual
    long long message_stride = 0;
    bool message_wide = false; // rows of messages are aligned to 16 bytes; else to 4
    const int* counts = nullptr; // null: blocks are full
    long long counts_stride = 0;
    unsigned messages = 0;
    long long n = 0;
    int block = 0;
    float carry = 1, taken = 1, scale = 1;
    bool noisy = false;
    unsigned seed = 0, first = 0; // of the noise
};

struct DecodeJob {
    const unsigned char* message = nullptr;
    long long message_stride = 0;
    bool message_wide = false;
    unsigned messages = 0;
    long long n = 0; // elements of a message
    int block = 0;
    Rows out;            // sum: one row; else a row for each message
    long long start = 0; // the first element that ``out`` begins with
    long long count = 0; // how many ``out`` has
    bool sum = false;
    Rows own; // one row of ``count`` elements, added before message ``place``; may be ``out`` where that is the first
    unsigned place = 0;
};

// Each enqueues one kernel on the stream and returns an error's name, or null.
const char* encode(const EncodeJob& job, CodecNumber codec, void* stream);
const char* accumulate(const EncodeJob& job, void* stream);
const char* decode(const DecodeJob& job, CodecNumber codec, void* stream);

// Those of ``topk``, which the ones above call.
const char* encode_topk(const EncodeJob& job, void* stream);
const char* decode_topk(const DecodeJob& job, void* stream);

} // namespace yafsdp_cc

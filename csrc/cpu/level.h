// What the kernels are asked to do, and the table of those that one instruction set has. No torch, no C++ library: what
// includes this is compiled once for each instruction set, and an inline function of a library compiled for a wide one
// could be the copy that the linker keeps for all.
#pragma once

#include <cstdint>

namespace yafsdp_cc::cpu {

enum class Number : int { none, f32, bf16, f16, i8 };

// As numbered in yafsdp_cc/compression/error_feedback.py.
enum class Code : int { fp32, bf16, fp8, int8, int4, ternary, onebit, topk, int6, int3, int2 };

// Elements of a tile of topk.
constexpr int64_t kTile = 65536;

// What topk needs of memory while it works on a tile.
struct Scratch {
    alignas(64) float h[kTile];
    alignas(64) float due[kTile];
    uint16_t positions[kTile];
};

// The residual of one message.
struct Left {
    Number kind;
    void* values;
    float* scales;  // of int8, one for each block
};

// One message to be written.
struct Encode {
    Code codec;
    int64_t n, block;
    Number kind;
    const void* gradients;
    uint8_t* message;
    const int32_t* counts;  // of each block; null: all elements are there
    Left residual;
    float carry, taken, added, scale;
    bool noisy;
    uint32_t seed, first;  // of the noise, and the number of the first element in it
    Scratch* scratch;
};

// Gradients to be added to a residual.
struct Accumulate {
    int64_t n, block;
    Number kind;
    const void* gradients;
    Left residual;
    float scale;
};

// Messages to be summed, from element `start` on. Elements of messages, not bytes, are counted by n, start and length.
struct DecodeSum {
    Code codec;
    int64_t n, block;
    const uint8_t* messages;
    int64_t count, stride;
    Number kind;
    const void* own;  // [length]; null: there is none
    int64_t place;    // before which message `own` is added
    float* total;     // [length]; may be own where place is 0
    int64_t start, length;
};

// One message to be read.
struct Decode {
    Code codec;
    int64_t n, block;
    const uint8_t* message;
    Number kind;
    void* values;
};

// Rules of updates, and columns of the settings of each, as in yafsdp_cc/optim/update.py.
enum class Rule : int { sgd_gradient, sgd_momentum, adam_gradient, adam_momentum };
constexpr int kSgdSettings = 3, kAdamSettings = 8;

// A range of one parameter to be updated. No two of its arrays share memory.
struct Update {
    Rule rule;
    int64_t n;
    Number kind;
    void* weights;
    Number gradient_kind;
    const void* gradient;
    float* momentum;      // null: the rule has none, or the gradient is it
    const float* square;  // of Adam's rules
    const float* settings;
};

// LAMB's rules, and columns of the settings of each, as in yafsdp_cc/optim/lamb.py.
enum class LambRule : int { exact, gradient, momentum };
constexpr int kLambSettings = 13;
constexpr int64_t kLambStretch = 8192;  // elements that one number of the sums is of

// A stretch of one parameter to be updated. No two of its arrays share memory.
struct Lamb {
    LambRule rule;
    int64_t n;
    Number kind;
    void* weights;
    Number gradient_kind;
    const void* gradient;
    float *momentum, *square, *fresh;  // the last one is null with `exact`
    const float* settings;
    float* sums;  // three numbers, so many elements apart
    int64_t apart;
};

struct Level {
    const char* name;
    void (*encode)(const Encode&);
    void (*accumulate)(const Accumulate&);
    void (*decode_sum)(const DecodeSum&);
    void (*decode)(const Decode&);
    void (*update)(const Update&);
    void (*lamb)(const Lamb&);
};

}  // namespace yafsdp_cc::cpu

// What the kernels are asked to do, in plain numbers and addresses: no torch here, nothing of CUDA, and no header of
// another library, for NVRTC reads this too.
#pragma once

namespace yafsdp_cc {

enum class Dtype : int { none, fp32, bf16, fp16, int8 };

// The codecs, by the numbers that compression/error_feedback.py gives them.
enum class CodecNumber : int { fp32, bf16, fp8, int8, int4, ternary, onebit, topk, int6, int3, int2 };

// Threads of a thread block.
constexpr int ENCODE_THREADS = 128, DECODE_THREADS = 128; // few, to fill a multiprocessor well, and fit next to others
constexpr int TOPK_THREADS = 512, UPDATE_THREADS = 256, LAMB_THREADS = 256;
// Threads that have a block together, and columns of its rows (team.cuh); blocks of ``ternary`` that share their bytes;
// elements that a thread block of ``topk`` encodes, and decodes, at a time.
constexpr unsigned TEAM = 16, LANES = 64, TERNARY_TOGETHER = 5, TILE = 65536, STRETCH = 4096;

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
    float carry = 1, taken = 1, added = 1, scale = 1;
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

// Rules of updates, and columns of the settings of each, as in yafsdp_cc/optim/update.py.
enum class Rule : int { sgd_gradient, sgd_momentum, adam_gradient, adam_momentum };
constexpr int SGD_SETTINGS = 3, ADAM_SETTINGS = 8;

// One parameter to be updated. No two of its arrays share memory.
struct Updated {
    void* weights = nullptr;
    const void* gradient = nullptr;
    float* momentum = nullptr;     // null: the rule has none, or the gradient is it
    const float* square = nullptr; // of Adam's rules
    long long n = 0;
    unsigned long long end = 0; // stretches of it and of all before it
    Dtype dtype = Dtype::none, gradient_dtype = Dtype::none;
    bool wide = false; // four elements that begin at a multiple of four are aligned to their common size in all arrays
    float settings[ADAM_SETTINGS] = {};
};

// As many as fit into a kernel's 4096 bytes of arguments.
constexpr int UPDATED_TOGETHER = 40;
constexpr int UPDATE_STRETCH = 2048; // elements that a thread block takes at a time

struct UpdateJob {
    Updated of[UPDATED_TOGETHER];
    int count = 0;
    Rule rule = Rule::sgd_gradient;
};
static_assert(sizeof(UpdateJob) <= 4096, "a kernel takes 4096 bytes of arguments");

// LAMB's rules, and columns of the settings of each, as in yafsdp_cc/optim/lamb.py.
enum class LambRule : int { exact, gradient, momentum };
constexpr int LAMB_SETTINGS = 13;

// One parameter to be updated. No two of its arrays share memory.
struct LambUpdated {
    void* weights = nullptr;
    const void* gradient = nullptr;
    float *momentum = nullptr, *square = nullptr;
    float* fresh = nullptr; // null with ``exact``
    long long n = 0;
    unsigned long long end = 0; // stretches of it and of all before it
    Dtype dtype = Dtype::none, gradient_dtype = Dtype::none;
    bool wide = false; // as of Updated
    float settings[LAMB_SETTINGS] = {};
};

constexpr int LAMB_TOGETHER = 33;
constexpr int LAMB_BLOCK = 512;    // elements whose squares are added in the order of the format
constexpr int LAMB_STRETCH = 8192; // elements that a thread block takes at a time, and one number of the sums is of

struct LambJob {
    LambUpdated of[LAMB_TOGETHER];
    int count = 0;
    LambRule rule = LambRule::exact;
    float* sums = nullptr; // of the first parameter's first stretch: three numbers, so many elements apart
    long long apart = 0;
    long long most = 0; // from one parameter's to the next one's
};
static_assert(sizeof(LambJob) <= 4096, "a kernel takes 4096 bytes of arguments");

// Where a kernel runs: the number of a GPU, and CUDA's handle of one of its streams.
struct Stream {
    int device;
    void* handle;
};

// Each enqueues one kernel, or throws std::runtime_error.
void encode(const EncodeJob& job, CodecNumber codec, Stream stream);
void accumulate(const EncodeJob& job, Stream stream);
void decode(const DecodeJob& job, CodecNumber codec, Stream stream);
void update(const UpdateJob& job, Stream stream);
void update_lamb(const LambJob& job, Stream stream);

// A kernel ``name`` of ``file``, as the source spells both, compiled for jobs of which this is ``known`` (rows.cuh).
struct KernelName {
    const char *file, *name, *known;
};

// What they call: of at most ``most`` thread blocks.
void launch(const KernelName& kernel, const void* job, unsigned long long most, int threads, Stream stream);

} // namespace yafsdp_cc

// Which kernel a job takes, and of how many thread blocks at most: as many as there is work for.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "jobs.h"

namespace yafsdp_cc {
namespace {

// The classes of a codec (encode.cuh, decode.cuh), by its number; how many of its blocks share their bytes; and how
// many messages are on their way in a sum of many: of fp32 and bf16 fewer, whose messages take more registers.
constexpr struct {
    const char *codec, *at_random, *reader;
    unsigned together, ahead;
} CLASSES[] = {
    {"Float<false>", "Float<false>", "FloatReader<false>", 1, 2},
    {"Float<true>", "Float<true>", "FloatReader<true>", 1, 4},
    {"FP8", "FP8", "FP8Reader", 1, 8},
    {"Whole<8, false>", "Whole<8, true>", "WholeReader<8>", 1, 8},
    {"Whole<4, false>", "Whole<4, true>", "WholeReader<4>", 1, 8},
    {"Ternary<false>", "Ternary<true>", "TernaryReader", TERNARY_TOGETHER, 8},
    {"OneBit", "OneBit", "OneBitReader", 1, 8},
    {}, // topk, which has kernels of its own
    {"Whole<6, false>", "Whole<6, true>", "WholeReader<6>", 1, 8},
    {"Odd<3, false>", "Odd<3, true>", "OddReader<3>", 1, 8},
    {"Odd<2, false>", "Odd<2, true>", "OddReader<2>", 1, 8},
};
static_assert(std::size(CLASSES) == int(CodecNumber::int2) + 1, "each codec has its classes");
constexpr unsigned MANY_MESSAGES = 16; // two batches: with fewer, none is added while another one is on its way

struct Text {
    char text[256];

    template <class... Values> explicit Text(const char* format, Values... values) {
        std::snprintf(text, sizeof text, format, values...);
    }
};

Text block_of(int block) { return block > 4 * int(LANES) ? Text("%s", "") : Text(", job.block = %d", block); }

// What a kernel is compiled for. Rows with odd alignments are rare: one kernel serves all dtypes of them, except where
// that has too few registers, as that of topk has.
Text known_of(const EncodeJob& job, bool is_topk) {
    const bool wide = job.gradients.wide && (job.residual.dtype == Dtype::none || job.residual.wide);
    if (!wide && !is_topk) return Text("%s", "");
    return Text("job.gradients.dtype = Dtype(%d), job.residual.dtype = Dtype(%d)%s%s%s", int(job.gradients.dtype),
                int(job.residual.dtype), wide ? ", job.gradients.wide = true, job.residual.wide = true" : "",
                job.counts ? "" : ", job.counts = nullptr", block_of(job.block).text);
}
Text known_of(const DecodeJob& job) {
    if (!job.out.wide || (job.own.dtype != Dtype::none && !job.own.wide)) return Text("%s", "");
    return Text("job.out.dtype = Dtype(%d), job.own.dtype = Dtype(%d), job.out.wide = true, job.own.wide = true, "
                "job.sum = %s%s",
                int(job.out.dtype), int(job.own.dtype), job.sum ? "true" : "false", block_of(job.block).text);
}

// Rows of a block, or of a patch of it, that a team has in registers.
int rows_of(int block) { return std::min(block / int(LANES), 4); }
const char* is_many(int block) { return block > 4 * int(LANES) ? "true" : "false"; }

unsigned long long rounded_up(unsigned long long n, unsigned long long to) { return (n + to - 1) / to; }

void encode_blocks(const EncodeJob& job, const char* codec, unsigned together, Stream stream) {
    const Text name("encode_kernel<%s, %d, %s>", codec, rows_of(job.block), is_many(job.block));
    const unsigned long long units = rounded_up(job.n / job.block, together) * job.messages;
    launch({"encode.cuh", name.text, known_of(job, false).text}, &job, rounded_up(units * TEAM, ENCODE_THREADS),
           ENCODE_THREADS, stream);
}

} // namespace

void encode(const EncodeJob& job, CodecNumber codec, Stream stream) {
    if (codec == CodecNumber::topk) {
        const Text name("encode_topk_kernel<%d, %s>", rows_of(job.block), is_many(job.block));
        return launch({"codecs/topk.cuh", name.text, known_of(job, true).text}, &job,
                      rounded_up(job.n, TILE) * job.messages, TOPK_THREADS, stream);
    }
    const auto& of = CLASSES[int(codec)];
    encode_blocks(job, job.noisy ? of.at_random : of.codec, of.together, stream);
}

void accumulate(const EncodeJob& job, Stream stream) { encode_blocks(job, "Nothing", 1, stream); }

void decode(const DecodeJob& job, CodecNumber codec, Stream stream) {
    const unsigned rows_out = job.sum ? 1 : job.messages;
    if (codec == CodecNumber::topk)
        return launch({"codecs/topk_decode.cuh", "decode_topk_kernel", known_of(job).text}, &job,
                      rounded_up(job.count, STRETCH) * rows_out, TOPK_THREADS, stream);
    const auto& of = CLASSES[int(codec)];
    const int rows = rows_of(job.block);
    const unsigned ahead = job.sum && job.messages >= MANY_MESSAGES ? of.ahead : 1;
    const Text name("decode_kernel<%s, %d, %u, %u>", of.reader, rows, of.together, ahead);
    const unsigned long long blocks = rounded_up(job.count / job.block, of.together) * of.together;
    const unsigned long long units = blocks * (job.block / (rows * LANES)) * rows_out;
    launch({"decode.cuh", name.text, known_of(job).text}, &job, rounded_up(units * TEAM, DECODE_THREADS), DECODE_THREADS,
           stream);
}

void update(const UpdateJob& job, Stream stream) {
    launch({"update.cu", "update_kernel", ""}, &job, job.of[job.count - 1].end, UPDATE_THREADS, stream);
}

void update_lamb(const LambJob& job, Stream stream) {
    launch({"lamb.cu", "lamb_kernel", ""}, &job, job.of[job.count - 1].end, LAMB_THREADS, stream);
}

} // namespace yafsdp_cc

#include "decode.cuh"

#include "launch.cuh"

namespace yafsdp_cc {

template <class Reader, unsigned TOGETHER = 1> static const char* decode_blocks(const DecodeJob& job, void* stream) {
    const int rows = std::min(job.block / int(LANES), 4);
    const unsigned long long blocks = (job.count / job.block + TOGETHER - 1) / TOGETHER * TOGETHER;
    const unsigned long long units = blocks * (job.block / (rows * LANES)) * (job.sum ? 1 : job.messages);
    const unsigned long long most = (units * TEAM + DECODE_THREADS - 1) / DECODE_THREADS;
    if (rows == 1) return launch(decode_kernel<Reader, 1, TOGETHER>, job, most, DECODE_THREADS, stream);
    if (rows == 2) return launch(decode_kernel<Reader, 2, TOGETHER>, job, most, DECODE_THREADS, stream);
    return launch(decode_kernel<Reader, 4, TOGETHER>, job, most, DECODE_THREADS, stream);
}

const char* decode(const DecodeJob& job, CodecNumber codec, void* stream) {
    switch (codec) {
    case CodecNumber::fp32: return decode_blocks<FloatReader<false>>(job, stream);
    case CodecNumber::bf16: return decode_blocks<FloatReader<true>>(job, stream);
    case CodecNumber::fp8: return decode_blocks<ByteReader<true>>(job, stream);
    case CodecNumber::int8: return decode_blocks<ByteReader<false>>(job, stream);
    case CodecNumber::int4: return decode_blocks<Int4Reader>(job, stream);
    case CodecNumber::ternary: return decode_blocks<TernaryReader, 5>(job, stream);
    case CodecNumber::onebit: return decode_blocks<OneBitReader>(job, stream);
    case CodecNumber::topk: return decode_topk(job, stream);
    }
    return "no such codec";
}

} // namespace yafsdp_cc

#include "encode.cuh"

#include "codecs/floats.cuh"
#include "codecs/nothing.cuh"

namespace yafsdp_cc {

const char* encode(const EncodeJob& job, CodecNumber codec, void* stream) {
    switch (codec) {
    case CodecNumber::fp32: return launch_encode<Float<false>>(job, stream);
    case CodecNumber::bf16: return launch_encode<Float<true>>(job, stream);
    case CodecNumber::fp8:
    case CodecNumber::int8:
    case CodecNumber::int4: return encode_steps(job, codec, stream);
    case CodecNumber::ternary:
    case CodecNumber::onebit: return encode_signs(job, codec, stream);
    case CodecNumber::topk: return encode_topk(job, stream);
    }
    return "no such codec";
}

const char* accumulate(const EncodeJob& job, void* stream) { return launch_encode<Nothing>(job, stream); }

} // namespace yafsdp_cc

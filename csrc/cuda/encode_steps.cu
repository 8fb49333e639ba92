#include "codecs/int4.cuh"
#include "encode.cuh"

namespace yafsdp_cc {

const char* encode_steps(const EncodeJob& job, CodecNumber codec, void* stream) {
    if (codec == CodecNumber::fp8) return launch_encode<FP8>(job, stream);
    if (codec == CodecNumber::int8)
        return job.noisy ? launch_encode<Int8<true>>(job, stream) : launch_encode<Int8<false>>(job, stream);
    return job.noisy ? launch_encode<Int4<true>>(job, stream) : launch_encode<Int4<false>>(job, stream);
}

} // namespace yafsdp_cc

#include "codecs/onebit.cuh"
#include "codecs/ternary.cuh"
#include "encode.cuh"

namespace yafsdp_cc {

const char* encode_signs(const EncodeJob& job, CodecNumber codec, void* stream) {
    if (codec == CodecNumber::onebit) return launch_encode<OneBit>(job, stream);
    return job.noisy ? launch_encode<Ternary<true>>(job, stream) : launch_encode<Ternary<false>>(job, stream);
}

} // namespace yafsdp_cc

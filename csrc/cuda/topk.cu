#include "codecs/topk.cuh"

#include "launch.cuh"

namespace yafsdp_cc {

const char* encode_topk(const EncodeJob& job, void* stream) {
    const unsigned long long units = (job.n + TILE - 1) / TILE * job.messages;
    if (job.block == 64) return launch(encode_topk_kernel<1, false>, job, units, TOPK_THREADS, stream);
    if (job.block == 128) return launch(encode_topk_kernel<2, false>, job, units, TOPK_THREADS, stream);
    if (job.block == 256) return launch(encode_topk_kernel<4, false>, job, units, TOPK_THREADS, stream);
    return launch(encode_topk_kernel<4, true>, job, units, TOPK_THREADS, stream);
}

const char* decode_topk(const DecodeJob& job, void* stream) {
    const unsigned long long units = (job.count + STRETCH - 1) / STRETCH * (job.sum ? 1 : job.messages);
    return launch(decode_topk_kernel, job, units, TOPK_THREADS, stream);
}

} // namespace yafsdp_cc

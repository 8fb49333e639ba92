// Every kernel there is, by the name that it is launched by.
#include "codecs/topk.cuh"
#include "codecs/topk_decode.cuh"
#include "decode.cuh"
#include "encode.cuh"
#include "kernels.h"
#include "lamb.cu"
#include "update.cu"

namespace yafsdp_cc {

#define KERNEL(...) {#__VA_ARGS__, reinterpret_cast<const void*>(&__VA_ARGS__), Emulated<__VA_ARGS__>::run}
#define ENCODE(...)                                                                                                    \
    KERNEL(encode_kernel<__VA_ARGS__, 1, false>), KERNEL(encode_kernel<__VA_ARGS__, 2, false>),                        \
        KERNEL(encode_kernel<__VA_ARGS__, 4, false>), KERNEL(encode_kernel<__VA_ARGS__, 4, true>)
#define DECODE(reader, together)                                                                                       \
    KERNEL(decode_kernel<reader, 1, together>), KERNEL(decode_kernel<reader, 2, together>),                            \
        KERNEL(decode_kernel<reader, 4, together>)

static const Kernel KERNELS[] = {
    ENCODE(Float<false>),
    ENCODE(Float<true>),
    ENCODE(FP8),
    ENCODE(Whole<8, false>),
    ENCODE(Whole<8, true>),
    ENCODE(Whole<6, false>),
    ENCODE(Whole<6, true>),
    ENCODE(Whole<4, false>),
    ENCODE(Whole<4, true>),
    ENCODE(Odd<3, false>),
    ENCODE(Odd<3, true>),
    ENCODE(Odd<2, false>),
    ENCODE(Odd<2, true>),
    ENCODE(Ternary<false>),
    ENCODE(Ternary<true>),
    ENCODE(OneBit),
    ENCODE(Nothing),
    DECODE(FloatReader<false>, 1),
    DECODE(FloatReader<true>, 1),
    DECODE(FP8Reader, 1),
    DECODE(WholeReader<8>, 1),
    DECODE(WholeReader<6>, 1),
    DECODE(WholeReader<4>, 1),
    DECODE(OddReader<3>, 1),
    DECODE(OddReader<2>, 1),
    DECODE(TernaryReader, 5),
    DECODE(OneBitReader, 1),
    KERNEL(encode_topk_kernel<1, false>),
    KERNEL(encode_topk_kernel<2, false>),
    KERNEL(encode_topk_kernel<4, false>),
    KERNEL(encode_topk_kernel<4, true>),
    KERNEL(decode_topk_kernel),
    KERNEL(update_kernel),
    KERNEL(lamb_kernel),
};

} // namespace yafsdp_cc

const Kernel* simt_kernels(unsigned& count) {
    count = std::size(yafsdp_cc::KERNELS);
    return yafsdp_cc::KERNELS;
}

extern "C" const char* simt_kernel_name(unsigned i) {
    return i < std::size(yafsdp_cc::KERNELS) ? yafsdp_cc::KERNELS[i].name : nullptr;
}

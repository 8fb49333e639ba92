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
#define DECODE_ROWS(reader, rows, together, ahead)                                                                     \
    KERNEL(decode_kernel<reader, rows, together, 1>), KERNEL(decode_kernel<reader, rows, together, ahead>)
#define DECODE(reader, together, ahead)                                                                                \
    DECODE_ROWS(reader, 1, together, ahead), DECODE_ROWS(reader, 2, together, ahead),                                  \
        DECODE_ROWS(reader, 4, together, ahead)

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
    DECODE(FloatReader<false>, 1, 2),
    DECODE(FloatReader<true>, 1, 4),
    DECODE(FP8Reader, 1, 8),
    DECODE(WholeReader<8>, 1, 8),
    DECODE(WholeReader<6>, 1, 8),
    DECODE(WholeReader<4>, 1, 8),
    DECODE(OddReader<3>, 1, 8),
    DECODE(OddReader<2>, 1, 8),
    DECODE(TernaryReader, 5, 8),
    DECODE(OneBitReader, 1, 8),
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

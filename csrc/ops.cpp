// The operators of yafsdp_cc/compression/error_feedback.py, `update` of optim/update.py and `update_lamb` of
// optim/lamb.py. What implements them registers itself, for its own device.
//
// The stream is CUDA's handle as a number, 0 elsewhere. A seed of -1 is none: to nearest.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(yafsdp_cc, m) {
    m.def(
        "encode(Tensor gradients, Tensor(a!) message, int codec, int block, Tensor? counts, Tensor(b!)? residual, "
        "Tensor(c!)? residual_scales, float carry, float taken, float added, float scale, int seed, int first, "
        "int stream) -> ()");
    m.def(
        "accumulate(Tensor gradients, Tensor(a!) residual, Tensor(b!) residual_scales, int block, float scale, "
        "int stream) -> ()");
    m.def(
        "decode_sum(Tensor messages, int codec, int block, int n, Tensor? own, int place, Tensor(a!) total, "
        "int start, int stream) -> ()");
    m.def("decode(Tensor messages, int codec, int block, Tensor(a!) values, int stream) -> ()");
    m.def(
        "update(int rule, Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor[] squares, "
        "Tensor settings, int stream) -> ()");
    m.def(
        "update_lamb(int rule, Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] momenta, Tensor(c!)[] squares, "
        "Tensor(d!)[] fresh, Tensor settings, Tensor(e!) sums, int stream) -> ()");
}

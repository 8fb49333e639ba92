// Optimizer updates of the 1-bit family, as yafsdp_cc/optim/update.py defines them, of many parameters in one kernel.
//
// A thread block takes a stretch of one parameter, each of its threads four elements at a time. Few registers are
// needed, so as many threads fit on a multiprocessor as it has room for, and their loads are enough to keep it busy.

#include "four.cuh"
#include "jobs.h"

namespace yafsdp_cc {

DEVICE float adam_moved(const float (&settings)[ADAM_SETTINGS], float weight, float moment, float square) {
    const float root = mul(add(__fsqrt_rn(mul(square, settings[2])), settings[3]), settings[4]);
    float step = quotient(moment, root);
    step = step > settings[5] ? settings[5] : step; // a NaN stays
    step = step < -settings[5] ? -settings[5] : step;
    return sub(mul(weight, settings[6]), mul(step, settings[7]));
}

DEVICE void update_one(Rule rule, const float (&settings)[ADAM_SETTINGS], float& w, float g, float& m, float v) {
    if (rule == Rule::adam_momentum) {
        w = adam_moved(settings, w, g, v);
    } else if (rule == Rule::adam_gradient) {
        m = add(mul(m, settings[0]), mul(g, settings[1]));
        w = adam_moved(settings, w, m, v);
    } else {
        const bool decays = settings[1] != 0.0f; // else nothing is added, not even 0
        const float decayed = mul(w, settings[1]), due = decays ? add(g, decayed) : g;
        if (rule == Rule::sgd_gradient)
            m = add(mul(m, settings[0]), due);
        else if (decays)
            m = add(m, decayed);
        w = sub(w, mul(rule == Rule::sgd_gradient ? m : due, settings[2]));
    }
}

__global__ void __launch_bounds__(UPDATE_THREADS) update_kernel(const UpdateJob job) {
    const unsigned long long stretches = job.of[job.count - 1].end;
    int which = 0;
    for (unsigned long long stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
        while (job.of[which].end <= stretch) ++which; // stretches of a thread block only go up
        const Updated& it = job.of[which];
        const long long first = (long long)(stretch - (which ? job.of[which - 1].end : 0)) * UPDATE_STRETCH;
        const long long last = min(it.n, first + UPDATE_STRETCH);
        const bool writes = it.momentum && (job.rule != Rule::sgd_momentum || it.settings[1] != 0.0f);
        for (long long at = first + 4 * threadIdx.x; at < last; at += 4 * UPDATE_THREADS) {
            const int n = int(min(last - at, 4ll));
            const bool wide = it.wide && n == 4;
            float w[4], g[4], m[4] = {}, v[4] = {};
            load_four(it.weights, it.dtype, at, n, wide, w);
            load_four(it.gradient, it.gradient_dtype, at, n, wide, g);
            if (writes) load_four(it.momentum, Dtype::fp32, at, n, wide, m);
            if (it.square) load_four(it.square, Dtype::fp32, at, n, wide, v);
#pragma unroll
            for (int i = 0; i < 4; ++i) update_one(job.rule, it.settings, w[i], g[i], m[i], v[i]);
            if (writes) store_four(it.momentum, Dtype::fp32, at, n, wide, m);
            store_four(it.weights, it.dtype, at, n, wide, w);
        }
    }
}

} // namespace yafsdp_cc

// LAMB's updates and sums, as yafsdp_cc/optim/lamb.py defines them, of many parameters in one kernel.
//
// A thread block takes a stretch of one parameter, each of its sixteen teams a block of that, row by row: so the order
// of the sums is that of the codecs (team.cuh). Its three numbers of the stretch are all that a thread block writes
// beside the arrays, and nothing is added by atomics, whose order would be another every time.

#include "four.cuh"
#include "jobs.h"
#include "scales.cuh"

namespace yafsdp_cc {

constexpr unsigned LAMB_TEAMS = LAMB_THREADS / TEAM;
static_assert(LAMB_TEAMS * LAMB_BLOCK == LAMB_STRETCH, "each team has one block of a stretch");

// What a block is measured by.
struct LambSums {
    Sum first, second;
    Largest ratio;
};

// One element; ``lane`` is its place among the thread's four.
DEVICE void lamb_one(LambRule rule, const float (&settings)[LAMB_SETTINGS], int lane, float& w, float g, float& m,
                     float& v, float& fresh, LambSums& sums) {
    float gradient = g, mean = g;
    if (rule == LambRule::momentum)
        gradient = mul(sub(g, mul(m, settings[0])), settings[12]);
    else
        mean = add(mul(m, settings[0]), mul(g, settings[1]));
    m = mean;
    const float square = mul(mul(gradient, gradient), settings[10]);
    if (rule == LambRule::exact)
        v = add(mul(v, settings[9]), square);
    else
        fresh = add(mul(fresh, settings[9]), square);
    const float root = add(__fsqrt_rn(mul(v, settings[2])), settings[3]), x = w;
    float step = quotient(mean, mul(root, settings[4])), first = x;
    if (rule != LambRule::exact) {
        step = step > settings[5] ? settings[5] : step; // a NaN stays
        step = step < -settings[5] ? -settings[5] : step;
        first = step;
        w = sub(mul(x, settings[6]), mul(step, settings[7]));
        sums.ratio.take(quotient(root, add(__fsqrt_rn(mul(fresh, settings[11])), settings[3])));
    }
    const float update = settings[8] != 0.0f ? add(step, mul(x, settings[8])) : step;
    sums.first.take(lane, mul(first, first));
    sums.second.take(lane, mul(update, update));
}

// The team's block of a parameter, from ``first`` on, which may be beyond its end.
DEVICE void lamb_block(LambRule rule, const LambUpdated& it, long long first, LambSums& sums) {
    for (int row = 0; row < LAMB_BLOCK; row += LANES) {
        const long long at = first + row + 4 * thread_of_team();
        if (at >= it.n) return;
        const int n = int(min(it.n - at, 4ll));
        const bool wide = it.wide && n == 4, exact = rule == LambRule::exact;
        float w[4], g[4], m[4], v[4], fresh[4] = {};
        load_four(it.weights, it.dtype, at, n, wide, w);
        load_four(it.gradient, it.gradient_dtype, at, n, wide, g);
        load_four(it.momentum, Dtype::fp32, at, n, wide, m);
        load_four(it.square, Dtype::fp32, at, n, wide, v);
        if (!exact) load_four(it.fresh, Dtype::fp32, at, n, wide, fresh);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < n) lamb_one(rule, it.settings, i, w[i], g[i], m[i], v[i], fresh[i], sums);
        store_four(it.momentum, Dtype::fp32, at, n, wide, m);
        if (exact) {
            store_four(it.square, Dtype::fp32, at, n, wide, v);
        } else {
            store_four(it.fresh, Dtype::fp32, at, n, wide, fresh);
            store_four(it.weights, it.dtype, at, n, wide, w);
        }
    }
}

__global__ void __launch_bounds__(LAMB_THREADS) lamb_kernel(const LambJob job) {
    __shared__ float firsts[LAMB_TEAMS], seconds[LAMB_TEAMS];
    __shared__ unsigned ratios[LAMB_TEAMS];
    const unsigned team = threadIdx.x / TEAM;
    const unsigned long long stretches = job.of[job.count - 1].end;
    int which = 0;
    for (unsigned long long stretch = blockIdx.x; stretch < stretches; stretch += gridDim.x) {
        while (job.of[which].end <= stretch) ++which; // stretches of a thread block only go up
        const long long own = (long long)(stretch - (which ? job.of[which - 1].end : 0));
        LambSums sums;
        lamb_block(job.rule, job.of[which], own * LAMB_STRETCH + team * LAMB_BLOCK, sums);
        const float first = sums.first.of_team(), second = sums.second.of_team();
        const unsigned ratio = sums.ratio.of_team();
        if (thread_of_team() == 0) firsts[team] = first, seconds[team] = second, ratios[team] = ratio;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (unsigned apart = LAMB_TEAMS / 2; apart > 0; apart /= 2)
                for (unsigned i = 0; i < apart; ++i) {
                    firsts[i] = add(firsts[i], firsts[i + apart]), seconds[i] = add(seconds[i], seconds[i + apart]);
                    ratios[i] = max(ratios[i], ratios[i + apart]);
                }
            float* to = job.sums + which * job.most + own;
            to[0] = firsts[0], to[job.apart] = seconds[0], to[2 * job.apart] = __uint_as_float(ratios[0]);
        }
        __syncthreads(); // before the next stretch's are written
    }
}

} // namespace yafsdp_cc

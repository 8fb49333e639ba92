// Kernels with one defect each, for the emulator to find. The first one has none: it reverses every 32 numbers.
#include YAFSDP_CC_SIMT

namespace {

struct Job {
    const float* in;
    float* out;
    unsigned n; // a multiple of 32
};

enum Defect {
    NONE,
    ODD_ADDRESS,
    NO_BARRIER,
    NOT_ZEROED,
    BLOCKS_IN_ORDER,
    BEHIND_THE_END,
    WRITES_ITS_INPUT,
    UNSET_LOCAL,
    LONE_BARRIER,
    SHUFFLE_AS_BARRIER
};

template <Defect DEFECT> __global__ void reversed(const Job job) {
    __shared__ float numbers[32];
    __shared__ unsigned count;
    const unsigned t = threadIdx.x;
    for (unsigned first = 32 * blockIdx.x; first < job.n; first += 32 * gridDim.x) {
        if (DEFECT != NOT_ZEROED && t == 0) count = 0;
        __syncthreads();
        if constexpr (DEFECT == ODD_ADDRESS) {
            const float4 four = *reinterpret_cast<const float4*>(job.in + first + (t < 28 ? t : 0));
            numbers[t] = four.x;
        } else {
            numbers[t] = job.in[first + t + (DEFECT == BEHIND_THE_END)];
        }
        atomicAdd(&count, 1u);
        if (DEFECT == LONE_BARRIER && t == 5) return;
        if constexpr (DEFECT == SHUFFLE_AS_BARRIER)
            __shfl_sync(~0u, 0u, 0);
        else if constexpr (DEFECT != NO_BARRIER)
            __syncthreads();
        float more;
        if (DEFECT != UNSET_LOCAL) more = 0.0f;
        if (DEFECT == BLOCKS_IN_ORDER && first > 0) more = job.out[first - 1] * 0.0f;
        job.out[first + t] = numbers[31 - t] + more;
        if (DEFECT == WRITES_ITS_INPUT) const_cast<float*>(job.in)[first + t] = 0.0f;
        __syncthreads();
    }
}

template <int DEFECT> const char* run(int defect, const Job& job) {
    if constexpr (DEFECT > SHUFFLE_AS_BARRIER)
        return "no such defect";
    else if (DEFECT != defect)
        return run<DEFECT + 1>(defect, job);
    else
        return simt_run(job.n / 32, 32, Emulated<reversed<Defect(DEFECT)>>::run, &job);
}

} // namespace

extern "C" const char* simt_defect(int defect, const float* in, float* out, unsigned n) {
    return run<0>(defect, Job{in, out, n});
}

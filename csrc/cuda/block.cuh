// One block: what is due, what the message holds of it, and what the residual keeps (compression/error_feedback.py).
//
// Blocks of up to 256 elements stay in registers from the first load to the last store. Larger ones, MANY, are read
// patch by patch once for every pass, from the cache after the first.
#pragma once

#include "place.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

constexpr int PATCH = 256; // elements, of blocks that have many

template <int ROWS> struct Due {
    float h[ROWS][4];   // what the message should hold
    float due[ROWS][4]; // what the residual would be if it held nothing
};

template <int ROWS> struct Operands {
    Raw<ROWS> gradients, residual;
};

template <int ROWS>
DEVICE void fetch(const EncodeJob& job, const Place& place, int patch, Operands<ROWS>& from) {
    const long long at = place.element + static_cast<long long>(patch) * PATCH;
    fetch(from.gradients, job.gradients, place.message * job.gradients.stride + at, place.exists);
    if (job.residual.dtype != Dtype::none)
        fetch(from.residual, job.residual, place.message * job.residual.stride + at, place.exists);
}

template <int ROWS>
DEVICE void add_up(const EncodeJob& job, const Place& place, const Operands<ROWS>& from, Due<ROWS>& it) {
    const bool remembers = job.residual.dtype != Dtype::none;
    convert(from.gradients, job.gradients.dtype, 0.0f, it.h);
    if (remembers) convert(from.residual, job.residual.dtype, place.residual_scale, it.due);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float g = mul(it.h[r][c], job.scale), before = it.due[r][c];
            it.h[r][c] = remembers ? add(g, mul(job.carry, before)) : g;
            it.due[r][c] = remembers ? add(before, mul(job.added, g)) : g;
        }
}

template <int ROWS> DEVICE void read(const EncodeJob& job, const Place& place, int patch, Due<ROWS>& it) {
    Operands<ROWS> from;
    fetch(job, place, patch, from);
    add_up(job, place, from, it);
}

// What is left of a patch behind the message; padding is left nothing.
template <class C, int ROWS>
DEVICE void leave(const EncodeJob& job, const Place& place, int patch, const C& codec,
                  const typename C::Code (&codes)[ROWS][4], Due<ROWS>& it) {
    const int first = patch * PATCH + 4 * int(thread_of_team());
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float left = sub(it.due[r][c], mul(job.taken, codec.worth(codes[r][c])));
            if (job.counts && first + r * int(LANES) + c >= place.count) left = 0.0f;
            it.due[r][c] = left;
        }
}

template <class C, int ROWS, bool MANY>
DEVICE void encode_block(const EncodeJob& job, const Place& place, C& codec) {
    const int patches = MANY ? job.block / PATCH : 1;
    Due<ROWS> it;
    typename C::Code codes[ROWS][4];
    const auto code = [&](int patch) {
        const unsigned first = unsigned(place.element) + unsigned(patch * PATCH);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) codes[r][c] = codec.code(it.h[r][c], first + r * LANES + c);
    };

    codec.open();
    if constexpr (!MANY) read(job, place, 0, it);
    for (int patch = 0; patch < patches; ++patch) {
        if constexpr (MANY) read(job, place, patch, it);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < 4; ++c) codec.take(c, it.h[r][c]);
    }
    codec.weigh(job, place);
    if constexpr (C::TWICE) {
        for (int patch = 0; patch < patches; ++patch) {
            if constexpr (MANY) read(job, place, patch, it);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) codec.take_again(c, it.h[r][c]);
        }
        codec.weigh_again(place);
    }

    // A block that is not finite keeps the residual that it had.
    const bool keeps = place.exists && codec.finite;
    const Rows& residual = job.residual;
    const bool in_bytes = residual.dtype == Dtype::int8;
    const long long home = place.message * residual.stride + place.element;
    Largest largest;
    for (int patch = 0; patch < patches; ++patch) {
        if constexpr (MANY) read(job, place, patch, it);
        code(patch);
        codec.template write<ROWS, MANY>(place, patch, codes);
        if (residual.dtype == Dtype::none) continue;
        leave(job, place, patch, codec, codes, it);
        if (in_bytes) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int c = 0; c < 4; ++c) largest.take(it.due[r][c]);
        } else if (keeps) {
            store(residual, home + patch * PATCH, it.due);
        }
    }
    if (!in_bytes) return;

    const Step step = step_of(largest.of_team(), float(1.0 / 127));
    __syncwarp(); // every thread has read the scale that one of them now overwrites
    for (int patch = 0; patch < patches; ++patch) {
        if constexpr (MANY) {
            read(job, place, patch, it);
            code(patch);
            leave(job, place, patch, codec, codes, it);
        }
        if (!keeps) continue;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            int steps[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) steps[c] = nearest(mul(it.due[r][c], step.inverse));
            const unsigned words[1] = {bytes_of(steps)};
            rows_detail::store_four(residual.data, home + patch * PATCH + r * int(LANES), residual.wide, words);
        }
    }
    if (keeps && thread_of_team() == 0)
        job.residual_scales[place.message * job.residual_scales_stride + place.block] = step.scale;
}

} // namespace yafsdp_cc

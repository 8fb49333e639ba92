// No message: what is due stays due (feedback.accumulate).
#pragma once

#include "place.cuh"
#include "scales.cuh"

namespace yafsdp_cc {

struct Nothing : Codec<float> {
    Largest largest;

    DEVICE Nothing(const EncodeJob&, unsigned) {}
    DEVICE void open() { largest = Largest(); }
    DEVICE void take(int, float h) { largest.take(h); }
    DEVICE void weigh(const EncodeJob&, const Place&) { finite = largest.of_team() < INFINITE; }
    DEVICE float code(float, unsigned) const { return 0.0f; }
    DEVICE float worth(float code) const { return code; }
    template <int ROWS, bool MANY> DEVICE void write(const Place&, int, const float (&)[ROWS][4]) const {}
};

} // namespace yafsdp_cc

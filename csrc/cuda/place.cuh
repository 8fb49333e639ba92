// Where a team is: a block of a message.
#pragma once

#include "rows.cuh"

namespace yafsdp_cc {

// The units of several rows, one row after the other: where a team is, and where it goes on, without a division.
struct Walk {
    unsigned row, of_row;
    const unsigned of_each, rows_apart, apart;

    DEVICE Walk(unsigned first, unsigned apart_, unsigned of_each_)
        : row(first / of_each_), of_row(first % of_each_), of_each(of_each_), rows_apart(apart_ / of_each_),
          apart(apart_ % of_each_) {}
    DEVICE void go_on() {
        row += rows_apart, of_row += apart;
        if (of_row >= of_each) of_row -= of_each, ++row;
    }
};

struct Place {
    unsigned char* row; // of the message
    unsigned message, block, blocks; // which one, and how many a message has
    unsigned length;                 // elements of a block
    bool exists;                     // else the team only takes part in shuffles
    long long element;               // this thread's first, in the message
    int count;                       // elements of the block that are not padding
    float residual_scale;

    DEVICE Place(const EncodeJob& job, unsigned message_, unsigned block_, bool exists_)
        : row(job.message + message_ * job.message_stride), message(message_), block(block_),
          blocks(unsigned(job.n / job.block)), length(unsigned(job.block)), exists(exists_),
          element(static_cast<long long>(block_) * job.block + 4 * thread_of_team()), count(job.block),
          residual_scale(0.0f) {
        if (!exists) return;
        if (job.counts) count = job.counts[message * job.counts_stride + block];
        if (job.residual.dtype == Dtype::int8)
            residual_scale = job.residual_scales[message * job.residual_scales_stride + block];
    }

    // What sums are divided by.
    DEVICE float size() const { return float(max(count, 1)); }
    // The message's word ``word`` behind its scales.
    DEVICE unsigned* payload(unsigned word) const { return reinterpret_cast<unsigned*>(row) + blocks + word; }
    DEVICE void write_scale(float scale) const {
        if (exists && thread_of_team() == 0) reinterpret_cast<float*>(row)[block] = is_finite(scale) ? scale : nan();
    }
};

// What codecs have in common, and what one does that needs nothing.
//
//     open                 a block begins
//     take, weigh          every element of the block, then the team's verdict; TWICE: and once more, take_again ...
//     finite               whether all of the block is finite: else the message cannot hold it
//     code, worth          of an element (``at`` is its number in the message), and the number that a code stands for
//     write                codes of a patch
//     TOGETHER             how many blocks in a row one object sees, those that there are not included
//
// ``worth`` of what ``code`` gives is, to the bit, what the decoder will make of the message.
template <class Code_> struct Codec {
    using Code = Code_;
    static constexpr bool TWICE = false;
    static constexpr unsigned TOGETHER = 1;
    bool finite = true;

    DEVICE void open() {}
    DEVICE void take(int, float) {}
    DEVICE void weigh(const EncodeJob&, const Place&) {}
    DEVICE void take_again(int, float) {}
    DEVICE void weigh_again(const Place&) {}
};

} // namespace yafsdp_cc

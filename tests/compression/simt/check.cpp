// Checks every access of a kernel. The compiler's instrumentation for sanitizers calls the functions at the end; no
// sanitizer's own library is there.
#include "check.h"

#include <link.h>
#include <memory>
#include <vector>

namespace {

enum Kind { READ, WRITE, ATOMIC };
const char* const NAMES[] = {"reads", "writes", "changes"};

// Who accessed a byte last: a thread, or several of a warp, of a thread block, of all of them; and at what time.
struct Access {
    enum Scope : unsigned { THREAD, OF_WARP, OF_BLOCK, ANYWHERE };
    unsigned who : 30, scope : 2;
    unsigned when; // 0: nobody yet
};

struct Byte {
    Access last[3]; // by kind
};

struct Region : Extent {
    std::unique_ptr<Byte[], decltype(&std::free)> bytes{nullptr, &std::free};

    explicit Region(Extent extent)
        : Extent(extent), bytes(static_cast<Byte*>(std::calloc(end - begin, sizeof(Byte))), &std::free) {}
};

std::vector<Region> regions;
std::unique_ptr<Region> shared; // of this thread block: what others did to theirs is before it
// Times of barriers; between two of them nothing is known of the order of different threads.
unsigned now, launched, block_began, block_met, warp_met[1024 / WARP];
unsigned threads = 1;

thread_local char any_shared; // so that there is some

int find_shared(dl_phdr_info* info, size_t, void*) {
    const char* const data = static_cast<const char*>(info->dlpi_tls_data);
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_TLS || !data || &any_shared < data || &any_shared >= data + header.p_memsz) continue;
        const auto begin = reinterpret_cast<std::uintptr_t>(data);
        shared = std::make_unique<Region>(Extent{begin, begin + header.p_memsz, true});
        return 1;
    }
    return 0;
}

unsigned me() { return blockIdx.x * threads + threadIdx.x; }

// In one unit of the scope: a thread block's threads are a whole number of warps.
unsigned unit(unsigned who, unsigned scope) {
    return scope == Access::THREAD ? who : scope == Access::OF_WARP ? who / WARP : scope == Access::OF_BLOCK ? who / threads : 0;
}

// Whether this thread comes after it, by a barrier or as the same thread.
bool is_before(const Access& it, bool is_shared) {
    if (it.when <= (is_shared ? block_began : launched)) return true;
    if (it.scope == Access::THREAD && it.who == me()) return true;
    if (it.scope == Access::ANYWHERE || it.who / threads != blockIdx.x) return false;
    if (it.when <= block_met) return true;
    return it.scope <= Access::OF_WARP && it.who / WARP == me() / WARP && it.when <= warp_met[threadIdx.x / WARP];
}

void note(Access& last, unsigned who, bool is_shared) {
    unsigned scope = Access::THREAD;
    if (!is_before(last, is_shared))
        while (scope < last.scope || unit(who, scope) != unit(last.who, scope)) ++scope;
    last = {who, scope, now};
}

void check_bytes(Region& region, std::uintptr_t at, unsigned long size, Kind kind) {
    const bool is_shared = &region == shared.get();
    Byte before, after;
    Byte* const first = &region.bytes[at - region.begin];
    for (Byte *byte = first, *end = byte + size; byte < end; ++byte) {
        if (byte > first && std::memcmp(byte, &before, sizeof before) == 0) { // as the one before, mostly
            *byte = after;
            continue;
        }
        before = *byte;
        if (is_shared && kind != WRITE &&
            std::max(byte->last[WRITE].when, byte->last[ATOMIC].when) <= block_began)
            return simt_fail("%s shared memory that nobody has written", NAMES[kind]);
        for (const Kind other : {READ, WRITE, ATOMIC}) {
            if ((kind == READ && other == READ) || (kind == ATOMIC && other == ATOMIC)) continue;
            const Access& last = byte->last[other];
            if (!is_before(last, is_shared))
                return simt_fail("%s %s memory that thread %u of block %u %s too, without a barrier between", NAMES[kind],
                                 is_shared ? "shared" : "global", last.who % threads, last.who / threads, NAMES[other]);
        }
        note(byte->last[kind], me(), is_shared);
        after = *byte;
    }
}

void check(const void* address, unsigned long size, Kind kind) {
    if (!simt_is_running() || simt_is_private(address)) return;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const auto holds = [=](const Region& region) { return at >= region.begin && at + size <= region.end; };
    if (holds(*shared)) return check_bytes(*shared, at, size, kind);
    for (Region& region : regions)
        if (holds(region)) {
            if (kind != READ && !region.writable) return simt_fail("writes what is only to be read");
            return check_bytes(region, at, size, kind);
        }
    simt_fail("%s %lu bytes that are not in a tensor", NAMES[kind], size);
}

} // namespace

void simt_allow(const Extent* extents, unsigned count) {
    regions.clear();
    for (const Extent *extent = extents, *end = extents + count; extent < end; ++extent) {
        bool known = false; // as where a sum is also one of its terms
        for (Region& region : regions)
            if (region.begin == extent->begin && region.end == extent->end) {
                region.writable |= extent->writable;
                known = true;
            }
        if (!known) regions.emplace_back(*extent);
    }
}

void check_launch() {
    any_shared = 0;
    const auto here = reinterpret_cast<std::uintptr_t>(&any_shared);
    if (!shared || here < shared->begin || here >= shared->end) dl_iterate_phdr(find_shared, nullptr);
    launched = now++;
}

void check_block(unsigned count) {
    threads = count;
    block_began = block_met = now++;
    std::fill(std::begin(warp_met), std::end(warp_met), block_began);
    // Not a number, no small integer, no address.
    std::memset(reinterpret_cast<void*>(shared->begin), 0xff, shared->end - shared->begin);
}

void check_warp_barrier() { warp_met[threadIdx.x / WARP] = now++; }
void check_barrier() { block_met = now++; }

void simt_atomic(const void* at, unsigned bytes) { check(at, bytes, ATOMIC); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(bytes)                                                                                                  \
    void __tsan_read##bytes(void* at) { check(at, bytes, READ); }                                                      \
    void __tsan_write##bytes(void* at) { check(at, bytes, WRITE); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* at, unsigned long bytes) { check(at, bytes, READ); }
void __tsan_write_range(void* at, unsigned long bytes) { check(at, bytes, WRITE); }

// -fsanitize=alignment, bounds, shift, signed-integer-overflow
void __ubsan_handle_type_mismatch_v1(void*, void* at) { simt_fail("an access at an odd address, ...%02x", unsigned(reinterpret_cast<std::uintptr_t>(at) & 0xff)); }
void __ubsan_handle_out_of_bounds(void*, void*) { simt_fail("an index out of an array"); }
void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { simt_fail("a shift too far"); }
void __ubsan_handle_add_overflow(void*, void*, void*) { simt_fail("a sum overflows"); }
void __ubsan_handle_sub_overflow(void*, void*, void*) { simt_fail("a difference overflows"); }
void __ubsan_handle_mul_overflow(void*, void*, void*) { simt_fail("a product overflows"); }
void __ubsan_handle_divrem_overflow(void*, void*, void*) { simt_fail("a quotient overflows"); }
void __ubsan_handle_negate_overflow(void*, void*) { simt_fail("a negation overflows"); }
}

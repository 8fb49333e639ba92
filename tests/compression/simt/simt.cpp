#include "simt.h"

#include <csetjmp>
#include <memory>
#include <numeric>
#include <random>
#include <ucontext.h>
#include <vector>

Dim threadIdx, blockIdx, gridDim;

namespace {

constexpr unsigned WARP = 32;
constexpr size_t STACK = 1 << 17;

struct Fibre {
    std::unique_ptr<char[]> stack{new char[STACK]};
    ucontext_t context;
    jmp_buf where;
    enum { fresh, ready, waiting, done } state;
};

struct Warp {
    unsigned brought[WARP], result[WARP], arrived = 0;
    Meeting meeting;
    unsigned about;
};

std::vector<Fibre> fibres;
std::vector<Warp> warps;
unsigned threads, at_barrier;
const char* error;
jmp_buf scheduler;
ucontext_t unused;
void (*kernel)(const void*);
const void* argument;
std::mt19937 draw(1);

[[gnu::noinline]] void suspend(Fibre& fibre) {
    // Without the signal mask, which ucontext's own switch asks the kernel for.
    if (_setjmp(fibre.where) == 0) _longjmp(scheduler, 1);
}

void begin() {
    kernel(argument);
    fibres[threadIdx.x].state = Fibre::done;
    _longjmp(scheduler, 1);
}

[[gnu::noinline]] void resume(unsigned thread) {
    Fibre& fibre = fibres[thread];
    threadIdx.x = thread;
    if (_setjmp(scheduler) != 0) return;
    if (fibre.state == Fibre::fresh) {
        fibre.state = Fibre::ready;
        setcontext(&fibre.context);
    }
    _longjmp(fibre.where, 1);
}

void run_block() {
    at_barrier = 0;
    warps.assign(threads / WARP, Warp());
    for (unsigned i = 0; i < threads; ++i) {
        Fibre& fibre = fibres[i];
        fibre.state = Fibre::fresh;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = STACK;
        fibre.context.uc_link = &unused;
        makecontext(&fibre.context, begin, 0);
    }
    std::vector<unsigned> order(threads);
    std::iota(order.begin(), order.end(), 0u);
    for (;;) {
        bool ran = false;
        std::shuffle(order.begin(), order.end(), draw);
        for (const unsigned i : order)
            if (!error && (fibres[i].state == Fibre::fresh || fibres[i].state == Fibre::ready)) {
                resume(i);
                ran = true;
            }
        if (error) return;
        if (!ran) break;
    }
    for (unsigned i = 0; i < threads; ++i)
        if (fibres[i].state != Fibre::done) error = "threads wait for others that never come";
}

} // namespace

const unsigned* simt_meet(Meeting meeting, unsigned about, unsigned brought) {
    Fibre& mine = fibres[threadIdx.x];
    Warp& warp = warps[threadIdx.x / WARP];
    if (warp.arrived == 0) {
        warp.meeting = meeting, warp.about = about;
    } else if (warp.meeting != meeting || warp.about != about) {
        error = "threads of a warp meet in different places";
    }
    warp.brought[threadIdx.x % WARP] = brought;
    if (++warp.arrived == WARP) {
        warp.arrived = 0;
        std::copy_n(warp.brought, WARP, warp.result);
        for (unsigned i = threadIdx.x / WARP * WARP, end = i + WARP; i < end; ++i) fibres[i].state = Fibre::ready;
    } else {
        mine.state = Fibre::waiting;
    }
    suspend(mine);
    return warp.result;
}

void simt_meet_block() {
    Fibre& mine = fibres[threadIdx.x];
    mine.state = Fibre::waiting;
    if (++at_barrier == threads) {
        at_barrier = 0;
        for (unsigned i = 0; i < threads; ++i) fibres[i].state = Fibre::ready;
    }
    suspend(mine);
}

const char* simt_run(unsigned grid, unsigned count, void (*body)(const void*), const void* context) {
    if (fibres.size() < count) fibres = std::vector<Fibre>(count);
    threads = count, kernel = body, argument = context, error = nullptr;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid && !error; ++blockIdx.x) run_block();
    return error;
}

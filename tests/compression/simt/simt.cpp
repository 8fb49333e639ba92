#include "check.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <ucontext.h>
#include <vector>

Dim threadIdx, blockIdx, gridDim;

namespace {

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
bool running;
char text[256];
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
    if (_setjmp(scheduler) != 0) {
        running = false;
        return;
    }
    running = true;
    if (fibre.state == Fibre::fresh) {
        fibre.state = Fibre::ready;
        setcontext(&fibre.context);
    }
    _longjmp(fibre.where, 1);
}

void run_block() {
    at_barrier = 0;
    warps.assign(threads / WARP, Warp());
    check_block(threads);
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

void simt_fail(const char* format, ...) {
    std::va_list arguments;
    va_start(arguments, format);
    const int size = std::snprintf(text, sizeof text, "block %u, thread %u: ", blockIdx.x, threadIdx.x);
    std::vsnprintf(text + size, sizeof text - size, format, arguments);
    va_end(arguments);
    if (!running) { // the operators' own code
        std::fprintf(stderr, "%s\n", text);
        std::abort();
    }
    error = text;
    suspend(fibres[threadIdx.x]);
}

bool simt_is_running() { return running; }

// The thread's own stack, and what the emulator itself tells it.
bool simt_is_private(const void* at) {
    const auto in = [at](const void* first, size_t bytes) {
        return static_cast<const char*>(at) >= first && static_cast<const char*>(at) < static_cast<const char*>(first) + bytes;
    };
    return in(fibres[threadIdx.x].stack.get(), STACK) || in(&threadIdx, sizeof threadIdx) ||
           in(&blockIdx, sizeof blockIdx) || in(&gridDim, sizeof gridDim) ||
           in(warps[threadIdx.x / WARP].result, sizeof Warp::result);
}

void simt_seed(unsigned seed) { draw.seed(seed); }

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
        if (meeting == Meeting::warp) check_warp_barrier(); // shuffles put memory in no order
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
        check_barrier();
        for (unsigned i = 0; i < threads; ++i) fibres[i].state = Fibre::ready;
    }
    suspend(mine);
}

const char* simt_run(unsigned long long most, unsigned count, void (*body)(const void*), const void* context) {
    if (fibres.size() < count) fibres = std::vector<Fibre>(count);
    threads = count, kernel = body, argument = context, error = nullptr;
    const unsigned grids[] = {1, 2, 3, 7, 64};
    gridDim.x = unsigned(std::min<unsigned long long>(most, grids[draw() % std::size(grids)]));
    check_launch();
    std::vector<unsigned> order(gridDim.x);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), draw);
    for (const unsigned block : order) {
        blockIdx.x = block;
        if (!error) run_block();
    }
    return error;
}

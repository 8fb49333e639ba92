// Compiles kernels when they are first launched on a GPU, and launches them.
//
// NVRTC, CUDA's compiler at run time, and the driver are opened by a library that every torch with CUDA has. So nothing
// of CUDA is needed to build this, and one build serves every GPU and every version of CUDA. What is used of both is
// declared here as their manuals have it. A kernel takes NVRTC a fifth to a half of a second (topk: up to a second), and a
// process needs a few.
//
// How many thread blocks: the kernels go round a loop, so that a grid of any size does the work. They move memory and
// nothing else, and a GPU has more multiprocessors than it takes to keep its memory busy: of an H200 (4.8 TB/s, latency
// near 0.8 µs) some 4 MB have to be under way, of an H100 (3.35 TB/s) less than 3. A thread that encodes has 32 to 128
// bytes of loads under way, and 1,000 to 1,500 threads fit on a multiprocessor: 48 to 147 kB, of which a third would do.
// But a multiprocessor executes 33 instructions for an element at most, where the residual is int8, and with that it
// keeps up with its share of the memory on about 100 of the 132. So by default the grid is what fits on three quarters of
// them, and the rest is left to a matmul that runs at the same time. YAFSDP_CC_CUDA_SMS=n makes it what fits on n. This
// is reckoned (bench/kernel_resources.py). Measured on an H100 (bench/results/gpu.md), codecs other than topk encode on
// three quarters within 7 % of what they do on all where the residual is fp32 or bf16, and within 13 % where it is int8.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "jobs.h"

namespace yafsdp_cc {
namespace {

struct {
    const char *name, *text;
} constexpr SOURCES[] = {
#include "sources.inc" // every file beside this one that is for a GPU: setup.py writes it
};

// All of them return 0, or an error.
#define FUNCTIONS(X)                                                                                                   \
    X(nvrtcGetNumSupportedArchs, int*)                                                                                 \
    X(nvrtcGetSupportedArchs, int*)                                                                                    \
    X(nvrtcCreateProgram, void**, const char*, const char*, int, const char* const*, const char* const*)               \
    X(nvrtcAddNameExpression, void*, const char*)                                                                      \
    X(nvrtcCompileProgram, void*, int, const char* const*)                                                             \
    X(nvrtcGetProgramLogSize, void*, size_t*)                                                                          \
    X(nvrtcGetProgramLog, void*, char*)                                                                                \
    X(nvrtcGetCUBINSize, void*, size_t*)                                                                               \
    X(nvrtcGetCUBIN, void*, char*)                                                                                     \
    X(nvrtcGetPTXSize, void*, size_t*)                                                                                 \
    X(nvrtcGetPTX, void*, char*)                                                                                       \
    X(nvrtcGetLoweredName, void*, const char*, const char**)                                                           \
    X(nvrtcDestroyProgram, void**)                                                                                     \
    X(cuInit, unsigned)                                                                                                \
    X(cuGetErrorString, int, const char**)                                                                             \
    X(cuDeviceGet, int*, int)                                                                                          \
    X(cuDeviceGetAttribute, int*, int, int)                                                                            \
    X(cuDevicePrimaryCtxRetain, void**, int)                                                                           \
    X(cuCtxPushCurrent_v2, void*)                                                                                      \
    X(cuCtxPopCurrent_v2, void**)                                                                                      \
    X(cuModuleLoadData, void**, const void*)                                                                           \
    X(cuModuleGetFunction, void**, void*, const char*)                                                                 \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, int*, void*, int, size_t)                                           \
    X(cuLaunchKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,      \
      void**)
#define DECLARE(name, ...) int (*name)(__VA_ARGS__);
FUNCTIONS(DECLARE)
#undef DECLARE

constexpr int LOWEST = 80; // the compute capability, times ten, that has the conversions of numbers.cuh
// What shows whether NVRTC compiles for a GPU.
constexpr KernelName PROBE = {"encode.cuh", "encode_kernel<Nothing, 4, false>",
                              "job.gradients.dtype = job.residual.dtype = Dtype::fp32"};
enum Attribute { MULTIPROCESSORS = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

void check(int error, const char* call) {
    if (error == 0) return;
    const char* text = nullptr;
    if (call[0] == 'c') cuGetErrorString(error, &text);
    fail(std::string(call) + ": " + (text ? text : "error " + std::to_string(error)));
}
#define CHECK(function, ...) check(function(__VA_ARGS__), #function)

struct Kernel {
    void* function;
    int on_each; // thread blocks that fit on a multiprocessor
};

struct Gpu {
    void* context;
    int processors;
    std::string architecture; // an option of NVRTC
    std::map<std::string, Kernel> kernels;
};

// The context that torch uses, for as long as this lives: a thread that has done nothing on this GPU has none.
struct Current {
    explicit Current(void* context) { CHECK(cuCtxPushCurrent_v2, context); }
    ~Current() { cuCtxPopCurrent_v2(&popped); }
    void* popped;
};

std::mutex mutex; // of all that follows
std::string opened; // by which library
std::map<int, Gpu> gpus;

// Raises:
//     std::runtime_error: there is no such library, or what it needs or should have is not there.
void open(const char* path) {
    if (opened == path) return;
    opened.clear();
    void* const library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (!library)
        fail(std::string("NVRTC and CUDA's driver cannot be loaded by ") + path + " (" + dlerror() +
             "); NVRTC is in the package nvidia-cuda-nvrtc: pip install the one of torch's version of CUDA");
#define FIND(name, ...)                                                                                                \
    if (!(name = reinterpret_cast<int (*)(__VA_ARGS__)>(dlsym(library, #name))))                                       \
        fail(std::string("there is no " #name " in what ") + path + " loads");
    FUNCTIONS(FIND)
#undef FIND
    CHECK(cuInit, 0); // torch may not have done it yet
    opened = path;
}

int attribute(int device, Attribute which) {
    int value = 0;
    CHECK(cuDeviceGetAttribute, &value, which, device);
    return value;
}

// Machine code where this NVRTC knows the GPU; else PTX for the newest that it knows and that the GPU can run.
std::string architecture_of(int device) {
    const int own = 10 * attribute(device, CAPABILITY_MAJOR) + attribute(device, CAPABILITY_MINOR);
    const auto decimal = [](int number) { return std::to_string(number / 10) + "." + std::to_string(number % 10); };
    if (own < LOWEST)
        fail("kernels are for compute capability " + decimal(LOWEST) + " and higher, this GPU has " + decimal(own));
    int count = 0, newest = LOWEST;
    CHECK(nvrtcGetNumSupportedArchs, &count);
    std::vector<int> known(count);
    CHECK(nvrtcGetSupportedArchs, known.data());
    for (const int each : known)
        if (each <= own) newest = std::max(newest, each);
    return (newest == own ? "-arch=sm_" : "-arch=compute_") + std::to_string(newest);
}

Gpu& gpu_of(int number) {
    const auto found = gpus.find(number);
    if (found != gpus.end()) return found->second;
    if (opened.empty()) fail("the operators for CUDA are used before yafsdp_cc_cuda_lacks was asked");
    int device = 0;
    CHECK(cuDeviceGet, &device, number);
    Gpu gpu{nullptr, attribute(device, MULTIPROCESSORS), architecture_of(device), {}};
    CHECK(cuDevicePrimaryCtxRetain, &gpu.context, device);
    return gpus.emplace(number, std::move(gpu)).first->second;
}

struct Program {
    void* handle = nullptr;

    explicit Program(const std::string& source) {
        std::vector<const char*> names, texts;
        for (const auto& each : SOURCES) names.push_back(each.name), texts.push_back(each.text);
        CHECK(nvrtcCreateProgram, &handle, source.c_str(), "kernel.cu", int(names.size()), texts.data(), names.data());
    }
    ~Program() { nvrtcDestroyProgram(&handle); }

    // Results are those of the plain-torch definitions: no fused multiply-add. Functions without a qualifier, a lambda
    // among them, are the GPU's.
    void compile(const char* name, const std::string& architecture) {
        CHECK(nvrtcAddNameExpression, handle, name);
        const char* const options[] = {"--std=c++17", "--fmad=false", "-default-device", architecture.c_str()};
        if (nvrtcCompileProgram(handle, int(std::size(options)), options) == 0) return;
        size_t size = 0;
        CHECK(nvrtcGetProgramLogSize, handle, &size);
        std::string log(size, '\0');
        CHECK(nvrtcGetProgramLog, handle, log.data());
        fail(std::string("NVRTC does not compile ") + name + " with " + architecture +
             "; YAFSDP_CC_NATIVE=0 does without: " + log.c_str());
    }
    std::string code(bool is_ptx) {
        size_t size = 0;
        is_ptx ? CHECK(nvrtcGetPTXSize, handle, &size) : CHECK(nvrtcGetCUBINSize, handle, &size);
        std::string code(size, '\0');
        is_ptx ? CHECK(nvrtcGetPTX, handle, code.data()) : CHECK(nvrtcGetCUBIN, handle, code.data());
        return code;
    }
};

// In the current context. A module is never unloaded: a stream may still have its kernels to run.
Kernel& kernel_of(Gpu& gpu, const KernelName& it, int threads) {
    const std::string source = std::string("#define YAFSDP_CC_KNOWN ") + it.known + "\n#include \"" + it.file +
                               "\"\nusing namespace yafsdp_cc;\n";
    std::string key = it.name + ("\n" + source);
    const auto found = gpu.kernels.find(key);
    if (found != gpu.kernels.end()) return found->second;
    Program program(source);
    program.compile(it.name, gpu.architecture);
    const char* symbol = nullptr;
    CHECK(nvrtcGetLoweredName, program.handle, it.name, &symbol);
    void* module = nullptr;
    Kernel kernel{};
    CHECK(cuModuleLoadData, &module, program.code(gpu.architecture.find("compute") != std::string::npos).data());
    CHECK(cuModuleGetFunction, &kernel.function, module, symbol);
    CHECK(cuOccupancyMaxActiveBlocksPerMultiprocessor, &kernel.on_each, kernel.function, threads, 0);
    return gpu.kernels.emplace(std::move(key), kernel).first->second;
}

} // namespace

void launch(const KernelName& it, const void* job, unsigned long long most, int threads, Stream stream) {
    if (most == 0) return;
    std::unique_lock<std::mutex> lock(mutex);
    Gpu& gpu = gpu_of(stream.device);
    const Current current(gpu.context);
    const Kernel kernel = kernel_of(gpu, it, threads);
    lock.unlock(); // a launch waits where the queue of its device is full, and other devices' must not
    const char* asked = std::getenv("YAFSDP_CC_CUDA_SMS");
    const int wanted = asked ? std::atoi(asked) : 0;
    const int used = wanted > 0 ? std::min(wanted, gpu.processors) : gpu.processors * 3 / 4;
    const auto grid = unsigned(std::min<unsigned long long>(most, std::max(1, used * kernel.on_each)));
    void* arguments[] = {const_cast<void*>(job)};
    CHECK(cuLaunchKernel, kernel.function, grid, 1, 1, unsigned(threads), 1, 1, 0, stream.handle, arguments, nullptr);
}

} // namespace yafsdp_cc

// Why kernels cannot be launched on this GPU, or null: whether what they need can be loaded by the library ``path``,
// and one of them compiled. To be asked before the first of the operators.
extern "C" [[gnu::visibility("default")]] const char* yafsdp_cc_cuda_lacks(const char* path, int device) {
    using namespace yafsdp_cc;
    static std::string why;
    const std::lock_guard<std::mutex> lock(mutex);
    try {
        open(path);
        Gpu& gpu = gpu_of(device);
        const Current current(gpu.context);
        kernel_of(gpu, PROBE, ENCODE_THREADS);
        return nullptr;
    } catch (const std::exception& error) {
        why = error.what();
        return why.c_str();
    }
}

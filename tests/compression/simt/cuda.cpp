// NVRTC and CUDA's driver, as csrc/cuda/nvrtc.cpp uses them. What is "compiled" is the name of a kernel; what is
// launched runs in the emulator. The driver takes what the real NVRTC makes, too: the kernel is that with the symbol.
#include "check.h"
#include "jobs.h"
#include "kernels.h"

#include <cstddef>
#include <cstdio>
#include <dlfcn.h>
#include <elf.h>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace {

enum { SUCCESS, INVALID_VALUE, NOT_INITIALIZED = 3, COMPILATION = 6, NO_CONTEXT = 201, NOT_FOUND = 500, FAILED = 719 };

struct Program {
    std::set<std::string> included, files;
    std::string expression, log, code, symbol, known;
};

struct Function {
    const Kernel* kernel;
    std::string known;
};

struct Gpu {
    int capability = 90;
    const char* refused = nullptr; // a kernel that does not compile
    bool initialised = false;
    int contexts = 0; // pushed and not popped
} gpu;

std::string launched, compiled_for, told;

void note_included(const char* text, std::set<std::string>& names) {
    const std::regex include("#include \"([^\"]+)\"");
    for (std::cregex_iterator it(text, text + std::strlen(text), include), end; it != end; ++it) names.insert((*it)[1]);
}

const Kernel* kernel_of(std::string_view symbol) {
    unsigned count;
    const Kernel* const all = simt_kernels(count);
    for (const Kernel* it = all; it < all + count; ++it) {
        Dl_info info;
        if (symbol == std::string("_Z") + it->name) return it;
        if (dladdr(it->address, &info) && info.dli_sname && symbol == info.dli_sname) return it;
    }
    return nullptr;
}

// What a kernel is compiled for (YAFSDP_CC_KNOWN), and this job has not; empty where it has all. The real NVRTC's code
// does not tell.
std::string untrue_of(const Function& function, const void* job) {
    using yafsdp_cc::DecodeJob, yafsdp_cc::EncodeJob, yafsdp_cc::Rows;
    static const struct {
        const char *kind, *field;
        size_t at, size;
    } FIELDS[] = {
#define FIELD(kind, Job, field) {kind, #field, offsetof(Job, field), sizeof(Job::field)}
#define ROWS_FIELD(kind, Job, rows, field)                                                                             \
    {kind, #rows "." #field, offsetof(Job, rows) + offsetof(Rows, field), sizeof(Rows::field)}
        ROWS_FIELD("encode", EncodeJob, gradients, dtype), ROWS_FIELD("encode", EncodeJob, gradients, wide),
        ROWS_FIELD("encode", EncodeJob, residual, dtype),  ROWS_FIELD("encode", EncodeJob, residual, wide),
        FIELD("encode", EncodeJob, counts),                FIELD("encode", EncodeJob, block),
        ROWS_FIELD("decode", DecodeJob, out, dtype),       ROWS_FIELD("decode", DecodeJob, out, wide),
        ROWS_FIELD("decode", DecodeJob, own, dtype),       ROWS_FIELD("decode", DecodeJob, own, wide),
        FIELD("decode", DecodeJob, sum),                   FIELD("decode", DecodeJob, block),
    };
    const std::regex assignment("job\\.([a-z.]+) = (?:Dtype\\()?(\\w+)\\)?");
    for (std::sregex_iterator it(function.known.begin(), function.known.end(), assignment), end; it != end; ++it) {
        const std::string text = (*it)[2], field = (*it)[1];
        const auto* const found = std::find_if(std::begin(FIELDS), std::end(FIELDS), [&](const auto& each) {
            return std::string(function.kernel->name).find(each.kind) == 0 && field == each.field;
        });
        if (found == std::end(FIELDS)) return "no field " + field;
        unsigned long long value = 0;
        std::memcpy(&value, static_cast<const char*>(job) + found->at, found->size);
        // Of rows that there are not, alignment is nothing.
        const bool lacks = field.find(".wide") != std::string::npos &&
                           function.known.find(field.substr(0, field.find('.')) + ".dtype = Dtype(0)") != std::string::npos;
        if (!lacks && value != (text == "true" ? 1u : text == "false" || text == "nullptr" ? 0u : std::stoul(text)))
            return (*it)[0].str() + " is not so";
    }
    return "";
}

// Of machine code as NVRTC makes it, or a text.
size_t size_of(const char* image) {
    if (std::strncmp(image, ELFMAG, SELFMAG) != 0) return std::strlen(image);
    const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(image);
    return std::max(header.e_shoff + header.e_shentsize * header.e_shnum,
                    header.e_phoff + header.e_phentsize * header.e_phnum);
}

} // namespace

extern "C" {

void simt_gpu(int capability, const char* refused) { gpu.capability = capability, gpu.refused = refused; }
// Of the last launch: kernel, thread blocks, threads, stream, contexts left over, and the compiler's option.
const char* simt_launched() { return launched.c_str(); }
const char* simt_compiled_for() { return compiled_for.c_str(); }

int nvrtcGetNumSupportedArchs(int* count) { return *count = 3, SUCCESS; }
int nvrtcGetSupportedArchs(int* known) { return known[0] = 75, known[1] = 80, known[2] = 90, SUCCESS; }

int nvrtcCreateProgram(void** program, const char* source, const char*, int count, const char* const* texts,
                       const char* const* names) {
    auto* it = new Program;
    note_included(source, it->included);
    std::smatch known;
    const std::string text = source;
    if (std::regex_search(text, known, std::regex("#define YAFSDP_CC_KNOWN (.*)\n"))) it->known = known[1];
    for (int i = 0; i < count; ++i) it->files.insert(names[i]), note_included(texts[i], it->included);
    return *program = it, SUCCESS;
}
int nvrtcAddNameExpression(void* program, const char* name) {
    return static_cast<Program*>(program)->expression = name, SUCCESS;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
    auto& it = *static_cast<Program*>(program);
    const std::set<std::string> given(options, options + count);
    for (const char* needed : {"--std=c++17", "--fmad=false", "-default-device"})
        if (!given.count(needed)) it.log = std::string("option ") + needed + " is missing";
    for (const auto& name : it.included)
        if (!it.files.count(name)) it.log = "cannot open source file " + name;
    it.symbol = "_Z" + it.expression;
    if (!kernel_of(it.symbol)) it.log = "no instance of " + it.expression;
    if (gpu.refused && it.expression == gpu.refused) it.log = "refused";
    compiled_for = options[count - 1];
    it.code = compiled_for + "\n" + it.symbol + "\nknown: " + it.known;
    return it.log.empty() ? SUCCESS : COMPILATION;
}
int nvrtcGetProgramLogSize(void* program, size_t* size) {
    return *size = static_cast<Program*>(program)->log.size() + 1, SUCCESS;
}
int nvrtcGetProgramLog(void* program, char* log) {
    return std::strcpy(log, static_cast<Program*>(program)->log.c_str()), SUCCESS;
}
int nvrtcGetCUBINSize(void* program, size_t* size) {
    const std::string& code = static_cast<Program*>(program)->code;
    return code.find("-arch=sm_") == 0 ? (*size = code.size() + 1, SUCCESS) : INVALID_VALUE;
}
int nvrtcGetCUBIN(void* program, char* code) {
    return std::strcpy(code, static_cast<Program*>(program)->code.c_str()), SUCCESS;
}
int nvrtcGetPTXSize(void* program, size_t* size) {
    return *size = static_cast<Program*>(program)->code.size() + 1, SUCCESS;
}
int nvrtcGetPTX(void* program, char* code) { return nvrtcGetCUBIN(program, code); }
int nvrtcGetLoweredName(void* program, const char* name, const char** symbol) {
    auto& it = *static_cast<Program*>(program);
    return name == it.expression ? (*symbol = it.symbol.c_str(), SUCCESS) : INVALID_VALUE;
}
int nvrtcDestroyProgram(void** program) { return delete static_cast<Program*>(*program), SUCCESS; }

int cuGetErrorString(int, const char** text) { return *text = told.c_str(), SUCCESS; }
int cuInit(unsigned) { return gpu.initialised = true, SUCCESS; }
int cuDeviceGet(int* device, int) { return *device = 7, gpu.initialised ? SUCCESS : NOT_INITIALIZED; }
int cuDeviceGetAttribute(int* value, int which, int device) {
    if (device != 7) return INVALID_VALUE;
    *value = which == 16 ? 132 : which == 75 ? gpu.capability / 10 : gpu.capability % 10;
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = &gpu, SUCCESS; }
int cuCtxPushCurrent_v2(void* context) { return context == &gpu ? (++gpu.contexts, SUCCESS) : NO_CONTEXT; }
int cuCtxPopCurrent_v2(void** context) { return *context = &gpu, --gpu.contexts, SUCCESS; }

int cuModuleLoadData(void** module, const void* image) {
    if (gpu.contexts <= 0) return told = "no context", NO_CONTEXT;
    const auto* code = static_cast<const char*>(image);
    return *module = new std::string(code, size_of(code)), SUCCESS;
}
int cuModuleGetFunction(void** function, void* module, const char* symbol) {
    const auto* code = static_cast<const std::string*>(module);
    const size_t known = code->find("\nknown: ");
    const Kernel* const kernel = kernel_of(symbol);
    told = std::string("no kernel ") + symbol;
    if (!kernel || code->find(symbol) == std::string::npos) return NOT_FOUND;
    *function = new Function{kernel, known == std::string::npos ? "" : code->substr(known)};
    return SUCCESS;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) { return *count = 2, SUCCESS; }
int cuLaunchKernel(void* function, unsigned grid, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void* stream, void** arguments, void** extra) {
    if (gpu.contexts <= 0) return told = "no context", NO_CONTEXT;
    if (!grid || y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra) return INVALID_VALUE;
    const auto& of = *static_cast<const Function*>(function);
    const Kernel& kernel = *of.kernel;
    if (const std::string untrue = untrue_of(of, arguments[0]); !untrue.empty())
        return told = "known, but untrue: " + untrue, FAILED;
    char text[256];
    std::snprintf(text, sizeof text, "%s|%u|%u|%zu|%d|%s", kernel.name, grid, threads,
                  reinterpret_cast<size_t>(stream), gpu.contexts - 1, compiled_for.c_str());
    launched = text;
    const char* error = simt_run(grid, threads, kernel.run, arguments[0]);
    told = error ? error : "";
    return error ? FAILED : SUCCESS;
}
}

// What a tool such as Nsight Systems is to NVTX: a library that a process loads by NVTX_INJECTION64_PATH.
// It writes every domain, category and start/end range to $NVTX_LISTENER_LOG.

#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

FILE* log_file = nullptr;
nvtxRangeId_t ranges = 0;

nvtxDomainHandle_t create_domain(const char* name) {
  std::fprintf(log_file, "domain %s\n", name);
  return reinterpret_cast<nvtxDomainHandle_t>(strdup(name));
}

nvtxStringHandle_t register_string(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(strdup(text));
}

void name_category(nvtxDomainHandle_t, uint32_t category, const char* name) {
  std::fprintf(log_file, "category %s %u\n", name, category);
}

nvtxRangeId_t start_range(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  const char* message = event->messageType == NVTX_MESSAGE_TYPE_REGISTERED
                            ? reinterpret_cast<const char*>(event->message.registered)
                            : event->message.ascii;
  std::fprintf(log_file, "start %llu category %u payload %lld %s\n", static_cast<unsigned long long>(++ranges),
               event->category, static_cast<long long>(event->payload.llValue), message);
  return ranges;
}

void end_range(nvtxDomainHandle_t, nvtxRangeId_t range) {
  std::fprintf(log_file, "end %llu\n", static_cast<unsigned long long>(range));
}

template <typename Function>
void listen(NvtxFunctionTable table, uint32_t callback, Function* function) {
  *table[callback] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
  log_file = std::fopen(std::getenv("NVTX_LISTENER_LOG"), "w");
  auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  uint32_t size = 0;
  if (!log_file || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
  listen(table, NVTX_CBID_CORE2_DomainCreateA, create_domain);
  listen(table, NVTX_CBID_CORE2_DomainRegisterStringA, register_string);
  listen(table, NVTX_CBID_CORE2_DomainNameCategoryA, name_category);
  listen(table, NVTX_CBID_CORE2_DomainRangeStartEx, start_range);
  listen(table, NVTX_CBID_CORE2_DomainRangeEnd, end_range);
  return 1;
}

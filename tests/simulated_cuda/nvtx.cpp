// What nsys would show: writes the name of each NVTX range that begins, a line each, to the file that NVTX_NAMES names.
// NVTX loads it as it loads nsys's own library: NVTX_INJECTION64_PATH.
#include <cstdio>
#include <cstdlib>

#include <nvtx3/nvToolsExt.h>

namespace {

int push(const char *name) {
  static std::FILE *names = std::fopen(std::getenv("NVTX_NAMES"), "w");
  if (names) {
    std::fprintf(names, "%s\n", name);
    std::fflush(names);
  }
  return 0;
}

} // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t table_of) {
  auto *callbacks = static_cast<const NvtxExportTableCallbacks *>(table_of(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable functions = nullptr;
  unsigned int size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &functions, &size)) return 0;
  *functions[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  return 1;
}

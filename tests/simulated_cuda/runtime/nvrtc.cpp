// NVRTC, with which PyTorch compiles some element-wise kernels while it runs: every program compiles, to nothing.
#include <nvrtc.h>

#include <cstring>
#include <set>
#include <string>

namespace {
struct Program {
  std::set<std::string> names; // of kernels: a name stands for its mangled one
};
Program *of(nvrtcProgram program) { return reinterpret_cast<Program *>(program); }
} // namespace

extern "C" {

nvrtcResult nvrtcVersion(int *major, int *minor) {
  *major = 13;
  *minor = 0;
  return NVRTC_SUCCESS;
}
const char *nvrtcGetErrorString(nvrtcResult) { return "an error of the simulated NVRTC"; }
nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *, const char *, int, const char *const *, const char *const *) {
  *program = reinterpret_cast<nvrtcProgram>(new Program);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
  delete of(*program);
  *program = nullptr;
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char *const *) { return NVRTC_SUCCESS; }
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) {
  of(program)->names.insert(name);
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
  *lowered = of(program)->names.insert(name).first->c_str();
  return NVRTC_SUCCESS;
}

// An empty text of one byte, whatever is asked for.
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, size_t *bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char *text) { return *text = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTXSize(nvrtcProgram, size_t *bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetPTX(nvrtcProgram, char *text) { return *text = 0, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, size_t *bytes) { return *bytes = 1, NVRTC_SUCCESS; }
nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char *text) { return *text = 0, NVRTC_SUCCESS; }

} // extern "C"

// NVML: the caching allocator asks it which links a device has before it maps memory. There are none.
extern "C" {

constexpr int kSuccess = 0, kNotSupported = 3;

int nvmlInit_v2() { return kSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *, void **device) {
  static char any;
  *device = &any;
  return kSuccess;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return kNotSupported; }
int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) { return *count = 0, kSuccess; }
int nvmlDeviceGetGpuFabricInfoV(void *, void *) { return kSuccess; } // PyTorch has filled in that there is none

} // extern "C"

// The CUDA runtime's functions that PyTorch calls. All others of the library are generated stubs that refuse.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core.h"

using namespace simulated;

namespace {

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

// What is done with the stream or event of a handle; a handle that is none is refused.
template <class Act> cudaError_t with_stream(cudaStream_t handle, Act act) {
  Stream *stream = find_stream(handle);
  return stream ? act(stream) : fail(cudaErrorInvalidResourceHandle);
}
template <class Act> cudaError_t with_event(cudaEvent_t handle, Act act) {
  Event *event = find_event(handle);
  return event ? act(event) : fail(cudaErrorInvalidResourceHandle);
}

bool is_device(int device) { return device >= 0 && device < settings().devices; }

// What may not happen while a stream is captured: to wait for the device.
cudaError_t unless_captured(Stream *stream) {
  return capture_id(stream) ? fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

// ---- kernels ----
std::mutex kernels_mutex;
std::map<const void *, const char *> &kernel_names = *new std::map<const void *, const char *>;

const char *name_of(const void *kernel) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  auto found = kernel_names.find(kernel);
  return found == kernel_names.end() ? "kernel" : found->second;
}

cudaError_t launch_kernel(const void *kernel, void **arguments, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    Work work;
    work.name = name_of(kernel);
    work.duration_us = settings().kernel_us;
    // torch.cuda._sleep: the one kernel whose time is its meaning. A cycle is a nanosecond.
    if (std::strstr(work.name, "spin_kernel") != nullptr)
      work.duration_us = static_cast<double>(*static_cast<int64_t *>(arguments[0])) / 1e3;
    enqueue(stream, std::move(work));
    return cudaSuccess;
  });
}

} // namespace

extern "C" {

// ---- errors -----------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  auto error = static_cast<cudaError_t>(last_error);
  last_error = 0;
  return error;
}
cudaError_t cudaPeekAtLastError() { return static_cast<cudaError_t>(last_error); }

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "cudaSuccess";
  case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
  case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
  case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
  case cudaErrorNotReady: return "cudaErrorNotReady";
  case cudaErrorNotSupported: return "cudaErrorNotSupported";
  default: return "an error of the simulated CUDA runtime";
  }
}
const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorInvalidDevice: return "invalid device ordinal";
  case cudaErrorInvalidResourceHandle: return "invalid resource handle";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorNotSupported: return "operation not supported on the simulated device";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
  case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
  case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
  case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
  default: {
    thread_local std::string text;
    text = "error " + std::to_string(static_cast<int>(error)) + " of the simulated CUDA runtime";
    return text.c_str();
  }
  }
}

// ---- devices ----------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int *count) {
  *count = settings().devices;
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof properties->name, "Simulated CUDA device");
  properties->uuid.bytes[0] = 'S';
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->totalGlobalMem = settings().memory_bytes;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 163 << 10;
  properties->sharedMemPerMultiprocessor = 164 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->memPitch = 2147483647;
  properties->maxThreadsPerBlock = 1024;
  int threads[] = {1024, 1024, 64}, grid[] = {2147483647, 65535, 65535};
  std::memcpy(properties->maxThreadsDim, threads, sizeof threads);
  std::memcpy(properties->maxGridSize, grid, sizeof grid);
  properties->totalConstMem = 64 << 10;
  properties->major = 8;
  properties->minor = 0;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = 108;
  properties->canMapHostMemory = properties->unifiedAddressing = properties->hostRegisterSupported = 1;
  properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->memoryBusWidth = 5120;
  properties->l2CacheSize = 40 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->streamPrioritiesSupported = 1;
  properties->pciBusID = device;
  properties->integrated = settings().integrated;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
  case cudaDevAttrMaxBlockDimX: *value = 1024; break;
  case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
  case cudaDevAttrMaxGridDimY: *value = 65535; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 << 10; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 164 << 10; break;
  case cudaDevAttrWarpSize: *value = 32; break;
  case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
  case cudaDevAttrMultiProcessorCount: *value = 108; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
  case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
  case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
  case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  case cudaDevAttrClockRate: *value = 1000000; break;
  case cudaDevAttrL2CacheSize: *value = 40 << 20; break;
  case cudaDevAttrUnifiedAddressing: *value = 1; break;
  case cudaDevAttrStreamPrioritiesSupported: *value = 1; break;
  case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
  default: *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (anything_captures()) return fail(cudaErrorStreamCaptureUnsupported);
  wait_for_device(current_device);
  return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }
cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return fail(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// ---- memory -----------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  *pointer = bytes ? allocate(current_device, bytes) : nullptr;
  return bytes == 0 || *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return release(pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *free = free_bytes(current_device);
  *total = settings().memory_bytes;
  return cudaSuccess;
}

// What PyTorch's backend cudaMallocAsync uses of memory pools: the default one of each device, whose handle is its number.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<uintptr_t>(device) + 1);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    *pointer = nullptr;
    if (capture_id(stream)) {
      report("memory that a graph takes by itself is not simulated");
      return fail(cudaErrorNotSupported);
    }
    if (bytes) *pointer = allocate_in_order(stream, bytes);
    return bytes == 0 || *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
  });
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    return release_in_order(stream, pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
  });
}
namespace {
int device_of_pool(cudaMemPool_t pool) { return static_cast<int>(reinterpret_cast<uintptr_t>(pool)) - 1; }
} // namespace
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep_bytes) {
  if (!is_device(device_of_pool(pool))) return fail(cudaErrorInvalidValue);
  trim_pool(device_of_pool(pool), keep_bytes);
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
  if (!is_device(device_of_pool(pool))) return fail(cudaErrorInvalidValue);
  PoolCounters counters = pool_counters(device_of_pool(pool));
  auto &bytes = *static_cast<uint64_t *>(value);
  switch (attribute) {
  case cudaMemPoolAttrUsedMemCurrent: bytes = counters.used; break;
  case cudaMemPoolAttrUsedMemHigh: bytes = counters.used_high; break;
  case cudaMemPoolAttrReservedMemCurrent: bytes = counters.reserved; break;
  case cudaMemPoolAttrReservedMemHigh: bytes = counters.reserved_high; break;
  default: return fail(cudaErrorNotSupported);
  }
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
  if (!is_device(device_of_pool(pool))) return fail(cudaErrorInvalidValue);
  switch (attribute) {
  case cudaMemPoolAttrUsedMemHigh: reset_pool_highs(device_of_pool(pool), true); break;
  case cudaMemPoolAttrReservedMemHigh: reset_pool_highs(device_of_pool(pool), false); break;
  case cudaMemPoolAttrReleaseThreshold: // what PyTorch sets: nothing is given back unless that is asked for
    return *static_cast<uint64_t *>(value) == UINT64_MAX ? cudaSuccess : fail(cudaErrorNotSupported);
  default: return *static_cast<int *>(value) ? cudaSuccess : fail(cudaErrorNotSupported); // every way to use a block again
  }
  return cudaSuccess;
}
// Of memory that graphs take by themselves, of which there is none.
cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void *value) {
  *static_cast<uint64_t *>(value) = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void *) { return cudaSuccess; }

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
  *pointer = allocate_pinned(bytes);
  return *pointer ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return release_pinned(pointer) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
  if (pointer == nullptr || bytes == 0) return fail(cudaErrorInvalidValue);
  return pin(pointer, bytes) == Pinning::done ? cudaSuccess : fail(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void *pointer) {
  return unpin(pointer) == Pinning::done ? cudaSuccess : fail(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaHostGetDevicePointer(void **device_pointer, void *pointer, unsigned) {
  *device_pointer = pointer;
  return is_pinned(pointer, 1) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
  *attributes = cudaPointerAttributes{};
  attributes->device = current_device;
  if (is_device_pointer(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device_of(pointer);
    attributes->devicePointer = const_cast<void *>(pointer);
  } else if (is_pinned(pointer, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = const_cast<void *>(pointer);
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = const_cast<void *>(pointer);
  }
  return cudaSuccess;
}

namespace {
bool may_copy(const void *to, const void *from, size_t bytes) {
  return is_device_pointer(to) || !is_device_pointer(from) || host_may_read(from, bytes);
}
} // namespace
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    if (!may_copy(to, from, bytes)) return fail(cudaErrorNotSupported);
    return copy(to, from, bytes, stream, false) ? cudaSuccess : fail(cudaErrorInvalidValue);
  });
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  Stream *stream = find_stream(nullptr);
  if (anything_captures()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!may_copy(to, from, bytes)) return fail(cudaErrorNotSupported);
  bool host_waits = !(is_device_pointer(to) && is_device_pointer(from));
  return copy(to, from, bytes, stream, host_waits) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
  static std::mutex mutex;
  static void *found = nullptr; // nothing that runs reads it
  std::lock_guard<std::mutex> lock(mutex);
  if (found == nullptr) found = allocate(current_device, 4096);
  *pointer = found;
  return found ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    return fill(to, value, bytes, stream) ? cudaSuccess : fail(cudaErrorInvalidValue);
  });
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// ---- streams ----------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  *stream = reinterpret_cast<cudaStream_t>(create_stream(current_device, !(flags & cudaStreamNonBlocking), priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return destroy_stream(stream) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  return with_stream(handle, [&](Stream *stream) {
    *priority = stream_priority(stream);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags) {
  return with_stream(handle, [&](Stream *stream) {
    *flags = stream_flags(stream);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    if (cudaError_t error = unless_captured(stream)) return error;
    wait_for(stream);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    if (cudaError_t error = unless_captured(stream)) return error;
    return is_idle(stream) ? cudaSuccess : fail(cudaErrorNotReady);
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned) {
  return with_stream(stream_handle, [&](Stream *stream) {
    return with_event(event_handle, [&](Event *event) {
      return make_wait(stream, event) ? cudaSuccess : fail(cudaErrorStreamCaptureIsolation);
    });
  });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
  return with_stream(handle, [&](Stream *stream) {
    Work work;
    work.name = "host function";
    work.run = [function, data] { function(data); };
    enqueue(stream, std::move(work));
    return cudaSuccess;
  });
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void *data, unsigned) {
  return with_stream(handle, [&](Stream *stream) {
    Work work;
    work.name = "host function";
    work.run = [function, data, handle] { function(handle, cudaSuccess, data); };
    enqueue(stream, std::move(work));
    return cudaSuccess;
  });
}

// ---- events -----------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = reinterpret_cast<cudaEvent_t>(create_event(flags));
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return destroy_event(event) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned) {
  return with_event(event_handle, [&](Event *event) {
    return with_stream(stream_handle, [&](Stream *stream) {
      record(event, stream);
      return cudaSuccess;
    });
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return with_event(handle, [&](Event *event) {
    wait_for(event);
    return cudaSuccess;
  });
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return with_event(handle, [&](Event *event) {
    return is_done(event) ? cudaSuccess : fail(cudaErrorNotReady);
  });
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
  Event *start = find_event(start_handle), *end = find_event(end_handle);
  bool ready = false;
  if (start == nullptr || end == nullptr || !elapsed_ms(start, end, milliseconds, &ready))
    return fail(cudaErrorInvalidResourceHandle);
  return ready ? cudaSuccess : fail(cudaErrorNotReady);
}

// ---- capture and graphs -------------------------------------------------------------------------------------------

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  thread_local cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  return with_stream(handle, [&](Stream *stream) {
    *status = capture_id(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  return with_stream(handle, [&](Stream *stream) {
    *status = capture_id(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    if (id) *id = capture_id(stream);
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture_of(stream));
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  return with_stream(handle, [&](Stream *stream) {
    return begin_capture(stream) ? cudaSuccess : fail(cudaErrorStreamCaptureUnsupported);
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph) {
  return with_stream(handle, [&](Stream *stream) {
    *graph = reinterpret_cast<cudaGraph_t>(end_capture(stream));
    return *graph ? cudaSuccess : fail(cudaErrorStreamCaptureUnmatched);
  });
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t *, const cudaGraphEdgeData *, size_t, unsigned) {
  return cudaSuccess; // captured work is kept in the order in which it came
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  return with_stream(handle, [&](Stream *stream) {
    launch(reinterpret_cast<Graph *>(graph), stream);
    return cudaSuccess;
  });
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  if (nodes != nullptr) return fail(cudaErrorNotSupported);
  *count = node_count(reinterpret_cast<Graph *>(graph));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; } // the executable is the same object
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  destroy(reinterpret_cast<Graph *>(graph));
  return cudaSuccess;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *, cudaHostFn_t, unsigned, unsigned) {
  *object = nullptr;
  return cudaSuccess;
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

// ---- kernels ----------------------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
  return launch_kernel(kernel, arguments, config->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void *>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void **arguments, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, arguments, stream);
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
};
thread_local std::vector<CallConfiguration> call_configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream) {
  call_configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  if (call_configurations.empty()) return fail(cudaErrorInvalidConfiguration);
  CallConfiguration top = call_configurations.back();
  call_configurations.pop_back();
  *grid = top.grid, *block = top.block, *shared_bytes = top.shared_bytes;
  *static_cast<void **>(stream) = top.stream;
  return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *) {
  static void *handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
void __cudaRegisterFunction(void **, const char *host_function, char *, const char *name, int, void *, void *, void *,
                            void *, int *) {
  std::lock_guard<std::mutex> lock(kernels_mutex);
  kernel_names.emplace(host_function, name);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
  *attributes = cudaFuncAttributes{};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 163 << 10;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int threads, size_t, unsigned) {
  *blocks = threads > 0 ? (2048 / threads > 0 ? 2048 / threads : 1) : 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, bytes, 0);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *status) {
  *function = dlsym(RTLD_DEFAULT, (std::string(symbol) + "_v2").c_str()); // the newest, as the driver does
  if (*function == nullptr) *function = dlsym(RTLD_DEFAULT, symbol);
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess; // what was found is told by the status
}

// ---- for the other libraries and for tests ------------------------------------------------------------------------

int simulated_cuda_refuse(const char *function) {
  report(std::string(function) + " is not simulated");
  return fail(cudaErrorNotSupported);
}

void simulated_cuda_kernel(void *stream, const char *name) {
  if (Stream *found = find_stream(stream)) {
    Work work;
    work.name = name;
    work.duration_us = settings().kernel_us;
    enqueue(found, std::move(work));
  }
}

// Work of the caller's own, with what it reads and writes: begin, end and whether it writes, `count` times. A graph may
// run it again: `release` is called once nothing can any more.
void simulated_cuda_run(void *stream, const char *name, void (*function)(void *), void (*release)(void *), void *data,
                        const uint64_t *accesses, uint64_t count) {
  std::shared_ptr<void> owned(data, [release](void *gone) {
    if (gone) release(gone);
  });
  Stream *found = find_stream(stream);
  if (found == nullptr) return;
  Work work;
  work.name = name;
  if (function) work.run = [function, owned] { function(owned.get()); };
  for (uint64_t i = 0; i < count; ++i)
    work.accesses.push_back({accesses[3 * i], accesses[3 * i + 1], accesses[3 * i + 2] != 0});
  enqueue(found, std::move(work));
}

void simulated_cuda_report(const char *mistake) { report(mistake); }

void *simulated_cuda_bytes_at(void *pointer) { return is_device_pointer(pointer) ? bytes_at(pointer) : pointer; }

void simulated_cuda_given_back(void *memory, uint64_t bytes, int device, void *stream) {
  int before = current_device;
  current_device = device;
  if (is_mapped(memory, bytes))
    if (Stream *found = find_stream(stream)) poison(memory, bytes, found);
  current_device = before;
}

} // extern "C"

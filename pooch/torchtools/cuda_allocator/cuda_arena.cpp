// A CUDA allocator for PyTorch's CUDAPluggableAllocator that records steps and serves them from one arena.
//
// It includes no CUDA header: the few functions of the runtime that it needs come in a table, so it compiles with any C++
// compiler and its logic is tested on machines without a GPU.
//
// A step's requests are those on the stream that the step began on: autograd makes those of the backward pass in threads
// of its own. Requests on other streams, and those that get no place, come from a pool of blocks that are kept for the
// stream that they were made for.
//
// Memory on a device is reused in the order of streams. Work on the stream of a block that comes after the block was freed
// needs no waiting. If another stream used it (`record_stream`), an event marks the end of that use when the block is
// freed, and whoever gets the memory next lets its stream wait for that event first. The host never waits.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "../placement.h"

namespace {

using Stream = void*;
using Event = void*;

constexpr unsigned kDisableTiming = 2;  // cudaEventDisableTiming
constexpr int64_t kRounding = 512;      // of PyTorch's own allocator

// cudaMalloc, cudaFree, cudaEventCreateWithFlags, cudaEventRecord, cudaStreamWaitEvent, cudaEventDestroy, cudaSetDevice,
// cudaGetDevice, cudaGetLastError. Each returns 0 if it succeeds; the last one forgets an error.
struct DeviceFunctions {
  int (*malloc)(void** pointer, size_t size);
  int (*free)(void* pointer);
  int (*create_event)(Event* event, unsigned flags);
  int (*record_event)(Event event, Stream stream);
  int (*wait_event)(Stream stream, Event event, unsigned flags);
  int (*destroy_event)(Event event);
  int (*set_device)(int device);
  int (*get_device)(int* device);
  int (*get_last_error)();
};

// The end of a use of some bytes by a stream.
struct Fence {
  int64_t begin, end;  // in the arena; unused in the pool
  Stream stream;
  Event event;
};

struct Block {
  int64_t size;   // that was asked for
  int64_t room;   // that it takes
  int device;
  Stream stream;
  std::set<Stream> others;   // further streams that use it
  int64_t offset = pooch::kNoPlace;
  class Arena* arena = nullptr;  // null: of the pool
};

class Arena {
 public:
  Arena(std::vector<int64_t> sizes, std::vector<pooch::Place> places) : placement(std::move(sizes), std::move(places)) {}

  pooch::Placement placement;
  char* base = nullptr;
  int64_t bytes = 0;
  int device = 0;
  std::list<Fence> fences;
};

struct Cached {
  void* pointer;
  std::vector<Fence> fences;
};

struct State {
  std::mutex mutex;
  DeviceFunctions device{};
  std::unordered_map<void*, Block> blocks;
  std::map<std::pair<std::pair<int, Stream>, int64_t>, std::vector<Cached>> pool;  // by device, stream and bytes
  pooch::Recorder recorder;
  pooch::Counters counters;
  Arena* serving = nullptr;
  std::vector<Arena*> arenas;
  bool is_recording = false;
  int step_device = -1;
  Stream step_stream = nullptr;
  int64_t live_bytes = 0, peak_bytes = 0, reserved_bytes = 0, peak_reserved_bytes = 0;
};

State& state() {
  static auto* found = new State;  // never destroyed: blocks may outlive the interpreter
  return *found;
}

// Makes a device the current one for a while.
class OnDevice {
 public:
  OnDevice(const DeviceFunctions& functions, int device) : functions_(functions) {
    if (functions_.get_device(&before_) != 0) {
      before_ = device;
    }
    if (before_ != device) {
      functions_.set_device(device);
    }
    device_ = device;
  }
  ~OnDevice() {
    if (before_ != device_) {
      functions_.set_device(before_);
    }
  }

 private:
  const DeviceFunctions& functions_;
  int before_ = 0, device_ = 0;
};

void reserve(State& all, int64_t bytes) {
  all.reserved_bytes += bytes;
  all.peak_reserved_bytes = std::max(all.peak_reserved_bytes, all.reserved_bytes);
}

// Fences for the streams other than `home` that used a block. False: an event cannot be made.
bool fence_uses(State& all, const Block& block, Stream home, std::vector<Fence>& fences) {
  std::set<Stream> uses = block.others;
  uses.insert(block.stream);
  uses.erase(home);
  for (Stream stream : uses) {
    Event event = nullptr;
    if (all.device.create_event(&event, kDisableTiming) != 0) {
      return false;
    }
    if (all.device.record_event(event, stream) != 0) {
      all.device.destroy_event(event);
      return false;
    }
    fences.push_back({block.offset, block.offset + block.room, stream, event});
  }
  return true;
}

// Memory of the device, or null. PyTorch must not find the error of a failed attempt after its next kernel.
void* device_memory(State& all, int64_t bytes) {
  void* pointer = nullptr;
  if (all.device.malloc(&pointer, static_cast<size_t>(bytes)) != 0) {
    all.device.get_last_error();
    return nullptr;
  }
  reserve(all, bytes);
  return pointer;
}

// Lets a stream wait for a fence, which is then no longer needed. False: it cannot wait.
bool pass(State& all, const Fence& fence, Stream stream) {
  if (fence.stream != stream && all.device.wait_event(stream, fence.event, 0) != 0) {
    return false;
  }
  all.device.destroy_event(fence.event);  // the runtime keeps what is still waited for
  return true;
}

// Gives what the pool keeps back to the device; cudaFree waits for the device by itself.
void empty_pool(State& all, int device) {
  for (auto kept = all.pool.begin(); kept != all.pool.end();) {
    if (kept->first.first.first != device) {
      ++kept;
      continue;
    }
    for (Cached& cached : kept->second) {
      for (const Fence& fence : cached.fences) {
        all.device.destroy_event(fence.event);
      }
      all.device.free(cached.pointer);
      all.reserved_bytes -= kept->first.second;
    }
    kept = all.pool.erase(kept);
  }
}

void end_arena(State& all, Arena* arena) {
  const OnDevice there(all.device, arena->device);
  for (const Fence& fence : arena->fences) {
    all.device.destroy_event(fence.event);
  }
  all.device.free(arena->base);
  all.reserved_bytes -= arena->bytes;
  all.arenas.erase(std::find(all.arenas.begin(), all.arenas.end(), arena));
  delete arena;
}

void take_off(State& all) {
  Arena* arena = all.serving;
  all.serving = nullptr;
  all.is_recording = false;
  if (arena != nullptr && arena->placement.live() == 0) {
    end_arena(all, arena);
  }
}

// A place in the arena, after the uses of other streams of what lay there.
void* placed(State& all, Block& block) {
  Arena* arena = all.serving;
  const pooch::Place* place = arena->placement.place(block.size, all.counters);
  if (place == nullptr) {
    return nullptr;
  }
  const int64_t end = place->offset + place->room;
  for (auto fence = arena->fences.begin(); fence != arena->fences.end();) {
    if (fence->begin >= end || fence->end <= place->offset) {
      ++fence;
    } else if (pass(all, *fence, block.stream)) {
      fence = arena->fences.erase(fence);  // all later work of the step's stream comes after it, too
    } else {
      arena->placement.give_back(place->offset);
      --all.counters.placed;
      ++all.counters.collided;
      all.counters.placed_bytes -= block.size;
      all.counters.other_bytes += block.size;
      return nullptr;
    }
  }
  block.arena = arena;
  block.offset = place->offset;
  block.room = place->room;
  return arena->base + place->offset;
}

void* from_pool(State& all, Block& block) {
  block.room = (block.size + kRounding - 1) / kRounding * kRounding;
  const auto kept = all.pool.find({{block.device, block.stream}, block.room});
  if (kept != all.pool.end() && !kept->second.empty()) {
    Cached cached = std::move(kept->second.back());
    kept->second.pop_back();
    bool is_ordered = true;
    for (const Fence& fence : cached.fences) {
      is_ordered = pass(all, fence, block.stream) && is_ordered;
    }
    if (is_ordered) {
      return cached.pointer;
    }
    all.device.free(cached.pointer);  // which waits for the device
    all.reserved_bytes -= block.room;
  }
  void* pointer = device_memory(all, block.room);
  if (pointer == nullptr) {
    empty_pool(all, block.device);
    pointer = device_memory(all, block.room);
  }
  return pointer;
}

bool is_of_step(const State& all, int device, Stream stream) {
  return device == all.step_device && stream == all.step_stream;
}

}  // namespace

extern "C" {

// What CUDAPluggableAllocator calls --------------------------------------------------------------------------------------

// Null if there is no memory.
void* pooch_cuda_try_alloc(ssize_t size, int device, Stream stream) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (size <= 0 || all.device.malloc == nullptr) {
    return nullptr;
  }
  const OnDevice there(all.device, device);
  Block block{size, size, device, stream, {}};
  void* pointer = nullptr;
  if (all.serving != nullptr) {
    if (is_of_step(all, device, stream)) {
      pointer = placed(all, block);
    } else {
      ++all.counters.elsewhere;
    }
  }
  if (pointer == nullptr) {
    pointer = from_pool(all, block);
  }
  if (pointer == nullptr) {
    return nullptr;
  }
  if (all.is_recording && is_of_step(all, device, stream)) {
    all.recorder.born(pointer, size);
  }
  all.live_bytes += size;
  all.peak_bytes = std::max(all.peak_bytes, all.live_bytes);
  all.blocks.emplace(pointer, std::move(block));
  return pointer;
}

// PyTorch does not look whether the pointer is null, and would compute there.
void* pooch_cuda_alloc(ssize_t size, int device, Stream stream) {
  void* pointer = pooch_cuda_try_alloc(size, device, stream);
  if (pointer == nullptr && size > 0) {
    throw std::bad_alloc();
  }
  return pointer;
}

void pooch_cuda_free(void* pointer, ssize_t, int, Stream) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.blocks.find(pointer);
  if (found == all.blocks.end()) {
    return;
  }
  const Block block = std::move(found->second);
  all.blocks.erase(found);
  all.live_bytes -= block.size;
  all.recorder.died(pointer);
  const OnDevice there(all.device, block.device);
  std::vector<Fence> fences;
  Arena* arena = block.arena;
  // In the arena the next user is the step's stream; in the pool, the stream of the block.
  const bool is_served = arena != nullptr && arena == all.serving;
  const bool is_ordered = fence_uses(all, block, is_served ? all.step_stream : block.stream, fences);
  if (arena == nullptr) {
    if (is_ordered) {
      all.pool[{{block.device, block.stream}, block.room}].push_back({pointer, std::move(fences)});
      return;
    }
    for (const Fence& fence : fences) {
      all.device.destroy_event(fence.event);
    }
    all.device.free(pointer);
    all.reserved_bytes -= block.room;
    return;
  }
  arena->fences.insert(arena->fences.end(), fences.begin(), fences.end());
  if (is_ordered) {
    arena->placement.give_back(block.offset);
  }  // else nobody can tell when the place is free: it stays taken
  if (arena != all.serving && arena->placement.live() == 0) {
    end_arena(all, arena);
  }
}

// PyTorch calls it for `tensor.record_stream(stream)`.
void pooch_cuda_record_stream(void* pointer, Stream stream) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.blocks.find(pointer);
  if (found != all.blocks.end() && found->second.stream != stream) {
    found->second.others.insert(stream);
  }
}

// What Pooch calls -------------------------------------------------------------------------------------------------------

void pooch_cuda_set_functions(const DeviceFunctions* functions) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.device = *functions;
}

// Begins to record the requests on a stream. An arena that serves is taken off.
void pooch_cuda_record(int device, Stream stream) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  take_off(all);
  all.recorder.clear();
  all.step_device = device;
  all.step_stream = stream;
  all.is_recording = true;
}

int64_t pooch_cuda_recorded() {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.is_recording = false;
  all.recorder.close();
  return static_cast<int64_t>(all.recorder.count());
}

void pooch_cuda_read(int64_t* sizes, int64_t* deaths) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.recorder.read(sizes, deaths);
}

// Serves the requests on a stream from a new arena, as `pooch_arena_serve` does for the CPU. Returns whether there is room.
int pooch_cuda_serve(
    int device, Stream stream, int64_t count, const int64_t* sizes, const int64_t* offsets, const int64_t* rooms,
    int64_t arena_bytes) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  take_off(all);
  const OnDevice there(all.device, device);
  empty_pool(all, device);  // what steps without the arena left behind
  std::vector<pooch::Place> places;
  for (int64_t k = 0; k < count; ++k) {
    const bool fits = offsets[k] >= 0 && rooms[k] >= sizes[k] && offsets[k] + rooms[k] <= arena_bytes;
    places.push_back({fits ? offsets[k] : pooch::kNoPlace, rooms[k]});
  }
  void* base = device_memory(all, arena_bytes);
  if (base == nullptr) {
    return 0;
  }
  auto* arena = new Arena({sizes, sizes + count}, std::move(places));
  arena->base = static_cast<char*>(base);
  arena->bytes = arena_bytes;
  arena->device = device;
  all.arenas.push_back(arena);
  all.counters = pooch::Counters();
  all.serving = arena;
  all.step_device = device;
  all.step_stream = stream;
  return 1;
}

// Begins a step on a stream. If the last one was on another stream, what it did comes first.
int pooch_cuda_begin_step(Stream stream) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (all.serving == nullptr) {
    return 1;
  }
  if (stream != all.step_stream) {
    const OnDevice there(all.device, all.step_device);
    Event event = nullptr;
    if (all.device.create_event(&event, kDisableTiming) != 0) {
      return 0;
    }
    const bool is_ordered = all.device.record_event(event, all.step_stream) == 0 &&
                            all.device.wait_event(stream, event, 0) == 0;
    all.device.destroy_event(event);
    if (!is_ordered) {
      return 0;  // steps stay on the stream that they were on, and this one's requests come from the pool
    }
    all.step_stream = stream;
  }
  all.serving->placement.begin_step(all.counters);
  return 1;
}

void pooch_cuda_stop() {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  take_off(all);
}

void pooch_cuda_counters(int64_t* found) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const pooch::Counters& now = all.counters;
  const int64_t numbers[] = {
      now.steps, now.placed, now.unplaced, now.unrecognised, now.collided, now.beyond, now.elsewhere,
      now.placed_bytes, now.other_bytes, 0};
  std::copy(std::begin(numbers), std::end(numbers), found);
}

// Writes live bytes, their peak, reserved bytes, their peak.
void pooch_cuda_bytes(int64_t* found) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const int64_t numbers[] = {all.live_bytes, all.peak_bytes, all.reserved_bytes, all.peak_reserved_bytes};
  std::copy(std::begin(numbers), std::end(numbers), found);
}

void pooch_cuda_reset_peaks() {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.peak_bytes = all.live_bytes;
  all.peak_reserved_bytes = all.reserved_bytes;
}

// Gives what the pool keeps back to the device.
void pooch_cuda_empty_pool(int device) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const OnDevice there(all.device, device);
  empty_pool(all, device);
}

}  // extern "C"

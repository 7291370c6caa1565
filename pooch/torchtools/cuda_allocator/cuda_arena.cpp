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
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
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
// cudaGetDevice, cudaGetLastError, cudaMemGetInfo. Each returns 0 if it succeeds; cudaGetLastError forgets an error.
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
  int (*memory_info)(size_t* free, size_t* total);
};

// c10::reportMemoryUsageToProfiler, whose last argument holds the type and the index of a device, a byte each.
using Report = void (*)(void* pointer, int64_t size, size_t allocated, size_t reserved, uint16_t device);

constexpr uint16_t kCuda = 1;  // c10::DeviceType::CUDA

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

// A number of bytes or blocks now, and its highest since peaks were reset.
struct Level {
  int64_t now = 0, peak = 0;

  void add(int64_t more) {
    now += more;
    peak = std::max(peak, now);
  }
};

// What is counted for each device, by the definitions of PyTorch's own allocator.
struct Account {
  Level requested;  // what live tensors asked for
  Level allocated;  // the same, each rounded up
  Level blocks;     // live ones
  Level reserved;   // taken from the device
  int64_t limit_bytes = INT64_MAX;  // of what may be reserved
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
  std::map<int, Account> accounts;  // by device
  Report report = nullptr;
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

int64_t rounded(int64_t size) {
  return (size + kRounding - 1) / kRounding * kRounding;
}

// Counts a block that is born (sign 1) or dies (-1), and tells torch's profiler.
void account(State& all, void* pointer, const Block& block, int64_t sign) {
  Account& own = all.accounts[block.device];
  own.requested.add(sign * block.size);
  own.allocated.add(sign * rounded(block.size));
  own.blocks.add(sign);
  if (all.report != nullptr) {
    const uint16_t device = kCuda | static_cast<uint16_t>(block.device << 8);
    const auto allocated = static_cast<size_t>(own.allocated.now), reserved = static_cast<size_t>(own.reserved.now);
    all.report(pointer, sign * rounded(block.size), allocated, reserved, device);
  }
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

// Memory of the current device, or null. PyTorch must not find the error of a failed attempt after its next kernel.
void* device_memory(State& all, int device, int64_t bytes) {
  Account& own = all.accounts[device];
  void* pointer = nullptr;
  if (bytes > own.limit_bytes - own.reserved.now) {
    return nullptr;
  }
  if (all.device.malloc(&pointer, static_cast<size_t>(bytes)) != 0) {
    all.device.get_last_error();
    return nullptr;
  }
  own.reserved.add(bytes);
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
      all.accounts[device].reserved.add(-kept->first.second);
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
  all.accounts[arena->device].reserved.add(-arena->bytes);
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
  block.room = rounded(block.size);
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
    all.accounts[block.device].reserved.add(-block.room);
  }
  void* pointer = device_memory(all, block.device, block.room);
  if (pointer == nullptr) {
    empty_pool(all, block.device);
    pointer = device_memory(all, block.device, block.room);
  }
  return pointer;
}

bool is_of_step(const State& all, int device, Stream stream) {
  return device == all.step_device && stream == all.step_stream;
}

std::string mib(int64_t bytes) {
  constexpr int64_t kMib = 1 << 20;
  const std::string hundredths = std::to_string(100 + bytes % kMib * 100 / kMib);
  return std::to_string(bytes / kMib) + "." + hundredths.substr(1) + " MiB";
}

std::string lack_of_memory(int64_t size, int device) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const OnDevice there(all.device, device);
  const Account& own = all.accounts[device];
  size_t free = 0, total = 0;
  all.device.memory_info(&free, &total);
  const int64_t left = std::min(static_cast<int64_t>(free), std::max(int64_t{0}, own.limit_bytes - own.reserved.now));
  return "CUDA out of memory. Tried to allocate " + mib(size) + ". GPU " + std::to_string(device) +
         " has a total capacity of " + mib(static_cast<int64_t>(total)) + " of which " + mib(left) +
         " is free. Pooch's allocator has given " + mib(own.allocated.now) + " to tensors and reserved " +
         mib(own.reserved.now) + ".";
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
  account(all, pointer, block, 1);
  all.blocks.emplace(pointer, std::move(block));
  return pointer;
}

// PyTorch does not look whether the pointer is null, and would compute there. The words are those of its own allocator,
// whose type of error cannot be thrown without its headers.
void* pooch_cuda_alloc(ssize_t size, int device, Stream stream) {
  void* pointer = pooch_cuda_try_alloc(size, device, stream);
  if (pointer == nullptr && size > 0) {
    throw std::runtime_error(lack_of_memory(size, device));
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
  account(all, pointer, block, -1);
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
    all.accounts[block.device].reserved.add(-block.room);
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

// The number of requests that were recorded so far.
int64_t pooch_cuda_requests() {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
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
  void* base = device_memory(all, device, arena_bytes);
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

// Begins a step on a stream, or a part of one: its next request is the recorded one of number `first`, and those from `end`
// on belong to the next part. If the last one was on another stream, what it did comes first.
int pooch_cuda_begin_step(Stream stream, int64_t first, int64_t end) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  if (all.serving == nullptr) {
    if (all.is_recording) {
      all.step_stream = stream;
    }
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
  all.serving->placement.begin_part(static_cast<size_t>(first), static_cast<size_t>(end), all.counters);
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

// Writes requested bytes, allocated bytes, blocks and reserved bytes of a device, each now and at its peak.
void pooch_cuda_bytes(int device, int64_t* found) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const Account& own = all.accounts[device];
  for (const Level& level : {own.requested, own.allocated, own.blocks, own.reserved}) {
    *found++ = level.now;
    *found++ = level.peak;
  }
}

void pooch_cuda_reset_peaks(int device) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  Account& own = all.accounts[device];
  for (Level* level : {&own.requested, &own.allocated, &own.blocks, &own.reserved}) {
    level->peak = level->now;
  }
}

// Gives what the pool keeps back to the device.
void pooch_cuda_empty_pool(int device) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const OnDevice there(all.device, device);
  empty_pool(all, device);
}

// PyTorch calls it for `torch.cuda.empty_cache()`.
void pooch_cuda_empty_pools() {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  for (const auto& [device, own] : all.accounts) {
    const OnDevice there(all.device, device);
    empty_pool(all, device);
  }
}

// PyTorch calls it for `torch.cuda.set_per_process_memory_fraction(share)`.
void pooch_cuda_limit(double share, int device) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const OnDevice there(all.device, device);
  size_t free = 0, total = 0;
  if (all.device.memory_info(&free, &total) == 0) {
    all.accounts[device].limit_bytes = static_cast<int64_t>(share * static_cast<double>(total));
  }
}

// PyTorch calls it before it captures a graph, whose memory nobody else may get afterwards. There are no such pools here.
void pooch_cuda_refuse_graphs(int, std::pair<uint64_t, uint64_t>, std::function<bool(Stream)>) {
  throw std::runtime_error("CUDA graphs cannot be captured under Pooch's allocator: train without install_cuda_arena()");
}

// What torch's profiler is told by; null: it is told nothing.
void pooch_cuda_report_to(Report report) {
  State& all = state();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.report = report;
}

}  // extern "C"

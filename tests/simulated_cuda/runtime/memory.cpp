// Addresses, a hard limit for each device, chunks that are mapped (expandable segments), and page-locked host memory.
#include "core.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>

namespace simulated {
namespace {

constexpr uint64_t kSpan = uint64_t{1} << 40; // addresses of each device
constexpr uint64_t kPage = 4096;
constexpr uint64_t kGranularity = uint64_t{2} << 20;
constexpr int kMaxDevices = 16;

std::atomic<bool> used_devices[kMaxDevices];

uint64_t rounded(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }

struct Allocation {
  uint64_t bytes;
  int device;
};
struct Chunk {
  uint64_t bytes;
  int device;
  int mappings;
  bool released;
};

struct Memory {
  std::recursive_mutex mutex;
  uintptr_t base = 0; // device pointers: [base, base + devices * kSpan); their bytes: as much further on
  uint64_t span = 0;
  std::vector<uintptr_t> next;
  std::vector<uint64_t> used;
  std::map<uintptr_t, Allocation> allocations;                      // from allocate
  std::map<uintptr_t, std::pair<uint64_t, uint64_t>> mapped_chunks; // address: bytes, handle
  std::map<uint64_t, Chunk> chunks;
  std::multimap<uint64_t, uintptr_t> unused_addresses; // by bytes
  uint64_t last_handle = 0;
  std::map<uintptr_t, std::pair<uint64_t, bool>> pinned; // address: bytes, ours

  Memory() {
    int devices = settings().devices;
    if (devices < 0 || devices > kMaxDevices) std::abort();
    span = kSpan * static_cast<uint64_t>(devices);
    if (devices == 0) return;
    void *found = mmap(nullptr, 2 * span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) {
      std::perror("simulated CUDA: no addresses for device memory");
      std::abort();
    }
    base = reinterpret_cast<uintptr_t>(found);
    for (int device = 0; device < devices; ++device) next.push_back(base + kSpan * device + kGranularity);
    used.assign(devices, 0);
  }
};

Memory &memory() {
  static Memory &it = *new Memory; // never destroyed: threads of streams outlive main
  return it;
}

bool back(uintptr_t address, uint64_t bytes) {
  return mprotect(reinterpret_cast<void *>(address + memory().span), bytes, PROT_READ | PROT_WRITE) == 0;
}

void let_go(uintptr_t address, uint64_t bytes) {
  mmap(reinterpret_cast<void *>(address + memory().span), bytes, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  forget_range(address, address + bytes);
}

} // namespace

bool is_device_pointer(const void *pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  return memory().base != 0 && address >= memory().base && address < memory().base + memory().span;
}

int device_of(const void *pointer) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(pointer) - memory().base) / kSpan);
}

char *bytes_at(const void *pointer) {
  return const_cast<char *>(static_cast<const char *>(pointer)) + memory().span;
}

bool is_mapped(const void *pointer, uint64_t bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = m.allocations.upper_bound(address);
  if (found != m.allocations.begin()) {
    --found;
    if (address + bytes <= found->first + found->second.bytes) return true;
  }
  uintptr_t at = address;
  while (at < address + bytes || bytes == 0) {
    auto chunk = m.mapped_chunks.upper_bound(at);
    if (chunk == m.mapped_chunks.begin()) return false;
    --chunk;
    if (at >= chunk->first + chunk->second.first) return false;
    at = chunk->first + chunk->second.first;
    if (bytes == 0) break;
  }
  return true;
}

uint64_t free_bytes(int device) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  return settings().memory_bytes - m.used[device];
}

void use(int device) { used_devices[device] = true; }
bool is_used(int device) { return device >= 0 && device < kMaxDevices && used_devices[device]; }

uintptr_t reserve(int device, uint64_t bytes, uint64_t alignment) {
  use(device);
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  uint64_t step = alignment > kGranularity ? alignment : kGranularity;
  uintptr_t address = rounded(m.next[device], step);
  // A gap after each reservation: what writes past an end meets a page that is not there.
  m.next[device] = address + rounded(bytes, kGranularity) + kGranularity;
  if (m.next[device] > m.base + kSpan * (device + 1)) return 0;
  return address;
}

void *allocate(int device, uint64_t bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  uint64_t taken = rounded(bytes, bytes < kGranularity ? kPage : kGranularity);
  if (taken == 0) taken = kPage;
  if (taken > settings().memory_bytes - m.used[device]) return nullptr;
  uintptr_t address = 0;
  for (auto at = m.unused_addresses.lower_bound(taken); at != m.unused_addresses.end() && at->first == taken; ++at)
    if (device_of(reinterpret_cast<void *>(at->second)) == device) {
      address = at->second;
      m.unused_addresses.erase(at);
      break;
    }
  if (address == 0) address = reserve(device, taken, kGranularity);
  if (address == 0 || !back(address, taken)) return nullptr;
  m.used[device] += taken;
  m.allocations[address] = Allocation{taken, device};
  return reinterpret_cast<void *>(address);
}

bool release(void *pointer) {
  Memory &m = memory();
  auto address = reinterpret_cast<uintptr_t>(pointer);
  {
    std::lock_guard<std::recursive_mutex> lock(m.mutex);
    if (m.allocations.count(address) == 0) {
      report("memory is given back that was not allocated, or twice");
      return false;
    }
  }
  wait_for_device(device_of(pointer));
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  Allocation gone = m.allocations[address];
  m.allocations.erase(address);
  let_go(address, gone.bytes);
  m.used[gone.device] -= gone.bytes;
  m.unused_addresses.emplace(gone.bytes, address);
  return true;
}

bool allocation_range(const void *pointer, uintptr_t *base, uint64_t *bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto found = m.allocations.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (found == m.allocations.begin()) return false;
  --found;
  *base = found->first;
  *bytes = found->second.bytes;
  return reinterpret_cast<uintptr_t>(pointer) < *base + *bytes;
}

uint64_t create_chunk(int device, uint64_t bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  if (bytes > settings().memory_bytes - m.used[device]) return 0;
  m.used[device] += bytes;
  m.chunks[++m.last_handle] = Chunk{bytes, device, 0, false};
  return m.last_handle;
}

namespace {
void drop_if_unused(uint64_t handle) {
  Memory &m = memory();
  Chunk &chunk = m.chunks[handle];
  if (!chunk.released || chunk.mappings > 0) return;
  m.used[chunk.device] -= chunk.bytes;
  m.chunks.erase(handle);
}
} // namespace

bool release_chunk(uint64_t handle) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto found = m.chunks.find(handle);
  if (found == m.chunks.end() || found->second.released) return false;
  found->second.released = true;
  drop_if_unused(handle);
  return true;
}

bool map_chunk(uintptr_t address, uint64_t bytes, uint64_t handle) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto found = m.chunks.find(handle);
  if (found == m.chunks.end() || bytes > found->second.bytes || !back(address, bytes)) return false;
  m.mapped_chunks[address] = {bytes, handle};
  ++found->second.mappings;
  return true;
}

bool unmap(uintptr_t address, uint64_t bytes) {
  Memory &m = memory();
  wait_for_device(device_of(reinterpret_cast<void *>(address)));
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  for (uintptr_t at = address; at < address + bytes;) {
    auto found = m.mapped_chunks.find(at);
    if (found == m.mapped_chunks.end()) return false;
    auto [length, handle] = found->second;
    m.mapped_chunks.erase(found);
    let_go(at, length);
    --m.chunks[handle].mappings;
    drop_if_unused(handle);
    at += length;
  }
  return true;
}

void *allocate_pinned(uint64_t bytes) {
  void *found = mmap(nullptr, rounded(bytes ? bytes : 1, kPage), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  std::lock_guard<std::recursive_mutex> lock(memory().mutex);
  memory().pinned[reinterpret_cast<uintptr_t>(found)] = {rounded(bytes ? bytes : 1, kPage), true};
  return found;
}

bool release_pinned(void *pointer) {
  Memory &m = memory();
  {
    std::lock_guard<std::recursive_mutex> lock(m.mutex);
    auto found = m.pinned.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == m.pinned.end() || !found->second.second) return false;
  }
  for (int device = 0; device < settings().devices; ++device) wait_for_device(device); // as cudaFreeHost does
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto found = m.pinned.find(reinterpret_cast<uintptr_t>(pointer));
  forget_range(found->first, found->first + found->second.first);
  munmap(pointer, found->second.first);
  m.pinned.erase(found);
  return true;
}

Pinning pin(void *pointer, uint64_t bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = m.pinned.lower_bound(address);
  if (next != m.pinned.end() && next->first < address + bytes) return Pinning::already;
  if (next != m.pinned.begin() && std::prev(next)->first + std::prev(next)->second.first > address) return Pinning::already;
  m.pinned[address] = {bytes, false};
  return Pinning::done;
}

Pinning unpin(void *pointer) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto found = m.pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == m.pinned.end() || found->second.second) return Pinning::unknown;
  uintptr_t begin = found->first, end = begin + found->second.first;
  m.pinned.erase(found);
  // What a stream is still to read or fill may not be unlocked. Everything that was waited for is let pass.
  if (!host_knows(begin, end)) report("host memory is unlocked while a copy that uses it has not been waited for");
  forget_range(begin, end);
  return Pinning::done;
}

bool is_pinned(const void *pointer, uint64_t bytes) {
  Memory &m = memory();
  std::lock_guard<std::recursive_mutex> lock(m.mutex);
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = m.pinned.upper_bound(address);
  if (found == m.pinned.begin()) return false;
  --found;
  return address + bytes <= found->first + found->second.first;
}

} // namespace simulated

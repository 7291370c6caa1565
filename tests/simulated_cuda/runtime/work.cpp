// Copies and fills: work that the device does itself.
#include "core.h"

#include <cstring>
#include <memory>

namespace simulated {
namespace {

uintptr_t address(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

double host_copy_us(uint64_t bytes) { return static_cast<double>(bytes) / settings().copy_bytes_per_us; }
double device_copy_us(uint64_t bytes) { return static_cast<double>(bytes) / settings().on_device_bytes_per_us; }

struct Side {
  const void *pointer;
  bool on_device, pinned;
  const char *bytes() const { return on_device ? bytes_at(pointer) : static_cast<const char *>(pointer); }
};

Side side(const void *pointer, uint64_t bytes) {
  bool on_device = is_device_pointer(pointer);
  return Side{pointer, on_device, !on_device && is_pinned(pointer, bytes)};
}

thread_local const uint64_t *readable = nullptr;
thread_local uint64_t readable_count = 0;
thread_local bool read_refused = false;

bool exists(const Side &side, uint64_t bytes) {
  if (!side.on_device || is_mapped(side.pointer, bytes)) return true;
  report("a copy or a fill uses device memory that is not there");
  return false;
}

} // namespace

bool host_may_read(const void *pointer, uint64_t bytes) {
  if (readable == nullptr) return true;
  for (uint64_t i = 0; i < readable_count; ++i)
    if (address(pointer) >= readable[2 * i] && address(pointer) + bytes <= readable[2 * i + 1]) return true;
  read_refused = true;
  return false;
}

bool copy(void *to, const void *from, uint64_t bytes, Stream *stream, bool host_waits) {
  if (bytes == 0) return true;
  Side target = side(to, bytes), source = side(from, bytes);
  if (!exists(target, bytes) || !exists(source, bytes)) return false;
  Work work;
  work.bytes = bytes;
  bool crosses = target.on_device != source.on_device || !target.on_device;
  work.duration_us = crosses ? host_copy_us(bytes) : device_copy_us(bytes);
  work.name = !crosses ? "copy on device" : target.on_device ? "copy to device" : "copy to host";
  if (source.on_device || source.pinned) work.accesses.push_back({address(from), address(from) + bytes, false});
  if (target.on_device || target.pinned) work.accesses.push_back({address(to), address(to) + bytes, true});
  char *into = const_cast<char *>(target.bytes());
  if (!source.on_device && !source.pinned) {
    // Pageable: the call returns once the bytes lie in a buffer of the driver's.
    std::shared_ptr<char[]> staged(new char[bytes]);
    std::memcpy(staged.get(), from, bytes);
    work.run = [into, staged, bytes] { std::memcpy(into, staged.get(), bytes); };
  } else {
    const char *out_of = source.bytes();
    work.run = [into, out_of, bytes] { std::memmove(into, out_of, bytes); };
  }
  if (readable != nullptr && target.on_device) work.run = nullptr; // part of an operator: its numbers come as a whole
  enqueue(stream, std::move(work));
  if (host_waits || (!target.on_device && !target.pinned)) wait_for(stream);
  return true;
}

bool fill(void *to, int value, uint64_t bytes, Stream *stream) {
  if (bytes == 0) return true;
  if (!exists(side(to, bytes), bytes)) return false;
  Work work;
  work.name = "fill";
  work.duration_us = device_copy_us(bytes);
  work.accesses.push_back({address(to), address(to) + bytes, true});
  char *into = is_device_pointer(to) ? bytes_at(to) : static_cast<char *>(to);
  if (readable == nullptr) work.run = [into, value, bytes] { std::memset(into, value, bytes); };
  enqueue(stream, std::move(work));
  return true;
}

// All bits set: not a number in any floating point format, out of range as an index.
void poison(void *memory, uint64_t bytes, Stream *stream) {
  Work work;
  work.name = "the allocator, which has the memory back,";
  work.accesses.push_back({address(memory), address(memory) + bytes, true});
  if (settings().poison) {
    char *into = bytes_at(memory);
    work.run = [into, bytes] { std::memset(into, 0xFF, bytes); };
  }
  enqueue(stream, std::move(work));
}

} // namespace simulated

// An operator's host code runs: let the calling thread copy only these ranges to the host, `count` times begin and end,
// and let what it copies to the device or fills there take time only. Null: that is over.
// Returns whether a copy was refused since the last call.
extern "C" bool simulated_cuda_limit_reads(const uint64_t *ranges, uint64_t count) {
  using namespace simulated;
  bool refused = read_refused;
  readable = ranges, readable_count = count, read_refused = false;
  return refused;
}

extern "C" bool simulated_cuda_may_read(uint64_t begin, uint64_t end) {
  return simulated::host_may_read(reinterpret_cast<const void *>(begin), end - begin);
}

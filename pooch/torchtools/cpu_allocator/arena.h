// Arenas of the CPU allocator: a recorder, the arena that serves the training thread, and those that were taken off while
// blocks in them live.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#include "../placement.h"

namespace pooch {

constexpr int64_t kHugePage = 2 << 20;
constexpr unsigned char kCanary = 0xA5;

// One mapping. It ends with its last block, or when it is taken off, whichever is later.
class Arena {
 public:
  static Arena* map(std::vector<int64_t> sizes, std::vector<Place> places, int64_t bytes, bool canaries) {
    const int64_t page = sysconf(_SC_PAGESIZE), mapped = (bytes + page - 1) / page * page;
    char* begin = at_huge_page(mapped);
    if (begin == nullptr) {
      begin = reserved(mapped);
    }
    if (begin == nullptr) {
      return nullptr;
    }
    // A limit on private memory (`ulimit -d`) counts from here on, so no more than the arena's own pages.
    if (mprotect(begin, mapped, PROT_READ | PROT_WRITE) != 0) {
      munmap(begin, mapped);
      return nullptr;
    }
    madvise(begin, mapped, MADV_HUGEPAGE);  // advice: without it, small pages serve
    auto* arena = new Arena(std::move(sizes), std::move(places));
    arena->base = begin;
    arena->mapped = mapped;
    arena->canaries = canaries;
    return arena;
  }

  ~Arena() {
    munmap(base, mapped);
  }

  bool contains(const void* pointer) const {
    const auto* place = static_cast<const char*>(pointer);
    return place >= base && place < base + mapped;
  }

  Placement placement;
  char* base = nullptr;
  int64_t mapped = 0;
  bool canaries = false;

 private:
  // Address space that nothing may touch yet, or null.
  static char* reserved(int64_t bytes) {
    void* found = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
  }

  // The same, beginning at a huge page.
  static char* at_huge_page(int64_t bytes) {
    char* found = reserved(bytes + kHugePage);
    if (found == nullptr) {
      return nullptr;
    }
    const int64_t before = (kHugePage - reinterpret_cast<intptr_t>(found) % kHugePage) % kHugePage;
    if (before > 0) {
      munmap(found, before);
    }
    if (before < kHugePage) {
      munmap(found + before + bytes, kHugePage - before);
    }
    return found + before;
  }

  Arena(std::vector<int64_t> sizes, std::vector<Place> places) : placement(std::move(sizes), std::move(places)) {}
};

// All arenas of the process, and what the training thread does.
class Arenas {
 public:
  std::mutex mutex;

  enum Mode : int { kOff, kRecording, kServing };

  // Read without the mutex by every allocation; only a thread that owns the step needs to be sure.
  Mode mode() const {
    return mode_.load(std::memory_order_relaxed);
  }

  bool is_owner() const {
    return owner_.load(std::memory_order_relaxed) == this_thread();
  }

  // From here on, the requests of this thread are those of a step that were recorded from `first` to `end`.
  void begin_step(size_t first, size_t end) {
    const std::lock_guard<std::mutex> guard(mutex);
    owner_.store(this_thread(), std::memory_order_relaxed);
    if (serving_ != nullptr) {
      serving_->placement.begin_part(first, end, counters);
    }
  }

  void record() {
    const std::lock_guard<std::mutex> guard(mutex);
    take_off();
    recorder.clear();
    owner_.store(this_thread(), std::memory_order_relaxed);
    mode_.store(kRecording, std::memory_order_relaxed);
  }

  int64_t recorded() {
    const std::lock_guard<std::mutex> guard(mutex);
    if (mode() == kRecording) {
      mode_.store(kOff, std::memory_order_relaxed);
    }
    recorder.close();
    return static_cast<int64_t>(recorder.count());
  }

  int64_t requests() {
    const std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(recorder.count());
  }

  bool serve(std::vector<int64_t> sizes, std::vector<Place> places, int64_t bytes, bool canaries) {
    const std::lock_guard<std::mutex> guard(mutex);
    take_off();
    Arena* arena = Arena::map(std::move(sizes), std::move(places), bytes, canaries);
    if (arena == nullptr) {
      return false;
    }
    arenas_.push_back(arena);
    const auto begin = reinterpret_cast<uintptr_t>(arena->base);
    if (begin < lowest_.load(std::memory_order_relaxed)) {
      lowest_.store(begin, std::memory_order_relaxed);
    }
    if (begin + arena->mapped > highest_.load(std::memory_order_relaxed)) {
      highest_.store(begin + arena->mapped, std::memory_order_relaxed);
    }
    counters = Counters();
    broken_canaries = 0;
    serving_ = arena;
    owner_.store(this_thread(), std::memory_order_relaxed);
    mode_.store(kServing, std::memory_order_relaxed);
    return true;
  }

  void stop() {
    const std::lock_guard<std::mutex> guard(mutex);
    take_off();
  }

  // Memory for the owner's next request, or null.
  void* allocate(int64_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (serving_ == nullptr) {
      return nullptr;
    }
    const Place* place = nullptr;
    try {
      place = serving_->placement.place(size, counters);
    } catch (const std::bad_alloc&) {  // no room to note the block: it gets no place
    }
    if (place == nullptr) {
      return nullptr;
    }
    char* pointer = serving_->base + place->offset;
    if (serving_->canaries) {
      std::memset(pointer + size, kCanary, place->room - size);
    }
    return pointer;
  }

  void elsewhere() {
    const std::lock_guard<std::mutex> guard(mutex);
    ++counters.elsewhere;
  }

  void born(const void* pointer, int64_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (mode() == kRecording) {
      try {
        recorder.born(pointer, size);
      } catch (const std::bad_alloc&) {  // no room to record: the step stays as it is, and will not be like another
        mode_.store(kOff, std::memory_order_relaxed);
      }
    }
  }

  // Called before the memory can be given out again.
  void died(const void* pointer) {
    if (mode() == kRecording) {
      const std::lock_guard<std::mutex> guard(mutex);
      recorder.died(pointer);
    }
  }

  // Gives a block back to its arena. Returns whether it lies in one.
  bool release(void* pointer, int64_t size) {
    // Whoever frees a block in an arena knows its pointer from an allocation that came after these stores.
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    if (address < lowest_.load(std::memory_order_relaxed) || address >= highest_.load(std::memory_order_relaxed)) {
      return false;
    }
    const std::lock_guard<std::mutex> guard(mutex);
    for (size_t i = 0; i < arenas_.size(); ++i) {
      Arena* arena = arenas_[i];
      if (!arena->contains(pointer)) {
        continue;
      }
      const int64_t room = arena->placement.give_back(static_cast<char*>(pointer) - arena->base);
      if (arena->canaries) {
        for (int64_t k = size; k < room; ++k) {
          broken_canaries += static_cast<unsigned char*>(pointer)[k] != kCanary;
        }
      }
      if (arena != serving_ && arena->placement.live() == 0) {
        arenas_.erase(arenas_.begin() + static_cast<std::ptrdiff_t>(i));
        delete arena;
      }
      return true;
    }
    return false;
  }

  // After a fork: blocks go back to where they lie, and nothing new is placed. The step is the parent's.
  void begin_child() {
    mode_.store(kOff, std::memory_order_relaxed);
    take_off();
  }

  int64_t mapped_bytes() {
    const std::lock_guard<std::mutex> guard(mutex);
    int64_t total = 0;
    for (const Arena* arena : arenas_) {
      total += arena->mapped;
    }
    return total;
  }

  bool contains(const void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex);
    for (const Arena* arena : arenas_) {
      if (arena->contains(pointer)) {
        return true;
      }
    }
    return false;
  }

  int64_t live_blocks() {
    const std::lock_guard<std::mutex> guard(mutex);
    size_t total = 0;
    for (const Arena* arena : arenas_) {
      total += arena->placement.live();
    }
    return static_cast<int64_t>(total);
  }

  Recorder recorder;
  Counters counters;
  int64_t broken_canaries = 0;  // bytes between blocks that something wrote to

 private:
  void take_off() {
    mode_.store(kOff, std::memory_order_relaxed);
    Arena* arena = serving_;
    serving_ = nullptr;
    if (arena != nullptr && arena->placement.live() == 0) {
      for (size_t i = 0; i < arenas_.size(); ++i) {
        if (arenas_[i] == arena) {
          arenas_.erase(arenas_.begin() + static_cast<std::ptrdiff_t>(i));
          break;
        }
      }
      delete arena;
    }
  }

  static uint64_t this_thread() {
    static std::atomic<uint64_t> threads{0};
    thread_local const uint64_t number = ++threads;  // never used again, unlike the system's
    return number;
  }

  std::atomic<Mode> mode_{kOff};
  std::atomic<uint64_t> owner_{0};
  std::atomic<uintptr_t> lowest_{UINTPTR_MAX}, highest_{0};
  Arena* serving_ = nullptr;
  std::vector<Arena*> arenas_;
};

}  // namespace pooch

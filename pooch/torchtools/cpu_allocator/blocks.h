// The table of live blocks and their sizes.
//
// Every tensor of the process comes here twice, mostly when little of it is left in the processor's cache. So a block takes
// 16 bytes, all of a shard lies together, and its lock is one word.

#pragma once

#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "step_trace.h"

namespace pooch {

// A lock that is held for a few dozen instructions, or while a table grows.
class WordLock {
 public:
  void lock() {
    for (int tries = 0; is_held_.exchange(true, std::memory_order_acquire); ++tries) {
      if (tries > 32) {
        sched_yield();
      }
    }
  }
  void unlock() {
    is_held_.store(false, std::memory_order_release);
  }

 private:
  std::atomic<bool> is_held_{false};
};

// Blocks by their addresses: open addressing, each as close as possible behind its place.
class BlockTable {
 public:
  void put(void* pointer, const Block& block) {
    if (2 * (count_ + 1) > entries_.size()) {
      grow();
    }
    const bool is_traced = block.time_ns != 0;
    if (is_traced) {
      traced_[pointer] = block;
    }
    size_t place = place_of(pointer);
    while (entries_[place].pointer != nullptr && entries_[place].pointer != pointer) {
      place = (place + 1) & mask_;
    }
    count_ += entries_[place].pointer == nullptr;
    entries_[place] = {pointer, block.size << 1 | static_cast<size_t>(is_traced)};
  }

  // Returns the block, which is in the table no longer; one of no bytes if it was not.
  Block take(void* pointer) {
    if (count_ == 0) {
      return {};
    }
    size_t place = place_of(pointer);
    while (entries_[place].pointer != pointer) {
      if (entries_[place].pointer == nullptr) {
        return {};
      }
      place = (place + 1) & mask_;
    }
    Block block{entries_[place].size_and_traced >> 1};
    if (entries_[place].size_and_traced & 1) {
      const auto found = traced_.find(pointer);
      block = found->second;
      traced_.erase(found);
    }
    --count_;
    close_gap(place);
    return block;
  }

  bool has(void* pointer) const {
    if (count_ == 0) {
      return false;
    }
    size_t place = place_of(pointer);
    while (entries_[place].pointer != nullptr) {
      if (entries_[place].pointer == pointer) {
        return true;
      }
      place = (place + 1) & mask_;
    }
    return false;
  }

 private:
  struct Entry {
    void* pointer = nullptr;
    size_t size_and_traced = 0;
  };

  size_t place_of(const void* pointer) const {
    return (reinterpret_cast<uintptr_t>(pointer) >> 6) * 0x9E3779B97F4A7C15u >> shift_;
  }

  // Moves those behind a free place forward which are further from their own place than needed.
  void close_gap(size_t gap) {
    for (size_t place = (gap + 1) & mask_; entries_[place].pointer != nullptr; place = (place + 1) & mask_) {
      const size_t wanted = place_of(entries_[place].pointer);
      if (((place - wanted) & mask_) >= ((place - gap) & mask_)) {
        entries_[gap] = entries_[place];
        gap = place;
      }
    }
    entries_[gap] = {};
  }

  void grow() {
    std::vector<Entry> before(entries_.empty() ? kFirstPlaces : 2 * entries_.size());
    before.swap(entries_);
    mask_ = entries_.size() - 1;
    shift_ = 64;
    for (size_t places = entries_.size(); places > 1; places /= 2) {
      --shift_;
    }
    for (const Entry& entry : before) {
      if (entry.pointer == nullptr) {
        continue;
      }
      size_t place = place_of(entry.pointer);
      while (entries_[place].pointer != nullptr) {
        place = (place + 1) & mask_;
      }
      entries_[place] = entry;
    }
  }

  static constexpr size_t kFirstPlaces = 64;

  std::vector<Entry> entries_;
  size_t count_ = 0, mask_ = 0;
  int shift_ = 64;
  std::unordered_map<void*, Block> traced_;  // those of sessions, with what these want to know
};

// All blocks, in shards, so that threads rarely wait for one another.
class Blocks {
 public:
  void put(void* pointer, const Block& block) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard<WordLock> guard(shard.lock);
    shard.table.put(pointer, block);
  }

  Block take(void* pointer) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard<WordLock> guard(shard.lock);
    return shard.table.take(pointer);
  }

  bool has(void* pointer) {
    Shard& shard = shard_of(pointer);
    const std::lock_guard<WordLock> guard(shard.lock);
    return shard.table.has(pointer);
  }

  void lock_all() {
    for (Shard& shard : shards_) {
      shard.lock.lock();
    }
  }

  void unlock_all() {
    for (Shard& shard : shards_) {
      shard.lock.unlock();
    }
  }

 private:
  static constexpr size_t kShards = 8;

  struct alignas(64) Shard {
    WordLock lock;
    BlockTable table;
  };

  Shard& shard_of(void* pointer) {
    return shards_[(reinterpret_cast<uintptr_t>(pointer) >> 12) % kShards];
  }

  Shard shards_[kShards];
};

}  // namespace pooch

// Placing the requests of a step in one arena by a layout that was made for a recorded step.
//
// Three parts, which know neither PyTorch nor a device: `Recorder` notes what a step asks for, `Sequence` recognises the
// requests of later steps, and `LiveIntervals` holds what lies in an arena. Nothing here trusts the layout or the
// recognition: a place is only given away while no live block overlaps it, so a step that differs from the recorded one
// gets fewer places and never a wrong one.
//
// No part locks. Who uses them from several threads does.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pooch {

constexpr int64_t kNoPlace = -1;
constexpr int64_t kAlive = -1;

// What a step asks for: the sizes in their order, and before which request each block died.
class Recorder {
 public:
  void clear() {
    requests_.clear();
    open_.clear();
  }

  void born(const void* pointer, int64_t size) {
    requests_.push_back({size, kAlive});
    open_[pointer] = requests_.size() - 1;
  }

  void died(const void* pointer) {
    const auto found = open_.find(pointer);
    if (found != open_.end()) {
      requests_[found->second].death = static_cast<int64_t>(requests_.size());
      open_.erase(found);
    }
  }

  // No death is noted from now on; what was recorded stays.
  void close() {
    open_.clear();
  }

  size_t count() const {
    return requests_.size();
  }

  void read(int64_t* sizes, int64_t* deaths) const {
    for (const Request& request : requests_) {
      *sizes++ = request.size;
      *deaths++ = request.death;
    }
  }

 private:
  struct Request {
    int64_t size, death;
  };
  std::vector<Request> requests_;
  std::unordered_map<const void*, size_t> open_;
};

// Recognises each request of a step as one of the recorded ones, by its number and size.
//
// A request of another size than the next recorded one is not recognised. It may be one more than recorded: the next
// recorded one is then still to come. Or recorded ones may be missing: as soon as the last few requests are those that
// were recorded in a row further on, the sequence goes on there.
class Sequence {
 public:
  explicit Sequence(std::vector<int64_t> sizes) : sizes_(std::move(sizes)), end_(sizes_.size()) {}

  // Goes on with the recorded requests from `first` to `end`.
  void restart(size_t first, size_t end) {
    end_ = end < sizes_.size() ? end : sizes_.size();
    next_ = first < end_ ? first : end_;
    unrecognised_ = 0;
  }

  size_t count() const {
    return sizes_.size();
  }

  // The number of the recorded request, or kNoPlace.
  int64_t recognise(int64_t size) {
    if (next_ < end_ && sizes_[next_] == size) {
      unrecognised_ = 0;
      return static_cast<int64_t>(next_++);
    }
    recent_[unrecognised_++ % kAgreeing] = size;
    if (unrecognised_ < kAgreeing) {
      return kNoPlace;
    }
    const size_t end = end_ < next_ + kWindow ? end_ : next_ + kWindow;
    for (size_t last = next_ + kAgreeing - 1; last < end; ++last) {
      if (agrees(last)) {
        unrecognised_ = 0;
        next_ = last + 1;
        return static_cast<int64_t>(last);
      }
    }
    return kNoPlace;
  }

  bool is_over() const {
    return next_ == end_;
  }

 private:
  bool agrees(size_t last) const {
    for (size_t back = 0; back < kAgreeing; ++back) {
      if (sizes_[last - back] != recent_[(unrecognised_ - 1 - back) % kAgreeing]) {
        return false;
      }
    }
    return true;
  }

  static constexpr size_t kAgreeing = 3;
  static constexpr size_t kWindow = 4096;
  std::vector<int64_t> sizes_;
  size_t next_ = 0;
  size_t end_;
  size_t unrecognised_ = 0;  // in a row
  int64_t recent_[kAgreeing] = {};
};

// The live blocks of an arena, none of which overlap.
class LiveIntervals {
 public:
  // Takes [begin, begin + size), unless a live block overlaps it.
  bool take(int64_t begin, int64_t size) {
    const auto above = live_.lower_bound(begin);
    if (above != live_.end() && above->first < begin + size) {
      return false;
    }
    if (above != live_.begin()) {
      const auto below = std::prev(above);
      if (below->first + below->second > begin) {
        return false;
      }
    }
    live_.emplace_hint(above, begin, size);
    return true;
  }

  // Gives back the block that begins there, and returns its size, or kNoPlace if there is none.
  int64_t give_back(int64_t begin) {
    const auto found = live_.find(begin);
    if (found == live_.end()) {
      return kNoPlace;
    }
    const int64_t size = found->second;
    live_.erase(found);
    return size;
  }

  size_t count() const {
    return live_.size();
  }

 private:
  std::map<int64_t, int64_t> live_;
};

// Where a recorded request lies: `room` bytes from `offset`, or no place.
struct Place {
  int64_t offset;
  int64_t room;
};

// What became of requests.
struct Counters {
  int64_t steps = 0;
  int64_t placed = 0;        // at their place in the arena
  int64_t unplaced = 0;      // recognised, but the layout has no place for them
  int64_t unrecognised = 0;  // of another size than recorded
  int64_t collided = 0;      // their place was taken by a live block
  int64_t beyond = 0;        // after the last recorded one
  int64_t elsewhere = 0;     // from other threads, or on other streams
  int64_t placed_bytes = 0;
  int64_t other_bytes = 0;   // of all but `placed` and `elsewhere`
};

// A layout with its live blocks: which place a request gets.
class Placement {
 public:
  Placement(std::vector<int64_t> sizes, std::vector<Place> places)
      : sequence_(std::move(sizes)), places_(std::move(places)) {}

  void begin_step(Counters& counters) {
    begin_part(0, sequence_.count(), counters);
  }

  // Begins one of the calls that repeat as one step: its requests are those recorded from `first` to `end`.
  void begin_part(size_t first, size_t end, Counters& counters) {
    sequence_.restart(first, end);
    ++counters.steps;
  }

  // The place of the next request, now taken, or null.
  const Place* place(int64_t size, Counters& counters) {
    const bool is_over = sequence_.is_over();
    const int64_t number = sequence_.recognise(size);
    const Place* found = nullptr;
    if (number == kNoPlace) {
      ++(is_over ? counters.beyond : counters.unrecognised);
    } else if (places_[number].offset == kNoPlace) {
      ++counters.unplaced;
    } else if (places_[number].room < size || !live_.take(places_[number].offset, places_[number].room)) {
      ++counters.collided;
    } else {
      ++counters.placed;
      found = &places_[number];
    }
    (found == nullptr ? counters.other_bytes : counters.placed_bytes) += size;
    return found;
  }

  // The room of the block that began there, or kNoPlace if there is none.
  int64_t give_back(int64_t offset) {
    return live_.give_back(offset);
  }

  size_t live() const {
    return live_.count();
  }

 private:
  Sequence sequence_;
  std::vector<Place> places_;
  LiveIntervals live_;
};

}  // namespace pooch

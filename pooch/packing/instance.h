// What the parts of the search share: the instance, the best layout so far, the clock and the draws.
//
// Times are ranks 0 .. n_times - 1 of the distinct times; bytes are 64-bit integers.

#pragma once

#include <cstdint>
#include <ctime>
#include <limits>
#include <vector>

namespace {

using Bytes = std::int64_t;
using Order = std::vector<int>;

constexpr Bytes kNoStop = std::numeric_limits<Bytes>::max();
constexpr double kNoDeadline = std::numeric_limits<double>::infinity();
constexpr std::int64_t kLooks = 1000;  // at other blocks, per block, of one round of ejections, and of one of the tree
constexpr std::int64_t kMostLooks = 2000000;

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

class Random {  // SplitMix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::int64_t below(std::int64_t limit) {
    state_ += 0x9E3779B97F4A7C15ull;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    mixed ^= mixed >> 31;
    return static_cast<std::int64_t>(mixed >> 33) % limit;
  }

 private:
  std::uint64_t state_;
};

struct Instance {
  int n;
  int n_times;
  const std::int32_t* lower;
  const std::int32_t* upper;
  const std::int64_t* lifetime;  // in the unit that was given, where lower and upper are ranks
  const Bytes* size;
  const Bytes* alignment;
  Bytes bound;
  double deadline_s;

  bool is_late() const { return cpu_seconds() >= deadline_s; }
  Bytes aligned(Bytes offset, int block) const {
    return (offset + alignment[block] - 1) / alignment[block] * alignment[block];
  }
};

struct Best {
  Bytes enough = 0;      // an arena at which the search ends: the bound, or above what was refuted
  Bytes refuted = 0;     // no arena is as small as this
  Bytes arena = kNoStop;
  std::vector<Bytes> offsets;

  bool is_enough() const { return arena <= enough; }
};

}  // namespace

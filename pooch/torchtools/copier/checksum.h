// Copies bytes and takes their checksum on the way.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace copier {

// A checksum of 64 bits. Words go to lanes in turn, and each step of a lane can be undone, so that a change of a single
// word is always found, and any other change but for one in 2^64. It is compared within one process and never stored.
class Checksum {
 public:
  // Copies `size` bytes, and takes them into account. All parts but the last are multiples of `STRIDE` bytes.
  void copy(char* to, const char* from, size_t size) {
    const size_t whole = size / STRIDE * STRIDE;
    Lanes lanes = lanes_;  // in registers: what is copied could lie over the others
    for (size_t start = 0; start < whole; start += STRIDE) step(lanes, to + start, from + start);
    if (whole < size) {
      char rest[STRIDE] = {};
      std::memcpy(rest, from + whole, size - whole);
      step(lanes, rest, rest);
      std::memcpy(to + whole, rest, size - whole);
    }
    lanes_ = lanes;
    size_ += size;
  }

  // Takes `size` bytes into account, all parts but the last of which are such multiples too.
  void read(const char* from, size_t size) {
    for (size_t start = 0; start < size; start += STRIDE) {
      char part[STRIDE] = {};
      std::memcpy(part, from + start, std::min(STRIDE, size - start));
      step(lanes_, part, part);
    }
    size_ += size;
  }

  uint64_t value() const {
    uint64_t total = size_;
    for (const uint64_t lane : lanes_) total = mixed(total, lane);
    return total ^ (total >> 32);
  }

  static constexpr size_t LANES = 8, STRIDE = LANES * sizeof(uint64_t);

 private:
  using Lanes = std::array<uint64_t, LANES>;

  static constexpr uint64_t ODD = 0x9E3779B97F4A7C15;  // 2^64 divided by the golden ratio

  static uint64_t mixed(uint64_t state, uint64_t word) { return std::rotl((state ^ word) * ODD, 29); }

  static void step(Lanes& lanes, char* to, const char* from) {
#pragma GCC unroll 8
    for (size_t lane = 0; lane < LANES; ++lane) {
      uint64_t word;
      std::memcpy(&word, from + lane * sizeof word, sizeof word);
      lanes[lane] = mixed(lanes[lane], word);
      std::memcpy(to + lane * sizeof word, &word, sizeof word);
    }
  }

  Lanes lanes_ = {1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t size_ = 0;
};

}  // namespace copier

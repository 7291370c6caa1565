// Chunks of memory with at most two different words, as bits: masks, and what is all equal. Nothing is assumed of what a
// storage holds; every word is looked at, and a chunk with a third word stays as it is.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace copier {

// How a chunk lies in the file. Words of a mask in bytes, of dropout's factors in four, of those in half precision in two.
struct Form {
  uint8_t word_bytes = 0;  // 0: as it is in memory
  uint64_t first = 0, apart = 0;  // one of the words, and what the other one differs by
  size_t stored_bytes = 0;
};

constexpr size_t GROUP = 8;       // words that become one byte
constexpr size_t SAMPLE = 64;     // words that are looked at before anything is packed
constexpr size_t CHECKED = 1024;  // groups between two looks at whether there was a third word

template <class Word>
Word word_at(const char* memory, size_t index) {
  Word word;
  std::memcpy(&word, memory + index * sizeof word, sizeof word);
  return word;
}

// Several words side by side in one register: 1 in each, and what is multiplied by 1 in some of them to have their bits
// side by side in the highest ones.
template <class Word>
struct Lanes;
template <>
struct Lanes<uint8_t> {
  static constexpr uint64_t ONES = 0x0101010101010101, TOGETHER = 0x0102040810204080;
};
template <>
struct Lanes<uint16_t> {
  static constexpr uint64_t ONES = 0x0001000100010001, TOGETHER = 0x1000200040008000;
};
template <>
struct Lanes<uint32_t> {
  static constexpr uint64_t ONES = 0x0000000100000001, TOGETHER = 0x4000000080000000;
};
template <>
struct Lanes<uint64_t> {
  static constexpr uint64_t ONES = 1, TOGETHER = uint64_t{1} << 63;
};
template <class Word>
constexpr size_t IN_LANES = sizeof(uint64_t) / sizeof(Word);

// The words of `count` bits.
template <class Word>
constexpr std::array<uint64_t, size_t{1} << IN_LANES<Word>> SPREAD = [] {
  std::array<uint64_t, size_t{1} << IN_LANES<Word>> spread{};
  for (size_t bits = 0; bits < spread.size(); ++bits)
    for (size_t place = 0; place < IN_LANES<Word>; ++place)
      spread[bits] |= (bits >> place & 1) << (8 * sizeof(Word) * place);
  return spread;
}();

// Packs a group of words that are `first` or differ from it by `apart`, and returns 0 if all of them do.
template <class Word>
uint64_t pack_group(const char* group, Word first, Word apart, char* to) {
  using L = Lanes<Word>;
  const int place_of_a_difference = __builtin_ctzll(apart);
  unsigned bits = 0;
  uint64_t others = 0;
  for (size_t part = 0; part < sizeof(Word); ++part) {
    const uint64_t all = word_at<uint64_t>(group, part) ^ (L::ONES * first);
    const uint64_t set = (all >> place_of_a_difference) & L::ONES;
    others |= (set * apart) ^ all;
    bits |= static_cast<unsigned>((set * L::TOGETHER) >> (64 - IN_LANES<Word>)) << (part * IN_LANES<Word>);
  }
  *to = static_cast<char>(bits);
  return others;
}

template <class Word>
void unpack_group(char bits, Word first, Word apart, char* group) {
  constexpr unsigned MASK = (1u << IN_LANES<Word>) - 1;
  for (size_t part = 0; part < sizeof(Word); ++part) {
    const unsigned some = static_cast<uint8_t>(bits) >> (part * IN_LANES<Word>) & MASK;
    const uint64_t all = (Lanes<Word>::ONES * first) ^ (SPREAD<Word>[some] * apart);
    std::memcpy(group + part * sizeof all, &all, sizeof all);
  }
}

template <class Word>
bool may_have_two(const char* memory, size_t count) {
  const Word first = word_at<Word>(memory, 0);
  Word second = first;
  for (size_t index = 1; index < std::min(count, SAMPLE); ++index) {
    const Word word = word_at<Word>(memory, index);
    if (second == first) second = word;
    if (word != first && word != second) return false;
  }
  return true;
}

// Packs a chunk that is not constant, unless it has a third word, or a part of one at its end.
template <class Word>
bool packed_as(const char* memory, size_t size, char* to, Form& form) {
  const size_t count = size / sizeof(Word), whole = count / GROUP;
  if (count == 0 || size % sizeof(Word) != 0 || !may_have_two<Word>(memory, count)) return false;
  const Word first = word_at<Word>(memory, 0);
  size_t index = 1;
  while (index < count && word_at<Word>(memory, index) == first) ++index;
  if (index == count) return false;
  const Word apart = first ^ word_at<Word>(memory, index);
  for (size_t group = 0; group < whole;) {
    uint64_t others = 0;
    for (const size_t until = std::min(whole, group + CHECKED); group < until; ++group)
      others |= pack_group<Word>(memory + group * GROUP * sizeof(Word), first, apart, to + group);
    if (others != 0) return false;
  }
  const size_t rest = count % GROUP * sizeof(Word);
  if (rest != 0) {
    char last[GROUP * sizeof(Word)];
    for (size_t place = 0; place < GROUP; ++place) std::memcpy(last + place * sizeof first, &first, sizeof first);
    std::memcpy(last, memory + whole * sizeof last, rest);
    if (pack_group<Word>(last, first, apart, to + whole) != 0) return false;
  }
  form = {sizeof(Word), first, apart, whole + (rest != 0)};
  return true;
}

template <class Word>
void unpack_as(const char* from, const Form& form, char* memory, size_t size) {
  constexpr size_t GROUP_BYTES = GROUP * sizeof(Word);
  const auto first = static_cast<Word>(form.first), apart = static_cast<Word>(form.apart);
  const size_t whole = size / GROUP_BYTES;
  for (size_t group = 0; group < whole; ++group)
    unpack_group<Word>(from[group], first, apart, memory + group * GROUP_BYTES);
  if (size % GROUP_BYTES == 0) return;
  char last[GROUP_BYTES];
  unpack_group<Word>(from[whole], first, apart, last);
  std::memcpy(memory + whole * GROUP_BYTES, last, size % GROUP_BYTES);
}

// Packs a chunk into as many bytes as its form says, and leaves it alone where it has more than two different words.
inline Form packed(const char* memory, size_t size, char* to) {
  Form form{0, 0, 0, size};
  constexpr size_t LONGEST = sizeof(uint64_t);
  if (size < GROUP * LONGEST) return form;
  if (std::memcmp(memory, memory + LONGEST, size - LONGEST) == 0) {  // each word is that before it
    return {LONGEST, word_at<uint64_t>(memory, 0), 0, 0};
  }
  // The widest words that serve take the fewest bits.
  packed_as<uint64_t>(memory, size, to, form) || packed_as<uint32_t>(memory, size, to, form) ||
      packed_as<uint16_t>(memory, size, to, form) || packed_as<uint8_t>(memory, size, to, form);
  return form;
}

// Fills a chunk with what was packed.
inline void unpack(const char* from, const Form& form, char* memory, size_t size) {
  if (form.stored_bytes == 0) {
    for (size_t start = 0; start < size; start += sizeof form.first)
      std::memcpy(memory + start, &form.first, std::min(sizeof form.first, size - start));
    return;
  }
  switch (form.word_bytes) {
    case 1: return unpack_as<uint8_t>(from, form, memory, size);
    case 2: return unpack_as<uint16_t>(from, form, memory, size);
    case 4: return unpack_as<uint32_t>(from, form, memory, size);
    default: return unpack_as<uint64_t>(from, form, memory, size);
  }
}

}  // namespace copier

// Which work touched which bytes last, and whether who comes next has waited for it.
//
// Order on a device is decided when work is put on streams, not when it runs: waits and events only ever refer to what
// was there before. So a missing wait is found for certain, however the threads happen to run.
#include "core.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace simulated {
namespace {

struct Stamp {
  size_t actor;
  uint32_t count;
  const char *name;
  bool before(const Clock &clock) const { return actor < clock.size() && count <= clock[actor]; }
};

struct Span {
  uintptr_t end;
  Stamp writer;
  std::vector<Stamp> readers;
};

std::mutex mutex;
std::map<uintptr_t, Span> &spans = *new std::map<uintptr_t, Span>;
std::vector<std::string> &mistakes = *new std::vector<std::string>;
std::set<std::string> &told = *new std::set<std::string>;

void tell(const std::string &mistake) {
  if (!told.insert(mistake).second || mistakes.size() >= 1000) return;
  mistakes.push_back(mistake);
  std::fprintf(stderr, "simulated CUDA: %s\n", mistake.c_str());
}

void split_at(uintptr_t address) {
  auto next = spans.upper_bound(address);
  if (next == spans.begin()) return;
  auto found = std::prev(next);
  if (found->first == address || found->second.end <= address) return;
  Span rest = found->second;
  found->second.end = address;
  spans.emplace(address, std::move(rest));
}

void tell_race(const char *later, size_t actor, const char *does, const Stamp &earlier, const char *did) {
  std::ostringstream text;
  text << later << " on stream " << actor << ' ' << does << " what " << earlier.name << " on stream "
       << earlier.actor << ' ' << did << ", and has not waited for it";
  tell(text.str());
}

} // namespace

void report(const std::string &mistake) {
  std::lock_guard<std::mutex> lock(mutex);
  tell(mistake);
}

void check_order(uintptr_t begin, uintptr_t end, bool writes, size_t actor, const Clock &clock, const char *name) {
  if (begin >= end) return;
  std::lock_guard<std::mutex> lock(mutex);
  split_at(begin);
  split_at(end);
  Stamp stamp{actor, clock[actor], name};
  auto at = spans.lower_bound(begin);
  uintptr_t next = begin;
  while (at != spans.end() && at->first < end) {
    Span &span = at->second;
    if (!span.writer.before(clock)) tell_race(name, actor, writes ? "writes over" : "reads", span.writer, "writes");
    if (writes)
      for (const Stamp &reader : span.readers)
        if (!reader.before(clock)) tell_race(name, actor, "writes over", reader, "reads");
    if (writes) {
      at = spans.erase(at);
      continue;
    }
    if (next < at->first) spans.emplace_hint(at, next, Span{at->first, Stamp{0, 0, "nothing"}, {stamp}});
    bool known = false;
    for (Stamp &reader : span.readers)
      if (reader.actor == actor) reader = stamp, known = true;
    if (!known) span.readers.push_back(stamp);
    next = span.end;
    ++at;
  }
  if (writes)
    spans.emplace(begin, Span{end, stamp, {}});
  else if (next < end)
    spans.emplace(next, Span{end, Stamp{0, 0, "nothing"}, {stamp}});
}

bool all_waited_for(uintptr_t begin, uintptr_t end, const Clock &clock) {
  std::lock_guard<std::mutex> lock(mutex);
  split_at(begin);
  split_at(end);
  for (auto at = spans.lower_bound(begin); at != spans.end() && at->first < end; ++at) {
    if (!at->second.writer.before(clock)) return false;
    for (const Stamp &reader : at->second.readers)
      if (!reader.before(clock)) return false;
  }
  return true;
}

void forget_range(uintptr_t begin, uintptr_t end) {
  std::lock_guard<std::mutex> lock(mutex);
  split_at(begin);
  split_at(end);
  auto first = spans.lower_bound(begin);
  auto last = first;
  while (last != spans.end() && last->first < end) ++last;
  spans.erase(first, last);
}

} // namespace simulated

// For tests: what was found since the last call, a line each. The caller's buffer is filled as far as it goes.
extern "C" __attribute__((visibility("default"))) uint64_t simulated_cuda_take_mistakes(char *text, uint64_t size) {
  std::lock_guard<std::mutex> lock(simulated::mutex);
  std::string all;
  for (const std::string &mistake : simulated::mistakes) all += mistake + "\n";
  if (text != nullptr && size > 0) {
    uint64_t length = all.size() < size - 1 ? all.size() : size - 1;
    all.copy(text, length);
    text[length] = 0;
    simulated::mistakes.clear();
    simulated::told.clear();
  }
  return all.size();
}

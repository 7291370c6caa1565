// What happens to the CPU's memory in one thread while sessions of that thread record it: allocations and frees, markers,
// and the operators that a backward pass runs, all on one clock.
//
// A session belongs to the thread that began it, and any thread may end it. It sees what its thread allocates, wherever
// that is freed. Sessions of a thread may overlap, and each has its own record.

#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pooch {

constexpr int64_t kNone = -1;

inline int64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// The size of a block, and who has allocated it when. Both are 0 if nobody recorded that thread.
struct Block {
  size_t size = 0;
  uint64_t thread = 0;
  int64_t time_ns = 0;
};

struct MemoryRecord {
  int64_t time_ns;
  int64_t pointer;
  int64_t size;
};

// A marker, or an operator of the backward pass. `node`: the name of the autograd node that runs it, or -1.
struct SpanRecord {
  int64_t is_marker;
  int64_t name;
  int64_t start_ns;
  int64_t end_ns;
  int64_t node;
  int64_t within;
};

struct Names {
  int64_t of(std::string_view text) {
    const auto found = numbers.find(text);
    if (found != numbers.end()) {
      return found->second;
    }
    texts.push_back(std::make_unique<std::string>(text));
    const auto number = static_cast<int64_t>(texts.size()) - 1;
    numbers.emplace(*texts.back(), number);
    return number;
  }

  std::vector<std::unique_ptr<std::string>> texts;
  std::unordered_map<std::string_view, int64_t> numbers;
};

enum class Kind { kOther, kMarker, kOperator };

// One of the functions that are running, the outermost first.
struct Frame {
  const void* key;
  Kind kind;
  int64_t name;
  int64_t start_ns;
  int64_t node;      // name of the one that runs it, or that it is
  bool is_inside;    // whether what it calls is part of an operator of the backward pass, or of a marker there
  int64_t within;    // for a marker: the operator around the one that runs it
  int64_t callers[2];  // the innermost two operators, itself included
};

class Session {
 public:
  Session(int64_t id, uint64_t thread) : id(id), thread(thread), begin_ns(clock_ns()) {}

  // Later than whatever was recorded before, so that the order of times is the order of events.
  int64_t now() {
    last_ns = std::max(clock_ns(), last_ns + 1);
    return last_ns;
  }

  void enter(const void* key, std::string_view name, bool is_marker) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (has_ended) {
      return;
    }
    const Frame* around = frames.empty() ? nullptr : &frames.back();
    Frame frame{key, Kind::kOther, kNone, 0, kNone, false, kNone, {kNone, kNone}};
    if (around != nullptr) {
      frame.node = around->node;
      frame.is_inside = around->is_inside;
      std::copy(around->callers, around->callers + 2, frame.callers);
    }
    const bool is_operator = !is_marker && name.find("::") != std::string_view::npos;
    if (is_operator) {
      frame.callers[0] = frame.callers[1];
      frame.callers[1] = frame.name = names.of(name);
    }
    if (is_marker) {
      frame.kind = Kind::kMarker;
      frame.name = names.of(name);
      frame.start_ns = now();
      frame.within = around == nullptr ? kNone : around->callers[0];
      frame.is_inside = frame.is_inside || frame.node != kNone;  // Pooch's own work is no operator of a backward pass
    } else if (name.substr(0, kNodePrefix.size()) == kNodePrefix) {
      frame.node = names.of(name.substr(kNodePrefix.size()));
    } else if (frame.node != kNone && !frame.is_inside && is_operator && name.substr(0, kCustom.size()) != kCustom) {
      frame.kind = Kind::kOperator;
      frame.start_ns = now();
      frame.is_inside = true;
    }
    frames.push_back(frame);
  }

  void leave(const void* key) {
    const std::lock_guard<std::mutex> guard(mutex);
    for (size_t i = frames.size(); !has_ended && i-- > 0;) {
      if (frames[i].key == key) {
        const Frame frame = frames[i];
        frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(i));
        close(frame);
        return;
      }
    }
  }

  void moved(int64_t pointer, int64_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (!has_ended) {
      memory.push_back({now(), pointer, size});
    }
  }

  // Returns whether it had not ended before. What is running counts as if it ended now.
  bool end() {
    const std::lock_guard<std::mutex> guard(mutex);
    while (!has_ended && !frames.empty()) {
      const Frame frame = frames.back();
      frames.pop_back();
      close(frame);
    }
    return !has_ended.exchange(true);
  }

  void clear() {
    const std::lock_guard<std::mutex> guard(mutex);
    memory = {};
    spans = {};
    names = {};
  }

  const int64_t id;
  const uint64_t thread;
  const int64_t begin_ns;
  std::mutex mutex;
  std::atomic<bool> has_ended{false};
  std::vector<MemoryRecord> memory;
  std::vector<SpanRecord> spans;
  Names names;

 private:
  static constexpr std::string_view kNodePrefix = "autograd::engine::evaluate_function: ";  // PyTorch's name for it
  static constexpr std::string_view kCustom = "torch::autograd";

  void close(const Frame& frame) {
    if (frame.kind != Kind::kOther) {
      spans.push_back({frame.kind == Kind::kMarker, frame.name, frame.start_ns, now(), frame.node, frame.within});
    }
  }

  std::vector<Frame> frames;
  int64_t last_ns = 0;
};

using SessionRef = std::shared_ptr<Session>;

// The sessions of the calling thread that have not ended, the innermost last, or null if there are none. Freed by hand,
// as blocks are still freed while a thread that ends destroys what is its own.
inline thread_local std::vector<SessionRef>* sessions_here = nullptr;

// All sessions of the process. Never destroyed: blocks may outlive the interpreter.
class Sessions {
 public:
  // Begins a session of the calling thread under a number that no other one has had.
  void begin(int64_t id) {
    const uint64_t thread = this_thread();
    const std::lock_guard<std::mutex> guard(mutex);
    const auto session = std::make_shared<Session>(id, thread);
    known.emplace(session->id, session);
    if (sessions_here == nullptr) {
      sessions_here = new std::vector<SessionRef>;
    }
    sessions_here->push_back(session);
    active.fetch_add(1);
  }

  // Ends a session, in whatever thread. What it recorded stays until it is forgotten.
  void end(int64_t id) {
    const SessionRef session = find(id);
    if (session != nullptr && session->end()) {
      active.fetch_sub(1);
    }
    prune();
  }

  SessionRef find(int64_t id) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = known.find(id);
    return found == known.end() ? nullptr : found->second;
  }

  // A thread that is gone may have left a reference to it.
  void forget(int64_t id) {
    const SessionRef session = find(id);
    if (session != nullptr) {
      session->clear();
    }
    const std::lock_guard<std::mutex> guard(mutex);
    known.erase(id);
  }

  bool any() const {
    return active.load(std::memory_order_relaxed) > 0;
  }

  void allocated(void* pointer, Block& block) {
    if (sessions_here == nullptr) {
      return;
    }
    block.thread = this_thread();
    block.time_ns = clock_ns();
    for (const SessionRef& session : *sessions_here) {
      session->moved(reinterpret_cast<int64_t>(pointer), static_cast<int64_t>(block.size));
    }
  }

  void freed(void* pointer, const Block& block) {
    if (block.time_ns == 0) {
      return;
    }
    if (block.thread == this_thread()) {
      if (sessions_here != nullptr) {
        tell(*sessions_here, pointer, block);
      }
      return;
    }
    tell(of_thread(block.thread), pointer, block);
  }

  // In a forked child: the sessions are its parent's.
  void begin_child() {
    for (auto& each : known) {
      new std::shared_ptr<Session>(each.second);  // its mutex may be held for good
    }
    known.clear();
    active.store(0);
    sessions_here = nullptr;
  }

  std::mutex mutex;

 private:
  static uint64_t this_thread() {
    static std::atomic<uint64_t> last{0};
    thread_local const uint64_t number = ++last;
    return number;
  }

  std::vector<SessionRef> of_thread(uint64_t thread) {
    std::vector<SessionRef> found;
    const std::lock_guard<std::mutex> guard(mutex);
    for (const auto& each : known) {
      if (each.second->thread == thread) {
        found.push_back(each.second);
      }
    }
    return found;
  }

  static void tell(const std::vector<SessionRef>& found, void* pointer, const Block& block) {
    for (const SessionRef& session : found) {
      if (session->begin_ns <= block.time_ns) {
        session->moved(reinterpret_cast<int64_t>(pointer), -static_cast<int64_t>(block.size));
      }
    }
  }

  // Forgets those of the calling thread that have ended.
  static void prune() {
    if (sessions_here == nullptr) {
      return;
    }
    std::erase_if(*sessions_here, [](const SessionRef& each) { return each->has_ended.load(); });
    if (sessions_here->empty()) {
      delete sessions_here;
      sessions_here = nullptr;
    }
  }

  std::unordered_map<int64_t, SessionRef> known;
  std::atomic<int64_t> active{0};
};

inline Sessions& sessions() {
  static auto* all = new Sessions;
  return *all;
}

}  // namespace pooch

// A CPU allocator for PyTorch that counts live bytes, asks for room before an allocation would pass a limit, serves
// recorded steps from an arena, and records what becomes of memory (step_trace.h).
//
// PyTorch's own CPU allocator keeps no counters. This one takes its memory from the same functions, reports to the same
// profiler, and adds a table of sizes. It uses c10 alone and no Python headers, so it is loaded with ctypes.
//
// While an arena serves, the thread that trains gets the places of a layout (../placement.h). Everything else, and what
// has no free place, comes from where it always did.
//
// Live blocks carry their own deleter, so the allocator can be put in place and taken away at any time.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

#include "arena.h"
#include "blocks.h"
#include "step_trace.h"

namespace {

using MakeRoom = void (*)(int64_t missing_bytes);

pooch::Blocks& blocks() {
  static auto* all = new pooch::Blocks;  // never destroyed: blocks may outlive the interpreter
  return *all;
}

pooch::Arenas& arenas() {
  static auto* found = new pooch::Arenas;  // never destroyed, like the table
  return *found;
}

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};
static_assert(sizeof live_bytes == sizeof(int64_t) && decltype(live_bytes)::is_always_lock_free);
std::atomic<int64_t> limit_bytes{INT64_MAX};
std::atomic<MakeRoom> make_room{nullptr};
std::atomic<bool> was_interrupted{false};

// Whether nothing can leave, so that nobody is asked, and the most by which the limit was passed then.
std::atomic<bool> has_given_up{false};
std::atomic<int64_t> missed_bytes{0};

// Only threads that compute the user's step ask for room: a worker thread of an operator may hold locks, and the thread
// that copies would wait for itself.
thread_local bool asks_for_room = false;

// Set by what makes room once it has ended. If it is not, an interrupt came while the operator computed: Python raises it
// in the first Python code that runs, which is the callback, and it goes no further.
thread_local bool has_ended = false;

void raise_to(std::atomic<int64_t>& highest_bytes, int64_t bytes) {
  int64_t highest = highest_bytes.load(std::memory_order_relaxed);
  while (bytes > highest && !highest_bytes.compare_exchange_weak(highest, bytes, std::memory_order_relaxed)) {
  }
}

void count(int64_t size) {
  raise_to(peak_bytes, live_bytes.fetch_add(size, std::memory_order_relaxed) + size);
}

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  const pooch::Block block = blocks().take(pointer);
  const size_t size = block.size;
  if (pooch::sessions().any()) {
    pooch::sessions().freed(pointer, block);
  }
  live_bytes.fetch_sub(static_cast<int64_t>(size), std::memory_order_relaxed);
  c10::profiledCPUMemoryReporter().Delete(pointer);
  arenas().died(pointer);
  if (!arenas().release(pointer, static_cast<int64_t>(size))) {
    c10::free_cpu(pointer);
  }
}

// Memory for a request: a place in the arena if the request has one, and otherwise what PyTorch takes.
void* memory_for(size_t size) {
  pooch::Arenas& all = arenas();
  const auto mode = all.mode();
  if (mode == pooch::Arenas::kOff || size == 0) {
    return c10::alloc_cpu(size);
  }
  if (!all.is_owner()) {
    if (mode == pooch::Arenas::kServing) {
      all.elsewhere();
    }
    return c10::alloc_cpu(size);
  }
  void* pointer = mode == pooch::Arenas::kServing ? all.allocate(static_cast<int64_t>(size)) : nullptr;
  if (pointer == nullptr) {
    pointer = c10::alloc_cpu(size);
  }
  if (mode == pooch::Arenas::kRecording) {
    all.born(pointer, static_cast<int64_t>(size));
  }
  return pointer;
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    const auto needed = static_cast<int64_t>(size);
    const int64_t limit = limit_bytes.load(std::memory_order_relaxed);
    if (asks_for_room && limit != INT64_MAX) {
      const int64_t missing = live_bytes.load(std::memory_order_relaxed) + needed - limit;
      const MakeRoom ask = make_room.load(std::memory_order_acquire);
      if (missing > 0 && has_given_up.load(std::memory_order_relaxed)) {
        raise_to(missed_bytes, missing);
      } else if (missing > 0 && ask != nullptr) {
        asks_for_room = false;  // what makes room may itself allocate
        has_ended = false;
        ask(missing);
        if (!has_ended) {
          was_interrupted.store(true);
          ask(missing);
        }
        asks_for_room = true;
      }
    }
    void* pointer = nullptr;
    try {
      pointer = memory_for(size);
    } catch (...) {
      c10::profiledCPUMemoryReporter().OutOfMemory(size);
      throw;
    }
    if (pointer != nullptr) {
      pooch::Block block{size};
      if (pooch::sessions().any()) {
        pooch::sessions().allocated(pointer, block);
      }
      blocks().put(pointer, block);
    }
    count(pointer == nullptr ? 0 : needed);
    c10::profiledCPUMemoryReporter().New(pointer, size);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

// A fork copies locks as they are, and would leave those locked that another thread holds. Nothing in the child makes
// room for it: the step and its memory are the parent's.
void lock_all() {
  pooch::sessions().mutex.lock();
  blocks().lock_all();
  arenas().mutex.lock();
}

void unlock_all() {
  arenas().mutex.unlock();
  blocks().unlock_all();
  pooch::sessions().mutex.unlock();
}

void begin_child() {
  pooch::sessions().begin_child();
  arenas().begin_child();
  unlock_all();
  limit_bytes.store(INT64_MAX);
  make_room.store(nullptr);
}

CountingAllocator* the_allocator() {
  // Never destroyed, as PyTorch keeps a pointer to it.
  static auto* allocator = [] {
    pthread_atfork(&lock_all, &unlock_all, &begin_child);
    return new CountingAllocator;
  }();
  return allocator;
}

}  // namespace

extern "C" {

// Puts the allocator in place of the current one, unless that one is somebody else's. Returns whether it is in place.
int pooch_allocator_install() {
  if (c10::GetCPUAllocator() == the_allocator()) {
    return 1;
  }
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
    return 0;
  }
  c10::SetCPUAllocator(the_allocator());
  return c10::GetCPUAllocator() == the_allocator();
}

// Where it is, for what PyTorch would else take from its own allocator whichever is in place.
int64_t pooch_allocator_address() {
  return reinterpret_cast<int64_t>(the_allocator());
}

void pooch_allocator_remove() {
  if (c10::GetCPUAllocator() == the_allocator()) {
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  }
}

// Where both numbers are, for those who look at them in every step: a call takes longer than a look.
int64_t pooch_allocator_live_address() {
  return reinterpret_cast<int64_t>(&live_bytes);
}

int64_t pooch_allocator_peak_address() {
  return reinterpret_cast<int64_t>(&peak_bytes);
}

// Whether a live block was counted.
int pooch_allocator_knows(void* pointer) {
  return blocks().has(pointer);
}

// Sets the limit in live bytes and what is called, in a thread that asks for room, before an allocation would pass it.
void pooch_allocator_set_limit(int64_t bytes, MakeRoom ask) {
  make_room.store(ask, std::memory_order_release);
  limit_bytes.store(bytes, std::memory_order_relaxed);
  has_given_up.store(false, std::memory_order_relaxed);
}

// Has nobody asked any more, as nothing can leave. What is missing from now on is noted.
void pooch_allocator_give_up() {
  has_given_up.store(true, std::memory_order_relaxed);
}

void pooch_allocator_resume() {
  has_given_up.store(false, std::memory_order_relaxed);
}

// Where the most is by which the limit was passed while room was given up.
int64_t pooch_allocator_missed_address() {
  return reinterpret_cast<int64_t>(&missed_bytes);
}

// Called at the end of what makes room.
void pooch_allocator_end_request() {
  has_ended = true;
}

// Returns whether what makes room was interrupted before it began, since the last call.
int pooch_allocator_take_interrupt() {
  return was_interrupted.exchange(false);
}

// Sets whether the calling thread asks for room.
void pooch_allocator_ask_for_room(int asks) {
  asks_for_room = asks != 0;
}

// Arenas ---------------------------------------------------------------------------------------------------------------

// Begins to record what the calling thread asks for. An arena that serves is taken off.
void pooch_arena_record() {
  arenas().record();
}

// Ends the recording, and returns the number of requests.
int64_t pooch_arena_recorded() {
  return arenas().recorded();
}

// The number of requests that were recorded so far.
int64_t pooch_arena_requests() {
  return arenas().requests();
}

// Writes the sizes of the recorded requests, and before which request their blocks died (-1: alive).
void pooch_arena_read(int64_t* sizes, int64_t* deaths) {
  const std::lock_guard<std::mutex> guard(arenas().mutex);
  arenas().recorder.read(sizes, deaths);
}

// Serves the calling thread from a new arena. Request k of a step has `sizes[k]` bytes and lies at `offsets[k]` (-1:
// nowhere), in `rooms[k]` bytes. Returns whether there was room for the arena.
int pooch_arena_serve(
    int64_t count, const int64_t* sizes, const int64_t* offsets, const int64_t* rooms, int64_t arena_bytes,
    int canaries) {
  try {
    std::vector<pooch::Place> places;
    places.reserve(static_cast<size_t>(count));
    for (int64_t k = 0; k < count; ++k) {
      const bool fits = offsets[k] >= 0 && rooms[k] >= sizes[k] && offsets[k] + rooms[k] <= arena_bytes;
      places.push_back({fits ? offsets[k] : pooch::kNoPlace, rooms[k]});
    }
    return arenas().serve({sizes, sizes + count}, std::move(places), arena_bytes, canaries != 0);
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// Begins a step of the calling thread, or a part of one: its next request is the recorded one of number `first`, and those
// from `end` on belong to the next part. While steps are recorded, they are those of this thread.
void pooch_arena_begin_step(int64_t first, int64_t end) {
  arenas().begin_step(static_cast<size_t>(first), static_cast<size_t>(end));
}

// Records and serves no more. An arena with live blocks stays until they are freed.
void pooch_arena_stop() {
  arenas().stop();
}

// Writes the counters since `serve`, in the order of `Counters`, and the bytes between blocks that were written to.
void pooch_arena_counters(int64_t* found) {
  const std::lock_guard<std::mutex> guard(arenas().mutex);
  const pooch::Counters& now = arenas().counters;
  const int64_t all[] = {
      now.steps, now.placed, now.unplaced, now.unrecognised, now.collided, now.beyond, now.elsewhere,
      now.placed_bytes, now.other_bytes, arenas().broken_canaries};
  std::copy(std::begin(all), std::end(all), found);
}

// Bytes of all arenas that are mapped.
int64_t pooch_arena_mapped_bytes() {
  return arenas().mapped_bytes();
}

// Blocks that live in arenas.
int64_t pooch_arena_live_blocks() {
  return arenas().live_blocks();
}

// Whether a pointer lies in an arena.
int pooch_arena_contains(void* pointer) {
  return arenas().contains(pointer);
}

// Traces ---------------------------------------------------------------------------------------------------------------

// Begins a session of the calling thread, under a number that no other one has had.
void pooch_trace_begin(int64_t session) {
  pooch::sessions().begin(session);
}

// Ends a session, in whatever thread.
void pooch_trace_end(int64_t session) {
  pooch::sessions().end(session);
}

// Forgets what an ended session has recorded.
void pooch_trace_forget(int64_t session) {
  pooch::sessions().forget(session);
}

// Notes in all sessions of the calling thread that a function or a marker begins. What it is called with is its own.
void pooch_trace_enter(const void* key, const char* name, int is_marker) {
  if (pooch::sessions_here != nullptr) {
    for (const auto& session : *pooch::sessions_here) {
      session->enter(key, name, is_marker != 0);
    }
  }
}

// Notes that it ends.
void pooch_trace_leave(const void* key) {
  if (pooch::sessions_here != nullptr) {
    for (const auto& session : *pooch::sessions_here) {
      session->leave(key);
    }
  }
}

// Whether the calling thread has a session.
int pooch_trace_is_here() {
  return pooch::sessions_here != nullptr;
}

// Writes how many memory events and spans an ended session has, and the length of all names.
void pooch_trace_counts(int64_t number, int64_t* counts) {
  const auto session = pooch::sessions().find(number);
  if (session == nullptr) {  // of the parent of this process
    return;
  }
  int64_t length = 0;
  for (const auto& text : session->names.texts) {
    length += static_cast<int64_t>(text->size()) + 1;
  }
  const size_t all[] = {session->memory.size(), session->spans.size()};
  std::copy(std::begin(all), std::end(all), counts);
  counts[2] = length;
}

// Writes them. Each name is followed by a zero.
void pooch_trace_read(int64_t number, void* memory, void* spans, char* names) {
  const auto session = pooch::sessions().find(number);
  if (session == nullptr) {
    return;
  }
  std::copy(session->memory.begin(), session->memory.end(), static_cast<pooch::MemoryRecord*>(memory));
  std::copy(session->spans.begin(), session->spans.end(), static_cast<pooch::SpanRecord*>(spans));
  for (const auto& text : session->names.texts) {
    names = std::copy(text->c_str(), text->c_str() + text->size() + 1, names);
  }
}

}  // extern "C"

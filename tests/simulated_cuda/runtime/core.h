// The simulated device: memory, streams, events and what is known of their order.
//
// Calls of the CUDA runtime, the driver and cuBLAS come down to the functions of this file. Work is put on streams, each
// of which has a thread of its own that does it in order; the host runs ahead as it does of a real device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

// ---- settings, read once from the environment -------------------------------------------------------------------
struct Settings {
  int devices;
  uint64_t memory_bytes;         // of each device
  double kernel_us;              // what each kernel takes
  double copy_bytes_per_us;      // host <-> device, each way
  double on_device_bytes_per_us; // copies and fills within a device
  bool poison;                   // fill memory that is given back
  bool integrated;               // the devices say that their memory is that of the host
};
const Settings &settings();

// ---- what happened before what -----------------------------------------------------------------------------------
// One counter for each stream and one for the host, as in a vector clock: entry i says up to which piece of work of
// stream i everything has been waited for.
using Clock = std::vector<uint32_t>;
void merge(Clock &into, const Clock &other);

struct Access {
  uintptr_t begin;
  uintptr_t end;
  bool writes;
};

// Something that streams and the host can wait for.
struct Completion;

struct Stream;
struct Event;
struct Graph;

struct Work {
  std::function<void()> run; // on the stream's thread; may be empty
  double duration_us = 0;    // how long the device takes at least
  const char *name = "";     // lives as long as the process
  std::vector<Access> accesses;
  uint64_t bytes = 0; // moved, for the timeline
};

// ---- streams ----------------------------------------------------------------------------------------------------
// Functions that take a handle return null or false for one that is not alive, and report it.
Stream *create_stream(int device, bool blocking, int priority);
Stream *find_stream(void *handle); // 0: the legacy default stream of the calling thread's device
bool destroy_stream(void *handle);
int stream_device(const Stream *stream);
int stream_priority(const Stream *stream);
unsigned stream_flags(const Stream *stream);
void enqueue(Stream *stream, Work work);
void wait_for(Stream *stream); // the host waits
bool is_idle(Stream *stream);  // true is knowledge: the host may rely on what the stream did
void wait_for_device(int device);

// The end of what a stream was given up to now.
struct Moment {
  size_t actor;
  uint32_t count;
  Clock clock;
  std::shared_ptr<Completion> completion;
};
Moment now(Stream *stream);
bool comes_after(Stream *stream, const Moment &moment); // what the stream is given next has waited for it
void make_wait(Stream *stream, const Moment &moment);
void add_moment(std::vector<Moment> &moments, const Moment &moment); // of each stream, the last one is kept

Event *create_event(unsigned flags);
Event *find_event(void *handle);
bool destroy_event(void *handle);
void record(Event *event, Stream *stream);
bool make_wait(Stream *stream, Event *event);
void wait_for(Event *event);
bool is_done(Event *event);
bool elapsed_ms(Event *start, Event *end, float *milliseconds, bool *ready); // false: no timing, or two devices

// ---- graphs -----------------------------------------------------------------------------------------------------
bool begin_capture(Stream *stream);
Graph *end_capture(Stream *stream);
uint64_t capture_id(const Stream *stream); // 0: not capturing
Graph *capture_of(const Stream *stream);
bool anything_captures();
void launch(Graph *graph, Stream *stream);
size_t node_count(const Graph *graph);
void destroy(Graph *graph);

// ---- memory -----------------------------------------------------------------------------------------------------
// Device pointers lie in a range that no thread may touch. The bytes are in another one, at a fixed distance; only work
// on streams goes there, through `bytes_at`.
bool is_device_pointer(const void *pointer);
int device_of(const void *pointer);
char *bytes_at(const void *pointer);
bool is_mapped(const void *pointer, uint64_t bytes);
void *allocate(int device, uint64_t bytes); // null: over the limit
bool release(void *pointer);                // waits for the device, as cudaFree does
bool allocation_range(const void *pointer, uintptr_t *base, uint64_t *bytes);
uint64_t free_bytes(int device);

uintptr_t reserve(int device, uint64_t bytes, uint64_t alignment);
uint64_t create_chunk(int device, uint64_t bytes); // a handle; 0: over the limit
bool release_chunk(uint64_t handle);
bool map_chunk(uintptr_t address, uint64_t bytes, uint64_t handle);
bool unmap(uintptr_t address, uint64_t bytes);

// In the order of a stream, from the pool of its device.
void *allocate_in_order(Stream *stream, uint64_t bytes); // null: over the limit
bool release_in_order(Stream *stream, void *pointer);
void trim_pool(int device, uint64_t keep_bytes);
struct PoolCounters {
  uint64_t used = 0, used_high = 0, reserved = 0, reserved_high = 0;
};
PoolCounters pool_counters(int device);
void reset_pool_highs(int device, bool of_used);

void *allocate_pinned(uint64_t bytes);
bool release_pinned(void *pointer);
enum class Pinning { done, already, unknown };
Pinning pin(void *pointer, uint64_t bytes);
Pinning unpin(void *pointer);
bool is_pinned(const void *pointer, uint64_t bytes);

// ---- the device's own work --------------------------------------------------------------------------------------
bool copy(void *to, const void *from, uint64_t bytes, Stream *stream, bool host_waits);
bool fill(void *to, int value, uint64_t bytes, Stream *stream);
void poison(void *memory, uint64_t bytes, Stream *stream);

// ---- contexts ---------------------------------------------------------------------------------------------------
void use(int device); // it has a context from now on
bool is_used(int device);

// ---- mistakes ---------------------------------------------------------------------------------------------------
void report(const std::string &mistake);
void check_order(uintptr_t begin, uintptr_t end, bool writes, size_t actor, const Clock &clock, const char *name);
void forget_range(uintptr_t begin, uintptr_t end);
bool all_waited_for(uintptr_t begin, uintptr_t end, const Clock &clock);
bool host_knows(uintptr_t begin, uintptr_t end); // the host has waited for all that touched these bytes

// ---- what the host may read ---------------------------------------------------------------------------------------
// While an operator's host code runs, what its inner kernels would have computed is not there. Ranges of the calling
// thread, as begin and end: device memory that may be copied to the host; none set: all.
bool host_may_read(const void *pointer, uint64_t bytes);

// ---- the calling thread -----------------------------------------------------------------------------------------
extern thread_local int current_device;
extern thread_local int last_error;

} // namespace simulated

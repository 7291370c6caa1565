// Streams with a thread each, events, the legacy default stream, and graphs that were captured.
#include "core.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

namespace simulated {

namespace {

double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

void sleep_until(double time_us) {
  double left = time_us - now_us();
  if (left > 20) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(left));
}

} // namespace

struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  double time_us = 0;

  void finish(double at_us) {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    time_us = at_us;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool is_done() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};

namespace {
struct Item {
  Work work;
  std::vector<std::shared_ptr<Completion>> waits;
  std::shared_ptr<Completion> completes;
};
} // namespace

struct Graph {
  uint64_t id;
  std::vector<Work> nodes;
};

struct Stream {
  size_t actor = 0;
  int device = 0;
  bool blocking = true; // in order with the legacy default stream
  bool legacy = false;
  int priority = 0;
  Clock clock;
  std::shared_ptr<Completion> tail;
  Graph *capture = nullptr;
  bool origin = false;
  double busy_until_us = 0;
  // of the thread
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> items;
  bool started = false;
  bool stopped = false;
};

struct Event {
  unsigned flags = 0;
  Clock clock;
  std::shared_ptr<Completion> completion;
  Graph *capture = nullptr;
  bool recorded = false;
  int device = 0; // on which it was recorded
};

namespace {

struct World {
  std::recursive_mutex mutex; // of all that is decided when work is put on streams
  Clock host{1};
  std::set<void *> streams, events, dead;
  std::vector<Stream *> all; // alive
  std::map<int, Stream *> defaults;
  size_t last_actor = 0;
  uint64_t last_capture = 0;
  int captures = 0;
};

World &world() {
  static World &it = *new World; // never destroyed: threads of streams outlive main
  return it;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// ---- the timeline, for pictures ----
struct Span {
  size_t actor;
  const char *name;
  double begin_us, end_us;
  uint64_t bytes;
};
std::mutex timeline_mutex;
bool timeline_on = false;
std::vector<Span> &timeline = *new std::vector<Span>;

void note(const Span &span) {
  std::lock_guard<std::mutex> lock(timeline_mutex);
  if (timeline_on) timeline.push_back(span);
}

void do_item(Stream *stream, Item &item) {
  for (auto &waited : item.waits) waited->wait();
  double begin_us = std::max(now_us(), stream->busy_until_us);
  if (item.work.run) {
    sleep_until(stream->busy_until_us);
    item.work.run();
  }
  stream->busy_until_us = std::max(begin_us + item.work.duration_us, item.work.run ? now_us() : begin_us);
  if (item.work.duration_us > 0) note(Span{stream->actor, item.work.name, begin_us, stream->busy_until_us, item.work.bytes});
  if (item.completes) {
    sleep_until(stream->busy_until_us);
    item.completes->finish(stream->busy_until_us);
  } else if (stream->busy_until_us - now_us() > 500) {
    sleep_until(stream->busy_until_us);
  }
}

void serve(Stream *stream) {
  pthread_setname_np(pthread_self(), ("cuda stream " + std::to_string(stream->actor)).substr(0, 15).c_str());
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(stream->mutex);
      stream->changed.wait(lock, [stream] { return stream->stopped || !stream->items.empty(); });
      if (stream->items.empty()) break;
      item = std::move(stream->items.front());
      stream->items.pop_front();
    }
    do_item(stream, item);
  }
  delete stream;
}

void push(Stream *stream, Item item) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  if (!stream->started) {
    stream->started = true;
    std::thread(serve, stream).detach();
  }
  stream->items.push_back(std::move(item));
  stream->changed.notify_one();
}

Stream *new_stream(int device, bool blocking, int priority) {
  use(device);
  auto *stream = new Stream;
  stream->actor = ++world().last_actor;
  stream->device = device;
  stream->blocking = blocking;
  stream->priority = priority;
  stream->clock.assign(stream->actor + 1, 0);
  world().all.push_back(stream);
  return stream;
}

Stream *default_stream(int device) {
  Stream *&found = world().defaults[device];
  if (found == nullptr) {
    found = new_stream(device, true, 0);
    found->legacy = true;
  }
  return found;
}

// A mark at the end of what the stream was given so far.
std::shared_ptr<Completion> mark(Stream *stream) {
  if (!stream->tail) {
    stream->tail = std::make_shared<Completion>();
    Item item;
    item.completes = stream->tail;
    push(stream, std::move(item));
  }
  return stream->tail;
}

void await(Stream *stream, const std::shared_ptr<Completion> &completion, const Clock &clock) {
  merge(stream->clock, clock);
  if (completion->is_done()) return;
  Item item;
  item.waits.push_back(completion);
  stream->tail = nullptr;
  push(stream, std::move(item));
}

// The legacy default stream waits for all blocking streams of its device, and they wait for it.
void keep_legacy_order(Stream *stream) {
  if (stream->legacy) {
    for (Stream *other : world().all)
      if (other != stream && other->blocking && other->device == stream->device && other->started && !other->capture)
        await(stream, mark(other), other->clock);
  } else if (stream->blocking) {
    Stream *legacy = default_stream(stream->device);
    if (legacy->started) await(stream, mark(legacy), legacy->clock);
  }
}

} // namespace

Stream *create_stream(int device, bool blocking, int priority) {
  Lock lock(world().mutex);
  Stream *stream = new_stream(device, blocking, priority);
  world().streams.insert(stream);
  world().dead.erase(stream);
  return stream;
}

Stream *find_stream(void *handle) {
  Lock lock(world().mutex);
  if (handle == nullptr || handle == reinterpret_cast<void *>(1)) return default_stream(current_device);
  if (handle == reinterpret_cast<void *>(2)) {
    thread_local std::map<int, Stream *> own;
    Stream *&found = own[current_device];
    if (found == nullptr) found = new_stream(current_device, true, 0);
    return found;
  }
  if (world().streams.count(handle)) return static_cast<Stream *>(handle);
  report(world().dead.count(handle) ? "a stream is used after it was destroyed" : "what is used as a stream is none");
  return nullptr;
}

bool destroy_stream(void *handle) {
  Lock lock(world().mutex);
  if (!world().streams.count(handle)) {
    report("a stream is destroyed that is not alive");
    return false;
  }
  auto *stream = static_cast<Stream *>(handle);
  world().streams.erase(handle);
  world().dead.insert(handle);
  std::erase(world().all, stream);
  std::lock_guard<std::mutex> inner(stream->mutex);
  stream->stopped = true;
  stream->changed.notify_one(); // its thread ends it, once its work is done
  return true;
}

int stream_device(const Stream *stream) { return stream->device; }
int stream_priority(const Stream *stream) { return stream->priority; }
unsigned stream_flags(const Stream *stream) { return stream->blocking ? 0 : 1; }

void enqueue(Stream *stream, Work work) {
  Lock lock(world().mutex);
  if (stream->capture != nullptr) {
    stream->capture->nodes.push_back(std::move(work));
    return;
  }
  keep_legacy_order(stream);
  merge(stream->clock, world().host);
  ++stream->clock[stream->actor];
  for (const Access &access : work.accesses)
    check_order(access.begin, access.end, access.writes, stream->actor, stream->clock, work.name);
  stream->tail = nullptr;
  Item item;
  item.work = std::move(work);
  push(stream, std::move(item));
}

namespace {
// Called without the lock: whatever else there is goes on meanwhile.
void wait_on_host(const std::shared_ptr<Completion> &completion, const Clock &clock) {
  completion->wait();
  Lock lock(world().mutex);
  merge(world().host, clock);
}
} // namespace

void wait_for(Stream *stream) {
  std::shared_ptr<Completion> end;
  Clock clock;
  {
    Lock lock(world().mutex);
    keep_legacy_order(stream);
    end = mark(stream);
    clock = stream->clock;
  }
  wait_on_host(end, clock);
}

bool is_idle(Stream *stream) {
  Lock lock(world().mutex);
  if (!stream->started) return true;
  if (!mark(stream)->is_done()) return false;
  merge(world().host, stream->clock);
  return true;
}

void wait_for_device(int device) {
  std::vector<Stream *> found;
  {
    Lock lock(world().mutex);
    for (Stream *stream : world().all)
      if (stream->device == device && stream->started && !stream->capture) found.push_back(stream);
  }
  for (Stream *stream : found) wait_for(stream);
}

Moment now(Stream *stream) {
  Lock lock(world().mutex);
  return Moment{stream->actor, stream->clock[stream->actor], stream->clock, mark(stream)};
}

bool comes_after(Stream *stream, const Moment &moment) {
  Lock lock(world().mutex);
  auto knows = [&moment](const Clock &clock) { return moment.actor < clock.size() && moment.count <= clock[moment.actor]; };
  return knows(stream->clock) || knows(world().host);
}

void make_wait(Stream *stream, const Moment &moment) {
  Lock lock(world().mutex);
  await(stream, moment.completion, moment.clock);
}

void add_moment(std::vector<Moment> &moments, const Moment &moment) {
  for (Moment &known : moments)
    if (known.actor == moment.actor) {
      if (known.count < moment.count) known = moment;
      return;
    }
  moments.push_back(moment);
}

bool host_knows(uintptr_t begin, uintptr_t end) {
  Lock lock(world().mutex);
  return all_waited_for(begin, end, world().host);
}

// ---- events -----------------------------------------------------------------------------------------------------

Event *create_event(unsigned flags) {
  Lock lock(world().mutex);
  auto *event = new Event;
  event->flags = flags;
  world().events.insert(event);
  world().dead.erase(event);
  return event;
}

Event *find_event(void *handle) {
  Lock lock(world().mutex);
  if (world().events.count(handle)) return static_cast<Event *>(handle);
  report(world().dead.count(handle) ? "an event is used after it was destroyed" : "what is used as an event is none");
  return nullptr;
}

bool destroy_event(void *handle) {
  Lock lock(world().mutex);
  if (!world().events.count(handle)) {
    report("an event is destroyed that is not alive");
    return false;
  }
  world().events.erase(handle);
  world().dead.insert(handle);
  delete static_cast<Event *>(handle);
  return true;
}

void record(Event *event, Stream *stream) {
  Lock lock(world().mutex);
  event->recorded = true;
  event->device = stream->device;
  event->capture = stream->capture;
  if (stream->capture != nullptr) return;
  keep_legacy_order(stream);
  merge(stream->clock, world().host);
  stream->tail = nullptr; // of its own, for its time
  event->completion = mark(stream);
  event->clock = stream->clock;
}

bool make_wait(Stream *stream, Event *event) {
  Lock lock(world().mutex);
  if (!event->recorded) return true; // nothing to wait for
  if (event->capture != nullptr) {
    if (stream->capture == nullptr) stream->capture = event->capture, ++world().captures; // joins the capture
    return stream->capture == event->capture;
  }
  if (stream->capture != nullptr) return event->completion->is_done();
  await(stream, event->completion, event->clock);
  return true;
}

void wait_for(Event *event) {
  std::shared_ptr<Completion> completion;
  Clock clock;
  {
    Lock lock(world().mutex);
    if (!event->recorded || event->capture) return;
    completion = event->completion;
    clock = event->clock;
  }
  wait_on_host(completion, clock);
}

bool is_done(Event *event) {
  Lock lock(world().mutex);
  if (!event->recorded || event->capture) return true;
  if (!event->completion->is_done()) return false;
  merge(world().host, event->clock);
  return true;
}

bool elapsed_ms(Event *start, Event *end, float *milliseconds, bool *ready) {
  Lock lock(world().mutex);
  constexpr unsigned kDisableTiming = 2;
  if (!start->recorded || !end->recorded || (start->flags | end->flags) & kDisableTiming) return false;
  if (start->capture || end->capture || start->device != end->device) return false;
  *ready = start->completion->is_done() && end->completion->is_done();
  if (*ready) *milliseconds = static_cast<float>((end->completion->time_us - start->completion->time_us) / 1e3);
  return true;
}

// ---- graphs -----------------------------------------------------------------------------------------------------

bool begin_capture(Stream *stream) {
  Lock lock(world().mutex);
  if (stream->legacy || stream->capture != nullptr) return false;
  stream->capture = new Graph{++world().last_capture, {}};
  stream->origin = true;
  ++world().captures;
  return true;
}

Graph *end_capture(Stream *stream) {
  Lock lock(world().mutex);
  if (!stream->origin) return nullptr;
  Graph *graph = stream->capture;
  for (Stream *other : world().all)
    if (other->capture == graph) other->capture = nullptr, --world().captures;
  stream->origin = false;
  return graph;
}

uint64_t capture_id(const Stream *stream) {
  Lock lock(world().mutex);
  return stream->capture ? stream->capture->id : 0;
}
Graph *capture_of(const Stream *stream) { return stream->capture; }
bool anything_captures() {
  Lock lock(world().mutex);
  return world().captures > 0;
}
size_t node_count(const Graph *graph) { return graph->nodes.size(); }
void destroy(Graph *graph) { (void)graph; } // captured work may be under way; a test's graphs are few

void launch(Graph *graph, Stream *stream) {
  for (const Work &work : graph->nodes) enqueue(stream, work);
}

} // namespace simulated

// ---- for tests ----------------------------------------------------------------------------------------------------

extern "C" __attribute__((visibility("default"))) void simulated_cuda_start_timeline() {
  std::lock_guard<std::mutex> lock(simulated::timeline_mutex);
  simulated::timeline.clear();
  simulated::timeline_on = true;
}

// One line for each piece of work: stream, begin in us, end in us, bytes, name. Returns 0, or -1 where it cannot be written.
extern "C" __attribute__((visibility("default"))) int simulated_cuda_write_timeline(const char *path) {
  std::lock_guard<std::mutex> lock(simulated::timeline_mutex);
  simulated::timeline_on = false;
  std::FILE *file = std::fopen(path, "w");
  if (file == nullptr) return -1;
  std::fprintf(file, "stream\tbegin_us\tend_us\tbytes\tname\n");
  double first = simulated::timeline.empty() ? 0 : simulated::timeline.front().begin_us;
  for (const auto &span : simulated::timeline)
    std::fprintf(file, "%zu\t%.1f\t%.1f\t%llu\t%s\n", span.actor, span.begin_us - first, span.end_us - first,
                 static_cast<unsigned long long>(span.bytes), span.name);
  return std::fclose(file) == 0 ? 0 : -1;
}

// The thread that copies, and what it is given to do. Nothing here touches Python.
#pragma once
#include "bits.h"
#include "checksum.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace copier {

constexpr size_t ALIGNMENT_BYTES = 4096;  // of what direct I/O moves

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Why a copy failed, where no system call says it.
enum class Failure { NONE, SYSTEM, TOOK_NOTHING, ENDED_EARLY, CHANGED, LEFT_BEHIND, NO_THREAD };

// One copy between memory and a file. The thread that submits it keeps both alive until it has ended.
struct Copy {
  char* memory;
  size_t size;
  int descriptor;
  off_t offset;
  bool is_outwards, is_checked, packs;
  std::shared_ptr<const Copy> written;  // of a copy in: the copy out of what it reads, if there was one
  std::vector<Form> forms;              // of a copy out: how each chunk lies in the file
  // What came of it, written before `is_done`.
  Failure failure = Failure::NONE;
  int code = 0;  // of the system call
  uint64_t checksum = 0;
  size_t moved = 0;  // bytes that the file took or gave
  double seconds = 0;
  std::atomic<bool> is_done{false};

  void fail(Failure why, int error_code = 0) { failure = why, code = error_code; }
};

// Aligned memory through which the bytes pass, as PyTorch's is not aligned for direct I/O.
class Buffer {
 public:
  explicit Buffer(size_t size) : size(size) {
    void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    start = static_cast<char*>(memory);
  }
  ~Buffer() { munmap(start, size); }
  Buffer(const Buffer&) = delete;

  const size_t size;
  char* start;
};

// After a short transfer the rest may begin where direct I/O cannot, as at a limit of file sizes: then, and where a file
// system only pretends to support direct I/O, the page cache serves.
inline bool moves_through_cache_now(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0 && fcntl(descriptor, F_SETFL, flags & ~O_DIRECT) == 0;
}

// Whether a system call that has failed is to be made again.
inline bool is_to_repeat(int descriptor) {
  return errno == EINTR || (errno == EINVAL && moves_through_cache_now(descriptor));
}

// Moves a chunk, of which `needed` bytes count.
inline bool move_chunk(Copy& copy, char* buffer, size_t padded, size_t needed, off_t offset) {
  for (size_t done = 0; done < needed;) {
    const off_t from = offset + static_cast<off_t>(done);
    const ssize_t moved = copy.is_outwards ? pwrite(copy.descriptor, buffer + done, padded - done, from)
                                           : pread(copy.descriptor, buffer + done, padded - done, from);
    if (moved > 0) {
      done += static_cast<size_t>(moved);
    } else if (moved == 0) {
      return copy.fail(copy.is_outwards ? Failure::TOOK_NOTHING : Failure::ENDED_EARLY), false;
    } else if (!is_to_repeat(copy.descriptor)) {
      return copy.fail(Failure::SYSTEM, errno), false;
    }
  }
  return true;
}

inline void copied(Checksum* checksum, char* to, const char* from, size_t size) {
  if (checksum != nullptr) checksum->copy(to, from, size);
  else if (to != from) std::memcpy(to, from, size);
}

// Packs a chunk into the buffer, or copies it there.
inline Form gathered(const Copy& copy, const char* memory, size_t size, char* buffer, Checksum* checksum) {
  const Form form = copy.packs ? packed(memory, size, buffer) : Form{0, 0, 0, size};
  copied(checksum, buffer, form.word_bytes != 0 ? buffer : memory, form.stored_bytes);
  return form;
}

inline void spread_out(const Form& form, char* buffer, char* memory, size_t size, Checksum* checksum) {
  copied(checksum, form.word_bytes != 0 ? buffer : memory, buffer, form.stored_bytes);
  if (form.word_bytes != 0) unpack(buffer, form, memory, size);
}

inline void perform(Copy& copy, const Buffer& buffer) {
  Checksum sum;
  Checksum* const checksum = copy.is_checked ? &sum : nullptr;
  const Copy* written = copy.written.get();
  if (written != nullptr && (!written->is_done || written->failure != Failure::NONE)) written = nullptr;
  if (written == nullptr && !copy.is_outwards && copy.is_checked) return copy.fail(Failure::CHANGED);
  size_t number = 0;
  for (size_t start = 0; start < copy.size; start += buffer.size, ++number) {
    const size_t count = std::min(buffer.size, copy.size - start);
    char* const memory = copy.memory + start;
    Form form{0, 0, 0, count};
    if (copy.is_outwards) copy.forms.push_back(form = gathered(copy, memory, count, buffer.start, checksum));
    else if (written != nullptr && number < written->forms.size()) form = written->forms[number];
    const size_t padded = (form.stored_bytes + ALIGNMENT_BYTES - 1) / ALIGNMENT_BYTES * ALIGNMENT_BYTES;
    const off_t offset = copy.offset + static_cast<off_t>(start);
    if (!move_chunk(copy, buffer.start, padded, form.stored_bytes, offset)) return;
    if (!copy.is_outwards) spread_out(form, buffer.start, memory, count, checksum);
    copy.moved += form.stored_bytes;
  }
  copy.checksum = sum.value();
  if (!copy.is_outwards && copy.is_checked && written->checksum != copy.checksum) copy.fail(Failure::CHANGED);
}

// To wake a thread takes the one that trains longer than all else about a small copy. So after a copy the thread looks
// again by itself a few times, and is woken for what somebody waits for, for what is read back soon, and for what is large.
constexpr std::chrono::microseconds DOZE{200};
constexpr int DOZES = 10;  // without anything to do, after which it sleeps until it is woken
constexpr size_t LARGE_BYTES = size_t{1} << 20;

// What one thread copies, in order. A process that was forked has the queue, but not the thread.
class Queue {
 public:
  explicit Queue(size_t chunk_bytes) : process(getpid()), buffer_(chunk_bytes) {}
  ~Queue() {
    if (thread_.joinable()) thread_.detach();  // it ends by itself: nobody has waited for that
  }

  // Starts a thread that works on a queue. Signals are for the threads of the program.
  static std::shared_ptr<Queue> started(size_t chunk_bytes) {
    auto queue = std::make_shared<Queue>(chunk_bytes);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      queue->thread_ = std::thread([queue] { queue->serve(); });
    } catch (...) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(queue->thread_.native_handle(), "pooch-copy");
    return queue;
  }

  void add(std::shared_ptr<Copy> copy) {
    const bool is_urgent = !copy->is_outwards || copy->size >= LARGE_BYTES;
    std::lock_guard guard(lock_);
    copies_.push_back(std::move(copy));
    if (rest_ == Rest::SLEEPS || is_urgent) wake();
  }

  // Waits until a copy has ended, or for a while.
  bool wait(const Copy& copy, std::chrono::milliseconds patience) {
    std::unique_lock guard(lock_);
    wake();
    ++waiting_;
    const bool is_done = ended_.wait_for(guard, patience, [&] { return copy.is_done.load(std::memory_order_relaxed); });
    --waiting_;
    return is_done;
  }

  // Has the thread end once it has completed what was submitted.
  void stop() {
    std::lock_guard guard(lock_);
    is_stopping_ = true;
    wake();
  }

  // Waits until the thread has ended, or for a while.
  bool wait_for_end(std::chrono::milliseconds patience) {
    std::unique_lock guard(lock_);
    const bool is_over = ended_.wait_for(guard, patience, [&] { return is_over_; });
    if (is_over && thread_.joinable()) thread_.join();  // it needs the lock no more
    return is_over;
  }

  const pid_t process;

 private:
  enum class Rest { NONE, DOZES, SLEEPS };

  // The caller holds the lock.
  void wake() {
    if (std::exchange(rest_, Rest::NONE) != Rest::NONE) more_.notify_one();
  }

  void serve() {
    while (std::shared_ptr<Copy> copy = next()) {
      const auto begin = Clock::now();
      perform(*copy, buffer_);
      copy->seconds = seconds_since(begin);
      copy->written.reset();
      std::lock_guard guard(lock_);
      copy->is_done.store(true, std::memory_order_release);
      if (waiting_ != 0) ended_.notify_all();
    }
    std::lock_guard guard(lock_);
    is_over_ = true;
    ended_.notify_all();
  }

  // Returns the next copy, or nothing once the thread is to end.
  std::shared_ptr<Copy> next() {
    std::unique_lock guard(lock_);
    const auto has_more = [&] { return is_stopping_ || !copies_.empty(); };
    for (int count = 0; count < DOZES && !has_more(); ++count) {
      rest_ = Rest::DOZES;
      more_.wait_for(guard, DOZE);
    }
    while (!has_more()) {
      rest_ = Rest::SLEEPS;
      more_.wait(guard);
    }
    rest_ = Rest::NONE;
    if (copies_.empty()) return nullptr;
    auto copy = std::move(copies_.front());
    copies_.pop_front();
    return copy;
  }

  Buffer buffer_;
  std::mutex lock_;
  std::condition_variable more_, ended_;
  std::deque<std::shared_ptr<Copy>> copies_;
  Rest rest_ = Rest::NONE;
  int waiting_ = 0;
  bool is_stopping_ = false, is_over_ = false;
  std::thread thread_;  // holds the queue, so that one which was not stopped stays until the process ends
};

}  // namespace copier

// Threads that have a queue of the copier copy for them, as threads of Python do: built and run by `sanitized --threads`.
#include "thread.h"

#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

using copier::Copy;
using copier::Failure;
using copier::Queue;
using std::chrono::milliseconds;

constexpr size_t CHUNK_BYTES = 1 << 16, MOST_BYTES = 1 << 18;
constexpr int THREADS = 3, ROUNDS = 40, QUEUES = 6;

std::mutex interpreter;  // held as the interpreter's lock is: by whoever submits and looks, not by whoever waits

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

// What is sometimes all equal or a mask, which are packed, and sometimes neither.
std::vector<char> contents(std::mt19937& numbers) {
  std::vector<char> made(numbers() % MOST_BYTES + 1);
  const unsigned different = numbers() % 3 == 0 ? 256 : numbers() % 2 + 1;
  for (char& each : made) each = static_cast<char>(numbers() % different);
  return made;
}

std::shared_ptr<Copy> submitted(Queue& queue, std::vector<char>& memory, int file, off_t offset, bool is_outwards,
                                std::shared_ptr<const Copy> written) {
  auto copy = std::make_shared<Copy>();
  copy->memory = memory.data(), copy->size = memory.size();
  copy->descriptor = file, copy->offset = offset;
  copy->is_outwards = is_outwards, copy->is_checked = true, copy->packs = true;
  copy->written = std::move(written);
  copy->forms.reserve(memory.size() / CHUNK_BYTES + 1);
  queue.add(copy);
  return copy;
}

// Waits as `copier.cpp` does, which looks first and lets other threads run while it waits.
void wait_for(Queue& queue, const Copy& copy, std::unique_lock<std::mutex>& lock) {
  while (!copy.is_done.load(std::memory_order_acquire)) {
    lock.unlock();
    queue.wait(copy, milliseconds(5));
    lock.lock();
  }
}

void train(Queue& queue, int file, int number) {
  std::mt19937 numbers(number);
  const off_t offset = static_cast<off_t>(number) * 2 * MOST_BYTES;
  for (int round = 0; round < ROUNDS; ++round) {
    std::unique_lock lock(interpreter);
    auto memory = contents(numbers);
    std::vector<char> again(memory.size());
    auto out = submitted(queue, memory, file, offset, true, nullptr);
    if (numbers() % 2) wait_for(queue, *out, lock);
    auto in = submitted(queue, again, file, offset, false, out);
    if (numbers() % 2) out.reset();  // the copy in holds it as long as it needs it
    if (numbers() % 4 == 0) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(numbers() % 3000));  // the thread that copies falls asleep
      lock.lock();
    }
    wait_for(queue, *in, lock);
    check(in->failure == Failure::NONE && in->moved <= in->size && in->seconds >= 0, "a copy has failed");
    check(memory == again, "other bytes came back");
  }
}

void end(Queue& queue) {
  queue.stop();
  while (!queue.wait_for_end(milliseconds(5))) {
  }
}

}  // namespace

int main() {
  for (int round = 0; round < QUEUES; ++round) {
    std::FILE* const file = std::tmpfile();
    check(file != nullptr, "no file");
    const auto queue = Queue::started(CHUNK_BYTES);
    std::vector<std::thread> threads;
    for (int number = 0; number < THREADS; ++number) threads.emplace_back(train, std::ref(*queue), fileno(file), number);
    for (auto& each : threads) each.join();
    std::thread other(end, std::ref(*queue));  // two of them end it at the same time
    end(*queue);
    other.join();
    std::fclose(file);
  }
  std::puts("all copies gave what they were given");
  return 0;
}

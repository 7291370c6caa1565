// Tells the sessions of a thread (step_trace.h) of the functions that PyTorch runs there, while any thread has a session.
//
// It is a library of its own, since the header that it needs takes longer to compile than the allocator.

#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <new>

namespace {

using Enter = void (*)(const void* key, const char* name, int is_marker);
using Leave = void (*)(const void* key);

// Set once, before the first callback.
Enter enter_function = nullptr;
Leave leave_function = nullptr;

std::mutex mutex;
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;  // invalid where nothing is observed

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
  enter_function(&function, function.name(), 0);
  return nullptr;
}

void ended(const at::RecordFunction& function, at::ObserverContext*) {
  leave_function(&function);
}

}  // namespace

extern "C" {

// Observes until `pooch_observer_leave`; both may be called again. A callback of the process, as one of the thread could
// not be taken away in another, nor within a backward pass, after which the engine restores the thread's state.
void pooch_observer_use(Enter enter, Leave leave) {
  const std::lock_guard<std::mutex> guard(mutex);
  enter_function = enter;
  leave_function = leave;
  if (handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addGlobalCallback(at::RecordFunctionCallback(&begins, &ended));
  }
}

void pooch_observer_leave() {
  const std::lock_guard<std::mutex> guard(mutex);
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

// In a forked child, whose parent has the sessions.
void pooch_observer_begin_child() {
  if (handle != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
  new (&mutex) std::mutex;  // another thread of the parent may have held it
}

}  // extern "C"

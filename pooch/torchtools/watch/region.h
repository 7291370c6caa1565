// A region whose ops are watched, and where a step has come to in it.
#pragma once
#include "path.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/PyInterpreter.h>

#include <unordered_set>

namespace watch {

struct Kept;

// Of all keys below autograd and Python only this one has no kernels of its own and is no backend. It is in no tensor's
// keys, so nothing is paid outside of a region, which includes it for its thread.
constexpr auto KEY = c10::DispatchKey::Fake;

// Storages whose bytes are away while the program holds them. Other storages may have come to their addresses since.
class Away {
 public:
  bool is_empty() const { return count_.load(std::memory_order_acquire) == 0; }

  bool holds(const c10::StorageImpl* storage) {
    std::lock_guard guard(lock_);
    return storages_.contains(storage);
  }

  void note(const c10::StorageImpl* storage, bool is_away) {
    std::lock_guard guard(lock_);
    if (is_away) storages_.insert(storage);
    else storages_.erase(storage);
    count_.store(storages_.size(), std::memory_order_release);
  }

 private:
  std::mutex lock_;
  std::unordered_set<const c10::StorageImpl*> storages_;
  std::atomic<size_t> count_{0};
};

// What op threads read without the interpreter's lock. The region in Python and the threads that are in it own it.
struct State {
  std::shared_ptr<Path> path;
  std::shared_ptr<StorageMap> values;
  std::atomic<PyObject*> carrier{nullptr};  // what is called in Python, while the region is entered
  PyObject* region = nullptr;   // the region, meanwhile
  Away away;
  std::optional<c10::Stream> home;
  bool is_watchful = false;
  std::atomic<int64_t> position{0};
  std::atomic<bool> on_path{false}, needs_attention{false}, preserves{false}, is_silent{false}, is_reassigned{false},
      is_native{false};
  std::atomic<bool> is_busy{false};
  uint64_t serial = 0;
  std::vector<Kept*> kept;  // under the interpreter's lock
  uint64_t saves = 0;

  bool is_at_home() const {
    if (!home) return true;
    const c10::impl::VirtualGuardImpl device(home->device_type());
    return device.getStream(device.getDevice()) == *home;
  }
};

// In Python: `Region(path, values)`. Its attributes say where the step is; `enter` and `leave` begin and end watching.
struct RegionObject {
  PyObject_HEAD
  std::shared_ptr<State>* state;
};

// The regions that the calling thread is in. One that has ended elsewhere has no carrier any more.
inline std::vector<std::shared_ptr<State>>& regions_here() {
  thread_local std::vector<std::shared_ptr<State>> regions;
  return regions;
}

inline const std::string& shared_name() {
  static const std::string name = "pooch.watch";
  return name;
}

// Autograd's own threads take along which keys are included, and these objects, but no other thread-local state.
inline void share_with_workers(PyObject* region) {
  using Shared = at::impl::ThreadLocalPythonObjects;
  if (region == nullptr) {
    if (Shared::contains(shared_name())) Shared::erase(shared_name());
    return;
  }
  Py_INCREF(region);
  Shared::set(shared_name(), std::make_shared<c10::SafePyObject>(region, getPyInterpreter()));
}

inline std::shared_ptr<State> state_here() {
  auto& regions = regions_here();
  if (!regions.empty()) return regions.back();
  using Shared = at::impl::ThreadLocalPythonObjects;
  if (!Shared::contains(shared_name())) return nullptr;
  const auto& shared = Shared::get(shared_name());
  if (!shared) return nullptr;
  return *reinterpret_cast<RegionObject*>(shared->ptr(getPyInterpreter()))->state;
}

inline RegionObject* region_of(PyObject* self) {
  return reinterpret_cast<RegionObject*>(self);
}

inline State& state_of(PyObject* self) {
  return **region_of(self)->state;
}

inline PyObject* region_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *path, *values;
  if (!PyArg_ParseTuple(arguments, "OO!", &path, storage_map_type(), &values)) return nullptr;
  static std::atomic<uint64_t> serials{0};
  auto state = std::make_shared<State>();
  if (path != Py_None) {
    if (Py_TYPE(path) != path_type()) return PyErr_Format(PyExc_TypeError, "a region takes a Path or None");
    state->path = *reinterpret_cast<PathObject*>(path)->path;
    state->on_path = true;
  }
  state->values = map_of(values);
  state->serial = ++serials;
  auto* self = region_of(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->state = new std::shared_ptr<State>(std::move(state));
  return reinterpret_cast<PyObject*>(self);
}

inline void region_end(PyObject* self);

inline void region_dealloc(PyObject* self) {
  region_end(self);
  delete region_of(self)->state;
  Py_TYPE(self)->tp_free(self);
}

// Watch no longer, in whatever thread: what is still on another thread's stack finds no carrier.
inline void region_end(PyObject* self) {
  State& state = state_of(self);
  state.region = nullptr;
  Reference carrier(state.carrier.exchange(nullptr));
}

inline PyObject* region_enter(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject* carrier;
  int is_watchful = 0;
  const char* device_type = "";
  if (!PyArg_ParseTuple(arguments, "Ops", &carrier, &is_watchful, &device_type)) return nullptr;
  State& state = state_of(self);
  if (*device_type != '\0') {
    const c10::impl::VirtualGuardImpl device(c10::Device(device_type).type());
    state.home = device.getStream(device.getDevice());
  }
  Py_INCREF(carrier);
  Reference before(state.carrier.exchange(carrier));
  state.region = self;
  state.is_native = true;
  state.is_watchful = is_watchful != 0;
  regions_here().push_back(*region_of(self)->state);
  share_with_workers(self);
  c10::impl::tls_set_dispatch_key_included(KEY, true);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Leave wherever the region lies among those of the calling thread. May be repeated.
inline PyObject* region_leave(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto& regions = regions_here();
  const auto& mine = *region_of(self)->state;
  const auto found = std::find(regions.begin(), regions.end(), mine);
  if (found != regions.end()) {
    regions.erase(found);
    share_with_workers(regions.empty() ? nullptr : regions.back()->region);
    c10::impl::tls_set_dispatch_key_included(KEY, !regions.empty());
  }
  region_end(self);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <std::atomic<bool> State::*Flag>
PyObject* get_flag(PyObject* self, void*) {
  return PyBool_FromLong((state_of(self).*Flag).load());
}

template <std::atomic<bool> State::*Flag>
int set_flag(PyObject* self, PyObject* value, void*) {
  const int is_true = value == nullptr ? -1 : PyObject_IsTrue(value);
  if (is_true < 0) return -1;
  (state_of(self).*Flag).store(is_true != 0);
  return 0;
}

inline PyObject* get_position(PyObject* self, void*) {
  return PyLong_FromLongLong(state_of(self).position.load());
}

inline int set_position(PyObject* self, PyObject* value, void*) {
  const int64_t position = PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return -1;
  state_of(self).position.store(position);
  return 0;
}

inline PyObject* region_note_away(PyObject* self, PyObject* arguments) {
  PyObject* key;
  int is_away;
  if (!PyArg_ParseTuple(arguments, "Op", &key, &is_away)) return nullptr;
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  state_of(self).away.note(storage, is_away != 0);
  Py_RETURN_NONE;
}

PyObject* region_take_kept(PyObject* self, PyObject*);

inline PyTypeObject* region_type() {
  static PyMethodDef methods[] = {
      {"enter", region_enter, METH_VARARGS, nullptr},
      {"leave", region_leave, METH_NOARGS, nullptr},
      {"note_away", region_note_away, METH_VARARGS, nullptr},
      {"take_kept", region_take_kept, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"position", get_position, set_position, nullptr, nullptr},
      {"on_path", get_flag<&State::on_path>, set_flag<&State::on_path>, nullptr, nullptr},
      {"needs_attention", get_flag<&State::needs_attention>, set_flag<&State::needs_attention>, nullptr, nullptr},
      {"preserves", get_flag<&State::preserves>, set_flag<&State::preserves>, nullptr, nullptr},
      {"is_silent", get_flag<&State::is_silent>, set_flag<&State::is_silent>, nullptr, nullptr},
      {"is_native", get_flag<&State::is_native>, nullptr, nullptr, nullptr},
      {"is_reassigned", get_flag<&State::is_reassigned>, set_flag<&State::is_reassigned>, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(region_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(region_dealloc)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Region", sizeof(RegionObject), 0, Py_TPFLAGS_DEFAULT, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

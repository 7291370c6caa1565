// A region whose ops are watched, and where a step has come to in it.
#pragma once
#include "holding.h"
#include "path.h"
#include "recipe.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/PyInterpreter.h>

#include <thread>
#include <unordered_set>

namespace watch {

struct Kept;
struct Moves;

// Storages that something is known of. Other storages may have come to their addresses since.
class StorageSet {
 public:
  bool is_empty() const { return count_.load(std::memory_order_acquire) == 0; }

  bool holds(const c10::StorageImpl* storage) {
    std::lock_guard guard(lock_);
    return storages_.contains(storage);
  }

  void note(const c10::StorageImpl* storage, bool is_in) {
    std::lock_guard guard(lock_);
    if (is_in) storages_.insert(storage);
    else storages_.erase(storage);
    count_.store(storages_.size(), std::memory_order_release);
  }

 private:
  std::mutex lock_;
  std::unordered_set<const c10::StorageImpl*> storages_;
  std::atomic<size_t> count_{0};
};

// Values that were written over, and that autograd keeps.
class WrittenOver {
 public:
  void add(int64_t number) {
    std::lock_guard guard(lock_);
    numbers_.insert(number);
  }

  bool has(int64_t number) {
    std::lock_guard guard(lock_);
    return numbers_.contains(number);
  }

 private:
  std::mutex lock_;
  std::unordered_set<int64_t> numbers_;
};

// Storages that leave as soon as nothing but the step holds them.
class Awaited {
 public:
  void set(std::vector<Weak> storages) {
    std::lock_guard guard(lock_);
    storages_.swap(storages);
    count_.store(storages_.size(), std::memory_order_release);
  }

  bool has_any() const { return count_.load(std::memory_order_acquire) != 0; }

  bool is_any_released() {
    if (!has_any()) return false;
    std::lock_guard guard(lock_);
    return std::any_of(storages_.begin(), storages_.end(), [](const Weak& each) { return each.use_count() <= 1; });
  }

 private:
  std::mutex lock_;
  std::vector<Weak> storages_;
  std::atomic<size_t> count_{0};
};

// Calls that were recorded, by their positions on the path: those that Python has not taken yet, and all of them.
class Recorded {
 public:
  using Calls = std::vector<std::pair<int64_t, std::shared_ptr<Recipe>>>;

  void add(int64_t position, std::shared_ptr<Recipe> recipe) {
    std::lock_guard guard(lock_);
    by_position_[position] = recipe;
    calls_.emplace_back(position, std::move(recipe));
  }

  // Python records the op that is next at a position.
  void leave_to_python(int64_t position) {
    std::lock_guard guard(lock_);
    by_position_.erase(position);
  }

  // Some of them do not give what they gave any more, and Python knows which.
  void give_up() {
    std::lock_guard guard(lock_);
    has_given_up_ = true;
    by_position_.clear();
  }

  std::shared_ptr<const Recipe> of(int64_t position) {
    std::lock_guard guard(lock_);
    const auto found = by_position_.find(position);
    return has_given_up_ || found == by_position_.end() ? nullptr : found->second;
  }

  Calls take() {
    std::lock_guard guard(lock_);
    return std::exchange(calls_, {});
  }

 private:
  std::mutex lock_;
  Calls calls_;
  ska::flat_hash_map<int64_t, std::shared_ptr<Recipe>> by_position_;
  bool has_given_up_ = false;
};

// A call of a step without a plan.
struct UnplannedCall {
  std::shared_ptr<Recipe> recipe;
  std::vector<int64_t> writes;
  uint64_t number;  // of its recipe: the same in all steps that do the same
  double time_ms;
};

// Those that Python has not taken yet.
class Unplanned {
 public:
  void add(UnplannedCall call) {
    std::lock_guard guard(lock_);
    calls_.push_back(std::move(call));
  }

  std::vector<UnplannedCall> take() {
    std::lock_guard guard(lock_);
    return std::exchange(calls_, {});
  }

 private:
  std::mutex lock_;
  std::vector<UnplannedCall> calls_;
};

// What makes a value again: the number of a recipe, and the place of the value among what that makes.
struct Source {
  uint64_t recipe;
  size_t place;
};

class Sources {
 public:
  void add(int64_t value, Source source) {
    std::lock_guard guard(lock_);
    sources_[value] = source;
  }

  void forget(int64_t value) {
    std::lock_guard guard(lock_);
    sources_.erase(value);
  }

  std::optional<Source> of(int64_t value) {
    std::lock_guard guard(lock_);
    const auto found = sources_.find(value);
    return found == sources_.end() ? std::nullopt : std::optional<Source>(found->second);
  }

 private:
  std::mutex lock_;
  ska::flat_hash_map<int64_t, Source> sources_;
};

constexpr int64_t FIRST_NUMBER = int64_t{1} << 40;  // a plan numbers its own values from 0

// What op threads read without the interpreter's lock. The region in Python and the threads that are in it own it.
struct State {
  std::shared_ptr<Path> path;
  std::shared_ptr<StorageMap> values;
  std::atomic<PyObject*> carrier{nullptr};  // what is called in Python, while the region is entered
  PyObject* region = nullptr;   // the region, meanwhile
  StorageSet away;             // whose bytes are away while the program holds them
  StorageSet read_in_python;   // that calls which Python has recorded have read
  Awaited awaited;
  // What replays will read, and what is to be copied out once its time has come.
  std::shared_ptr<Holding> sources = std::make_shared<Holding>(), made = std::make_shared<Holding>();
  WrittenOver written_over;
  Readers readers;
  std::optional<c10::Stream> home;
  bool is_watchful = false;
  std::atomic<int64_t> position{0};
  std::atomic<bool> on_path{false}, needs_attention{false}, is_silent{false}, is_recorded{false}, is_reassigned{false},
      is_native{false};
  std::atomic<bool> is_busy{false};
  uint64_t serial = 0;
  std::vector<Kept*> kept;  // under the interpreter's lock
  Moves* moves = nullptr;   // those of the step, as long as it is hooked, under the same lock
  uint64_t saves = 0, packs = 0;
  size_t least_taken_bytes = 0;  // what is smaller stays here when Python takes the others
  // Of a step without a plan.
  Unplanned unplanned;
  Sources made_here;
  StorageSet handed_out;  // whose address the program has
  std::atomic<int64_t> next_number{FIRST_NUMBER}, recording_ns{0};
  std::atomic<uint64_t> ops{0};  // which came one after the other
  std::thread::id thread;        // of these; those of others come in no order
  uint64_t first_node = 0, places = 0;
  double stall_ms = 0;
  std::atomic<bool> records{false}, keeps{false}, binds{false}, has_overlapped{false}, holds_in_python{false};
  std::atomic<bool> only_notes{false};  // these, and has nothing to do with them
  std::atomic<bool> is_ordered{true};  // whether all ops came in one thread
  std::atomic<bool> has_taken{false};  // whether Python has taken any of these, so that it may have let them leave
  Recorded recorded;

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
    if (Shared::contains(shared_name())) Shared::set(shared_name(), nullptr);  // PyTorch 2.12 cannot erase
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
  state.only_notes = false;
  Reference carrier(state.carrier.exchange(nullptr));
}

inline void push(PyObject* self, State& state) {
  state.region = self;
  state.thread = std::this_thread::get_id();
  regions_here().push_back(*region_of(self)->state);
  share_with_workers(self);
  c10::impl::tls_set_dispatch_key_included(KEY, true);
}

// Take in which ops run from here on, and do nothing else about them.
inline PyObject* region_note_ops(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  State& state = state_of(self);
  state.only_notes = true;
  push(self, state);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
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
  state.is_native = true;
  state.is_watchful = is_watchful != 0;
  push(self, state);
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

// Returns the positions and the calls of ops that were recorded since this was last asked.
inline PyObject* region_take_calls(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto calls = state_of(self).recorded.take();
  Reference list = checked(PyList_New(static_cast<Py_ssize_t>(calls.size())));
  for (size_t index = 0; index < calls.size(); ++index) {
    Reference position = checked(PyLong_FromLongLong(calls[index].first)), call = to_python(std::move(calls[index].second));
    PyList_SET_ITEM(list.get(), index, checked(PyTuple_Pack(2, position.get(), call.get())).release());
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

inline PyObject* region_is_written_over(PyObject* self, PyObject* value) {
  const int64_t number = PyLong_AsLongLong(value);
  if (PyErr_Occurred()) return nullptr;
  return PyBool_FromLong(state_of(self).written_over.has(number));
}

template <std::shared_ptr<Holding> State::*Held>
PyObject* get_holding(PyObject* self, void*) {
  return to_python(state_of(self).*Held);
}

// Has the next op that runs after one of these storages was released be passed to Python.
inline PyObject* region_wait_for(PyObject* self, PyObject* keys) {
  Reference items(PySequence_Fast(keys, "storages are given as a sequence of keys"));
  if (!items) return nullptr;
  std::vector<Weak> storages;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index) {
    c10::StorageImpl* address = address_in(PySequence_Fast_GET_ITEM(items.get(), index));
    if (PyErr_Occurred()) return nullptr;
    storages.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(address));
  }
  state_of(self).awaited.set(std::move(storages));
  Py_RETURN_NONE;
}

inline PyObject* region_note_read(PyObject* self, PyObject* key) {
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  state_of(self).read_in_python.note(storage, true);
  Py_RETURN_NONE;
}

// Copies a storage that an op is about to change, for the calls that have read it.
inline PyObject* region_preserve(PyObject* self, PyObject* key) {
  HANDLE_TH_ERRORS
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  state_of(self).readers.preserve(storage);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* region_take_unplanned(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  auto calls = state_of(self).unplanned.take();
  Reference list = checked(PyList_New(static_cast<Py_ssize_t>(calls.size())));
  for (size_t index = 0; index < calls.size(); ++index) {
    UnplannedCall& each = calls[index];
    Reference writes = checked(PyTuple_New(static_cast<Py_ssize_t>(each.writes.size())));
    for (size_t place = 0; place < each.writes.size(); ++place)
      PyTuple_SET_ITEM(writes.get(), place, checked(PyLong_FromLongLong(each.writes[place])).release());
    Reference call = to_python(std::move(each.recipe)), time_ms = checked(PyFloat_FromDouble(each.time_ms));
    Reference number = checked(PyLong_FromLongLong(static_cast<int64_t>(each.number)));
    PyList_SET_ITEM(list.get(), index,
                    checked(PyTuple_Pack(4, call.get(), writes.get(), time_ms.get(), number.get())).release());
  }
  return list.release();
  END_HANDLE_TH_ERRORS
}

// Have ops be recorded and saved tensors be kept natively, in a step without a plan.
inline PyObject* region_go_unplanned(PyObject* self, PyObject* arguments) {
  int records, binds;
  unsigned long long first_node, places;
  if (!PyArg_ParseTuple(arguments, "ppKK", &records, &binds, &first_node, &places)) return nullptr;
  State& state = state_of(self);
  state.records = records != 0, state.binds = binds != 0, state.keeps = true;
  state.first_node = first_node, state.places = places;
  Py_RETURN_NONE;
}

// Have ops be recorded natively from here on, in a step that has left its plan. What autograd saves goes on to Python, which
// has to hear of writes over it.
inline PyObject* region_record_on(PyObject* self, PyObject* arguments) {
  unsigned long long first_node, places;
  if (!PyArg_ParseTuple(arguments, "KK", &first_node, &places)) return nullptr;
  State& state = state_of(self);
  state.first_node = first_node, state.places = places;
  state.holds_in_python = true, state.records = true;
  Py_RETURN_NONE;
}

// Returns the position of the next save among all that are numbered, here and in Python.
inline PyObject* region_next_save(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(++state_of(self).saves);
}

inline PyObject* region_next_number(PyObject* self, PyObject*) {
  return PyLong_FromLongLong(state_of(self).next_number++);
}

// Note what Python has recorded: the values that a call made, and the number of its recipe.
inline PyObject* region_note_call(PyObject* self, PyObject* arguments) {
  PyObject* writes;
  long long number;
  std::vector<int64_t> numbers;
  if (!PyArg_ParseTuple(arguments, "OL", &writes, &number) || !numbers_in(writes, numbers)) return nullptr;
  for (size_t place = 0; place < numbers.size(); ++place)
    state_of(self).made_here.add(numbers[place], {static_cast<uint64_t>(number), place});
  Py_RETURN_NONE;
}

inline PyObject* region_forget(PyObject* self, PyObject* values) {
  std::vector<int64_t> numbers;
  if (!numbers_in(values, numbers)) return nullptr;
  for (const int64_t number : numbers) state_of(self).made_here.forget(number);
  state_of(self).recorded.give_up();
  Py_RETURN_NONE;
}

// Returns the first values that calls have made which read a storage that is about to change.
inline PyObject* region_outdated(PyObject* self, PyObject* key) {
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  const auto made = state_of(self).readers.take(storage);
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(made.size()));
  for (size_t index = 0; list != nullptr && index < made.size(); ++index)
    PyList_SET_ITEM(list, index, PyLong_FromLongLong(made[index]));
  return list;
}

inline PyObject* region_note_handed_out(PyObject* self, PyObject* key) {
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  state_of(self).handed_out.note(storage, true);
  Py_RETURN_NONE;
}

inline PyObject* get_has_readers(PyObject* self, void*) {
  return PyBool_FromLong(!state_of(self).readers.is_empty());
}

inline PyObject* get_has_kept(PyObject* self, void*) {
  return PyBool_FromLong(!state_of(self).kept.empty());
}

inline PyObject* get_ops(PyObject* self, void*) {
  const State& state = state_of(self);
  return PyLong_FromUnsignedLongLong(state.is_ordered ? state.ops.load() : 0);
}

inline PyObject* region_take_recording_ms(PyObject* self, PyObject*) {
  return PyFloat_FromDouble(static_cast<double>(state_of(self).recording_ns.exchange(0)) / 1e6);
}

PyObject* region_take_kept(PyObject* self, PyObject* least);

inline PyTypeObject* region_type() {
  static PyMethodDef methods[] = {
      {"enter", region_enter, METH_VARARGS, nullptr},
      {"leave", region_leave, METH_NOARGS, nullptr},
      {"note_away", region_note_away, METH_VARARGS, nullptr},
      {"take_kept", region_take_kept, METH_O, nullptr},
      {"note_ops", region_note_ops, METH_NOARGS, nullptr},
      {"take_recording_ms", region_take_recording_ms, METH_NOARGS, nullptr},
      {"take_unplanned", region_take_unplanned, METH_NOARGS, nullptr},
      {"go_unplanned", region_go_unplanned, METH_VARARGS, nullptr},
      {"record_on", region_record_on, METH_VARARGS, nullptr},
      {"next_number", region_next_number, METH_NOARGS, nullptr},
      {"next_save", region_next_save, METH_NOARGS, nullptr},
      {"note_call", region_note_call, METH_VARARGS, nullptr},
      {"forget", region_forget, METH_O, nullptr},
      {"outdated", region_outdated, METH_O, nullptr},
      {"note_handed_out", region_note_handed_out, METH_O, nullptr},
      {"take_calls", region_take_calls, METH_NOARGS, nullptr},
      {"preserve", region_preserve, METH_O, nullptr},
      {"note_read", region_note_read, METH_O, nullptr},
      {"wait_for", region_wait_for, METH_O, nullptr},
      {"is_written_over", region_is_written_over, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"position", get_position, set_position, nullptr, nullptr},
      {"has_readers", get_has_readers, nullptr, nullptr, nullptr},
      {"has_kept", get_has_kept, nullptr, nullptr, nullptr},
      {"ops", get_ops, nullptr, nullptr, nullptr},
      {"sources", get_holding<&State::sources>, nullptr, nullptr, nullptr},
      {"made", get_holding<&State::made>, nullptr, nullptr, nullptr},
      {"on_path", get_flag<&State::on_path>, set_flag<&State::on_path>, nullptr, nullptr},
      {"needs_attention", get_flag<&State::needs_attention>, set_flag<&State::needs_attention>, nullptr, nullptr},
      {"is_recorded", get_flag<&State::is_recorded>, nullptr, nullptr, nullptr},
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

// Notes what an op is about to write over, and returns whether those are values of the step alone, so that it can run
// again on copies of them. Python is told where it may have to act.
inline bool note_written(State& state, const Operator& facts, const Arguments& arguments) {
  bool can_repeat = true;
  each_marked(facts.written, arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto number = state.values->get(storage_of(tensor).unsafeGetStorageImpl());
    can_repeat = can_repeat && number && *number >= 0;
    if (!number || *number < 0) return;
    const bool is_minded = state.path && state.path->minds(*number);
    if (!(state.has_taken || state.holds_in_python || is_minded)) return state.written_over.add(*number);
    Gil gil;
    static PyObject* const name = interned("written_over");
    if (state.carrier == nullptr) return;
    Reference carrier = Reference::to(state.carrier), wrapped = checked(THPVariable_Wrap(tensor));
    call(carrier.get(), name, wrapped.get());
  });
  return can_repeat;
}

}  // namespace watch

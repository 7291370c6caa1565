// Saved tensor hooks: what autograd holds in place of a tensor that a plan keeps, and what passes all others to Python.
#pragma once
#include "handle.h"
#include "region.h"

#include <structmember.h>

#include <chrono>

namespace watch {

// In Python: `KeptTensor`, with what `executor.records.KeptTensor` has.
struct Kept {
  PyObject_HEAD
  at::Tensor tensor;  // without its history; undefined once it has a handle
  std::shared_ptr<State> state;
  int64_t number;
  int64_t version;
  uint64_t serial;
  size_t place;  // among those that may leave, or `NOWHERE`
  Identity identity;
  bool is_numbered;
  PyObject* handle;
  PyObject* weak_references;
};

constexpr size_t NOWHERE = ~size_t{0};

inline Kept* kept_of(PyObject* self) {
  return reinterpret_cast<Kept*>(self);
}

// Whether what a tensor lies on has fewer bytes. What is given up has none.
inline bool is_smaller(const at::Tensor& tensor, size_t bytes) {
  return bytes != 0 && (!tensor.defined() || storage_of(tensor).nbytes() < bytes);
}

inline void unlist(Kept* kept) {
  if (kept->place == NOWHERE) return;
  auto& listed = kept->state->kept;
  listed[kept->place] = listed.back();
  listed[kept->place]->place = kept->place;
  listed.pop_back();
  kept->place = NOWHERE;
}

inline void kept_dealloc(PyObject* self) {
  Kept* kept = kept_of(self);
  if (kept->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  unlist(kept);
  kept->state.~shared_ptr();
  const at::Tensor tensor = std::move(kept->tensor);
  kept->tensor.~Tensor();
  Py_XDECREF(std::exchange(kept->handle, nullptr));
  Py_TYPE(self)->tp_free(self);
}

inline PyObject* kept_get_tensor(PyObject* self, void*) {
  if (!kept_of(self)->tensor.defined()) Py_RETURN_NONE;
  return THPVariable_Wrap(kept_of(self)->tensor);
}

inline int kept_set_tensor(PyObject* self, PyObject* value, void*) {
  if (value != Py_None) return PyErr_SetString(PyExc_TypeError, "a kept tensor can only be given up"), -1;
  const at::Tensor given_up = std::exchange(kept_of(self)->tensor, at::Tensor());
  return 0;
}

inline PyObject* kept_get_number(PyObject* self, void*) {
  if (!kept_of(self)->is_numbered) Py_RETURN_NONE;
  return PyLong_FromLongLong(kept_of(self)->number);
}

inline PyObject* kept_get_serial(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(kept_of(self)->serial);
}

inline PyObject* kept_get_version(PyObject* self, void*) {
  return PyLong_FromLongLong(kept_of(self)->version);
}

inline PyObject* kept_get_identity(PyObject* self, void*) {
  return kept_of(self)->identity.to_python();
}

inline PyObject* kept_get_handle(PyObject* self, void*) {
  PyObject* handle = kept_of(self)->handle;
  return Py_NewRef(handle == nullptr ? Py_None : handle);
}

inline int kept_set_handle(PyObject* self, PyObject* value, void*) {
  Py_XINCREF(value);
  Py_XDECREF(std::exchange(kept_of(self)->handle, value));
  return 0;
}

inline PyTypeObject* kept_type() {
  static PyGetSetDef attributes[] = {
      {"tensor", kept_get_tensor, kept_set_tensor, nullptr, nullptr},
      {"number", kept_get_number, nullptr, nullptr, nullptr},
      {"version", kept_get_version, nullptr, nullptr, nullptr},
      {"serial", kept_get_serial, nullptr, nullptr, nullptr},
      {"identity", kept_get_identity, nullptr, nullptr, nullptr},
      {"handle", kept_get_handle, kept_set_handle, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMemberDef members[] = {
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Kept, weak_references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(kept_dealloc)},
      {Py_tp_getset, attributes},
      {Py_tp_members, members},
      {0, nullptr}};
  static PyType_Spec spec{"watch.KeptTensor", sizeof(Kept), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// Returns those on at least so many bytes that may leave, in the order in which they were saved, and lists them no longer.
inline PyObject* region_take_kept(PyObject* self, PyObject* least) {
  const auto least_bytes = PyLong_AsSize_t(least);
  if (PyErr_Occurred()) return nullptr;
  auto& state = state_of(self);
  const auto stays = [&](const Kept* kept) { return is_smaller(kept->tensor, least_bytes); };
  auto& listed = state.kept;
  const auto first = std::partition(listed.begin(), listed.end(), stays);
  std::sort(first, listed.end(), [](const Kept* a, const Kept* b) { return a->serial < b->serial; });
  std::vector<Reference> taken;  // held before the list is made: that may collect garbage, and they may be a part of it
  taken.reserve(listed.end() - first);
  for (auto each = first; each != listed.end(); ++each) {
    (*each)->place = NOWHERE;
    taken.push_back(Reference::to(reinterpret_cast<PyObject*>(*each)));
  }
  listed.erase(first, listed.end());
  for (size_t place = 0; place < listed.size(); ++place) listed[place]->place = place;
  if (!taken.empty()) state.has_taken = true, state.least_taken_bytes = least_bytes;
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(taken.size()));
  for (size_t index = 0; list != nullptr && index < taken.size(); ++index)
    PyList_SET_ITEM(list, index, taken[index].release());
  return list;
}

// In Python: `Hooks(hooks, step, region, stats, begin_s, moves, reads=None)`. Autograd holds it, and with it the step. `hooks` is
// called with what is not done here.
struct Hooks {
  PyObject_HEAD
  std::shared_ptr<State>* state;
  PyObject *hooks, *step, *stats;
  double begin_s;
  Moves* moves;  // null: Python moves all values
  Reads* reads;  // null: Python reads all that may leave
};

inline Hooks* hooks_of(PyObject* self) {
  return reinterpret_cast<Hooks*>(self);
}

inline PyObject* hooks_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *hooks, *step, *region, *stats, *moves, *reads = Py_None;
  double begin_s;
  if (!PyArg_ParseTuple(arguments, "OOO!OdO|O", &hooks, &step, region_type(), &region, &stats, &begin_s, &moves, &reads))
    return nullptr;
  if (reads != Py_None && Py_TYPE(reads) != reads_type()) return PyErr_Format(PyExc_TypeError, "hooks take Reads or None");
  if (moves != Py_None && Py_TYPE(moves) != moves_type()) return PyErr_Format(PyExc_TypeError, "hooks take Moves or None");
  Hooks* self = hooks_of(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->state = new std::shared_ptr<State>(*region_of(region)->state);
  self->hooks = Py_NewRef(hooks), self->step = Py_NewRef(step), self->stats = Py_NewRef(stats), self->begin_s = begin_s;
  self->moves = moves == Py_None ? nullptr : moves_of(Py_NewRef(moves));
  self->reads = reads == Py_None ? nullptr : reads_of(Py_NewRef(reads));
  (*self->state)->moves = self->moves;
  return reinterpret_cast<PyObject*>(self);
}

inline int hooks_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(hooks_of(self)->hooks);
  Py_VISIT(hooks_of(self)->step);
  Py_VISIT(hooks_of(self)->stats);
  Py_VISIT(hooks_of(self)->moves);
  Py_VISIT(hooks_of(self)->reads);
  return 0;
}

inline int hooks_clear(PyObject* self) {
  Py_CLEAR(hooks_of(self)->hooks);
  Py_CLEAR(hooks_of(self)->step);
  Py_CLEAR(hooks_of(self)->stats);
  (*hooks_of(self)->state)->moves = nullptr;
  Py_CLEAR(hooks_of(self)->moves);
  Py_CLEAR(hooks_of(self)->reads);
  return 0;
}

inline void hooks_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  hooks_clear(self);
  delete hooks_of(self)->state;
  Py_TYPE(self)->tp_free(self);
}

constexpr uint64_t SAVES_BETWEEN_LOOKS = 32;  // at whether room runs out

// Whether a tensor of unknown origin can leave once nothing else holds its storage, as `tensors.can_be_dropped` has it.
inline bool can_be_dropped(const at::Tensor& tensor) {
  return !(tensor.is_leaf() && tensor.requires_grad()) && storage_of(tensor).resizable();
}

// Returns the handle on a value that simply moves; null, without an error, where Python is to make it.
inline PyObject* packed_to_move(Hooks* hooks, int64_t number, PyObject* object) {
  Moves& moves = *hooks->moves;
  PyObject* const value = value_at(moves, number);
  if (value == nullptr) return nullptr;
  Handle* handle = nullptr;
  const Outcome outcome = under_lock(moves, [&] {
    const Outcome held = hold(moves, value, number, THPVariable_Unpack(object));
    if (held != Outcome::DONE) return held;
    handle = handle_on_value(handle_type(), hooks->step, value, object, moves.part(END));
    if (handle == nullptr) return Outcome::FAILED;
    handle->moves = moves_of(Py_NewRef(reinterpret_cast<PyObject*>(hooks->moves))), handle->number = number;
    return Outcome::DONE;
  });
  if (outcome == Outcome::FAILED) Py_CLEAR(handle);
  return reinterpret_cast<PyObject*>(handle);
}

// Sets the time of the last read of a step.
inline bool has_noted_read(const Hooks* hooks) {
  static PyObject* const step_ms = interned("host_step_ms");
  const double now_s = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  Reference elapsed_ms(PyFloat_FromDouble((now_s - hooks->begin_s) * 1000));
  return elapsed_ms && PyObject_SetAttr(hooks->stats, step_ms, elapsed_ms.get()) == 0;
}

// Tells which thread reads.
inline bool has_told_thread(const Work& work) {
  static PyObject* const thread = interned("thread");
  Reference here(PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
  return here && PyObject_SetAttr(work.part(OWNER), thread, here.get()) == 0;
}

// Returns the number of the value of a handle. -1 with an error.
inline int64_t number_of(const Handle* handle) {
  static PyObject* const name = interned("number");
  if (handle->moves != nullptr) return handle->number;
  Reference number(PyObject_GetAttr(handle->value, name));
  return number ? PyLong_AsLongLong(number.get()) : -1;
}

// Returns the tensor of a handle, once all is done that is due before; null, without an error, where Python is to read it. On
// its path a step has handles on values that the plan moves, and no others.
inline PyObject* read_handle(const Hooks* hooks, const Handle* handle) {
  Moves& moves = *hooks->moves;
  const int64_t number = number_of(handle);
  if (PyErr_Occurred() || handle->is_changed() || !has_told_thread(moves)) return nullptr;
  c10::Storage storage;
  const Outcome outcome = under_lock(moves, [&] {
    const Outcome acted = act_before_read(moves, number);
    return acted == Outcome::DONE ? read(moves, handle->value, storage) : acted;
  });
  if (outcome != Outcome::DONE || !has_noted_read(hooks)) return nullptr;
  return THPVariable_Wrap(handle->geometry.on(std::move(storage)));
}

// Returns the handle in what autograd holds, which may have been given one later. Null: there is none.
inline const Handle* handle_in(PyObject* packed) {
  if (Py_TYPE(packed) == kept_type() && !kept_of(packed)->tensor.defined()) packed = kept_of(packed)->handle;
  return packed != nullptr && Py_TYPE(packed) == handle_type() ? handle_of(packed) : nullptr;
}

// Returns the tensor of a handle on a value that no plan moves; null, without an error, where Python is to read it.
inline PyObject* read_unplanned(const Hooks* hooks, const Handle* handle) {
  const Reads& reads = *hooks->reads;
  if (handle->is_changed() || !has_told_thread(reads)) return nullptr;
  c10::Storage storage;
  const Outcome outcome = under_lock(reads, [&] { return read_here(reads, handle->value, handle->number, storage); });
  if (outcome != Outcome::DONE || !has_noted_read(hooks)) return nullptr;
  return THPVariable_Wrap(handle->geometry.on(std::move(storage)));
}

inline PyObject* hooks_pack(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  static PyObject *const pack = interned("pack"), *const look = interned("look_ahead");
  Hooks* hooks = hooks_of(self);
  const auto& state = *hooks->state;
  const auto in_python = [&] {
    if (state->keeps) state->holds_in_python = true;
    return PyObject_CallMethodOneArg(hooks->hooks, pack, object);
  };
  if (!(state->on_path || state->keeps) || !THPVariable_CheckExact(object)) return in_python();
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!is_ordinary(tensor) || tensor.is_inference()) return in_python();
  const bool keeps = state->keeps && (!state->has_taken || is_smaller(tensor, state->least_taken_bytes));
  if (!(state->on_path || keeps)) return in_python();
  auto number = state->values->get(storage_of(tensor).unsafeGetStorageImpl());
  if (state->on_path && number && Path::holds(state->path->moved, *number)) {
    if (hooks->moves == nullptr || !is_simply_moved(*state->path, *number)) return in_python();
    PyObject* handle = packed_to_move(hooks, *number, object);
    return handle != nullptr || PyErr_Occurred() ? handle : in_python();
  }
  if (keeps && !state->has_taken && ++state->packs % SAVES_BETWEEN_LOOKS == 0) {
    Reference none(PyObject_CallMethodNoArgs(hooks->step, look));
    if (!none) return nullptr;
  }
  if (keeps && !number && state->binds && !is_marked(tensor) && can_be_dropped(tensor)) {
    number = state->next_number++;
    state->values->bind(storage_of(tensor), *number);
  }
  at::Tensor without_history = detached(tensor, tensor.grad_fn() != nullptr);
  Kept* kept = kept_of(kept_type()->tp_alloc(kept_type(), 0));
  if (kept == nullptr) return nullptr;
  new (&kept->tensor) at::Tensor(std::move(without_history));
  new (&kept->state) std::shared_ptr<State>(state);
  kept->place = NOWHERE;
  kept->version = tensor._version();
  kept->is_numbered = number.has_value();
  kept->number = number.value_or(-1);
  kept->identity = Identity::of(object, tensor);
  if (kept->number >= 0) {
    kept->serial = ++state->saves;
    kept->place = state->kept.size();
    state->kept.push_back(kept);
  }
  return reinterpret_cast<PyObject*>(kept);
  END_HANDLE_TH_ERRORS
}

inline PyObject* hooks_unpack(PyObject* self, PyObject* packed) {
  HANDLE_TH_ERRORS
  static PyObject *const unpack = interned("unpack"), *const begin = interned("begin_reads");
  thread_local uint64_t asked_for = 0;  // the step for which this thread asks for room
  Hooks* hooks = hooks_of(self);
  const auto& state = *hooks->state;
  const auto in_python = [&] { return PyObject_CallMethodOneArg(hooks->hooks, unpack, packed); };
  if (asked_for != state->serial) {
    Reference none(PyObject_CallMethodNoArgs(hooks->hooks, begin));
    if (!none) return nullptr;
    asked_for = state->serial;
  }
  if (state->is_reassigned) return in_python();
  if (Py_TYPE(packed) == handle_type() && hooks->moves != nullptr) {
    const Handle* handle = handle_of(packed);
    const bool is_known = state->on_path && (handle->moves == nullptr || handle->moves == hooks->moves);
    PyObject* tensor = is_known ? read_handle(hooks, handle) : nullptr;
    return tensor != nullptr || PyErr_Occurred() ? tensor : in_python();
  }
  if (const Handle* const handle = hooks->reads == nullptr ? nullptr : handle_in(packed)) {
    PyObject* tensor = handle->reads == hooks->reads ? read_unplanned(hooks, handle) : nullptr;
    return tensor != nullptr || PyErr_Occurred() ? tensor : in_python();
  }
  if (Py_TYPE(packed) != kept_type()) return in_python();
  const Kept* kept = kept_of(packed);
  if (!kept->tensor.defined() || static_cast<int64_t>(kept->tensor._version()) != kept->version) return in_python();
  if (state->on_path && Path::holds(state->path->anchored, kept->number)) {
    if (hooks->moves == nullptr) return in_python();
    const Outcome acted = under_lock(*hooks->moves, [&] { return act_before_read(*hooks->moves, kept->number); });
    if (acted == Outcome::FAILED) return nullptr;
    if (acted == Outcome::IN_PYTHON || !kept->tensor.defined()) return in_python();  // it may have been given a handle
  }
  return has_noted_read(hooks) ? THPVariable_Wrap(kept->tensor) : nullptr;
  END_HANDLE_TH_ERRORS
}

inline PyTypeObject* hooks_type() {
  static PyMethodDef methods[] = {
      {"pack", hooks_pack, METH_O, nullptr},
      {"unpack", hooks_unpack, METH_O, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(hooks_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(hooks_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(hooks_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(hooks_clear)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Hooks", sizeof(Hooks), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

// What autograd holds in place of a tensor whose value may leave.
#pragma once
#include "acting.h"
#include "reads.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

namespace watch {

// What tells a tensor that autograd is saving from others; see `records.saved_identity`.
struct Identity {
  void* tensor = nullptr;  // null: the result of the node that saves it
  uint64_t node = 0;

  static Identity of(PyObject* object, const at::Tensor& tensor) {
    const auto& node = tensor.grad_fn();
    if (!node || node->sequence_nr() + 1 == at::sequence_number::peek()) return {};
    return {object, node->sequence_nr()};
  }

  PyObject* to_python() const {
    if (tensor == nullptr) Py_RETURN_NONE;
    Reference address(PyLong_FromVoidPtr(tensor)), number(PyLong_FromUnsignedLongLong(node));
    return PyTuple_Pack(2, address.get(), number.get());
  }
};

// In Python: `Handle(step, value, tensor, ended, reads=None)`, with what `executor.records.Handle` has.
struct Handle {
  PyObject_HEAD
  PyObject *step, *value, *ended;
  Moves* moves;    // of a value that a plan moves, or null
  Reads* reads;    // of one that none moves, or null; with neither, its end is told in Python
  int64_t number;  // of the value, if there are moves or reads
  Geometry geometry;
  c10::VariableVersion counter;  // of the tensor: it tells of changes that no op of the region makes
  uint32_t version;
  Identity identity;

  bool is_changed() const { return counter.enabled() && counter.current_version() != version; }
};

inline Handle* handle_of(PyObject* self) {
  return reinterpret_cast<Handle*>(self);
}

inline bool count_handle(PyObject* value) {
  static PyObject* const name = interned("handles");
  Reference before(PyObject_GetAttr(value, name));
  if (!before) return false;
  Reference after(PyLong_FromLong(PyLong_AsLong(before.get()) + 1));
  return after && PyObject_SetAttr(value, name, after.get()) == 0;
}

// Returns a handle on a value, which counts it, or null with an error.
inline Handle* handle_on_value(PyTypeObject* type, PyObject* step, PyObject* value, PyObject* object, PyObject* ended) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!count_handle(value)) return nullptr;
  Handle* self = handle_of(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->step = Py_NewRef(step), self->value = Py_NewRef(value), self->ended = Py_NewRef(ended);
  new (&self->geometry) Geometry(Geometry::of(tensor));
  new (&self->counter) c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());
  self->version = version_of(tensor);
  self->identity = Identity::of(object, tensor);
  return self;
}

inline PyObject* handle_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  static PyObject* const name = interned("number");
  PyObject *step, *value, *object, *ended, *reads = Py_None;
  if (!PyArg_ParseTuple(arguments, "OOOO|O", &step, &value, &object, &ended, &reads)) return nullptr;
  if (reads != Py_None && Py_TYPE(reads) != reads_type()) return PyErr_Format(PyExc_TypeError, "a handle takes Reads or None");
  if (!THPVariable_Check(object)) return PyErr_Format(PyExc_TypeError, "a handle is on a tensor");
  if (!is_ordinary(THPVariable_Unpack(object))) return PyErr_Format(PyExc_ValueError, "a handle is on an ordinary tensor");
  int64_t value_number = 0;
  if (reads != Py_None) {
    Reference found = checked(PyObject_GetAttr(value, name));
    value_number = PyLong_AsLongLong(found.get());
    if (PyErr_Occurred()) return nullptr;
  }
  Handle* self = handle_on_value(type, step, value, object, ended);
  if (self != nullptr && reads != Py_None) self->reads = reads_of(Py_NewRef(reads)), self->number = value_number;
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline int handle_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(handle_of(self)->step);
  Py_VISIT(handle_of(self)->value);
  Py_VISIT(handle_of(self)->ended);
  Py_VISIT(handle_of(self)->moves);
  Py_VISIT(handle_of(self)->reads);
  return 0;
}

inline int handle_clear(PyObject* self) {
  Py_CLEAR(handle_of(self)->step);
  Py_CLEAR(handle_of(self)->value);
  Py_CLEAR(handle_of(self)->ended);
  Py_CLEAR(handle_of(self)->moves);
  Py_CLEAR(handle_of(self)->reads);
  return 0;
}

inline void handle_finalize(PyObject* self) {
  Handle* handle = handle_of(self);
  if (handle->ended == nullptr) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Moves* const moves = handle->moves;
  Reads* const reads = handle->reads;
  Outcome outcome = Outcome::IN_PYTHON;
  if (moves != nullptr) {
    outcome = under_lock(*moves, [&] { return end_handle(*moves, handle->value, handle->number); });
  } else if (reads != nullptr) {
    outcome = under_lock(*reads, [&] { return end_here(*reads, handle->value, handle->number); });
  }
  Reference none;
  if (outcome == Outcome::IN_PYTHON) none = Reference(PyObject_CallOneArg(handle->ended, handle->value));
  if (PyErr_Occurred()) PyErr_WriteUnraisable(handle->ended);  // its name says whose it is
  PyErr_Restore(type, value, trace);
}

inline void handle_dealloc(PyObject* self) {
  if (PyObject_CallFinalizerFromDealloc(self) < 0) return;  // something holds it again
  PyObject_GC_UnTrack(self);
  handle_clear(self);
  handle_of(self)->geometry.~Geometry();
  handle_of(self)->counter.~VariableVersion();
  Py_TYPE(self)->tp_free(self);
}

// `changed(dtype, sizes)` returns the error that PyTorch raises without hooks.
inline PyObject*& changed() {
  static PyObject* function = nullptr;
  return function;
}

inline PyObject* handle_check(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const Handle* handle = handle_of(self);
  if (!handle->is_changed()) Py_RETURN_NONE;
  Reference sizes = checked(PyList_New(0));
  for (const int64_t size : handle->geometry.sizes) {
    Reference number = checked(PyLong_FromLongLong(size));
    if (PyList_Append(sizes.get(), number.get()) < 0) return nullptr;
  }
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(handle->geometry.dtype.toScalarType()));
  Reference error = checked(PyObject_CallFunctionObjArgs(changed(), dtype, sizes.get(), nullptr));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  return nullptr;
  END_HANDLE_TH_ERRORS
}

// Returns the tensor on another storage.
inline PyObject* handle_on(PyObject* self, PyObject* storage) {
  HANDLE_TH_ERRORS
  if (!THPStorage_Check(storage)) return PyErr_Format(PyExc_TypeError, "a tensor is on a storage");
  return THPVariable_Wrap(handle_of(self)->geometry.on(THPStorage_Unpack(storage)));
  END_HANDLE_TH_ERRORS
}

inline PyObject* handle_get_step(PyObject* self, void*) {
  return Py_NewRef(handle_of(self)->step);
}

inline PyObject* handle_get_value(PyObject* self, void*) {
  return Py_NewRef(handle_of(self)->value);
}

inline PyObject* handle_get_identity(PyObject* self, void*) {
  return handle_of(self)->identity.to_python();
}

inline PyTypeObject* handle_type() {
  static PyMethodDef methods[] = {
      {"check", handle_check, METH_NOARGS, nullptr}, {"on", handle_on, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"step", handle_get_step, nullptr, nullptr, nullptr},
      {"value", handle_get_value, nullptr, nullptr, nullptr},
      {"identity", handle_get_identity, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(handle_new)},
      {Py_tp_finalize, reinterpret_cast<void*>(handle_finalize)},
      {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(handle_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(handle_clear)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Handle", sizeof(Handle), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

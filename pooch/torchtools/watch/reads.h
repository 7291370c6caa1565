// What autograd reads and lets go of in a step without a plan, as long as it is there: what `executor.step` and
// `machine.pressure` do with it then, without Python.
#pragma once
#include "moves.h"

namespace watch {

// In Python: `Reads(region, parts)`.
struct Reads : Work {
  long long reach;  // how many saves before the one that is read may be brought back ahead of need
};

inline Reads* reads_of(PyObject* self) {
  return reinterpret_cast<Reads*>(self);
}

inline PyObject* reads_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *region, *value, *given;
  long long reach;
  if (!PyArg_ParseTuple(arguments, "O!O!OL", region_type(), &region, &PyType_Type, &value, &given, &reach)) return nullptr;
  Reference object(type->tp_alloc(type, 0));
  if (!object) return nullptr;
  Reads* self = reads_of(object.get());
  self->state = new std::shared_ptr<State>(*region_of(region)->state);
  self->reach = reach;
  for (const Part part : {LOCK, ACQUIRE, RELEASE, OWNER, STORE, SAVED, FORGET, PRESSURE, COPIED_AT, READING})
    if (!self->has_taken(given, part)) return nullptr;
  const bool are_known = PyDict_Check(self->part(SAVED)) && PyList_Check(self->part(COPIED_AT)) && PyDict_Check(self->part(READING));
  if (!are_known) return PyErr_Format(PyExc_TypeError, "what is saved and read is in dictionaries, and what was copied in a list");
  return self->has_found(reinterpret_cast<PyTypeObject*>(value)) ? object.release() : nullptr;
}

inline int reads_traverse(PyObject* self, visitproc visit, void* arg) {
  return visit_parts(*reads_of(self), visit, arg);
}

inline int reads_clear(PyObject* self) {
  clear_parts(*reads_of(self));
  return 0;
}

inline void reads_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  reads_clear(self);
  delete reads_of(self)->state;
  Py_TYPE(self)->tp_free(self);
}

inline PyTypeObject* reads_type() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(reads_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(reads_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(reads_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(reads_clear)},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Reads", sizeof(Reads), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// Whether anything that the tier has was saved within reach before a value, so that it may be brought back now. The numbers
// are in order, and some may be those of values that are back already. -1: an error.
inline int is_any_near(const Reads& reads, long long saved_at) {
  PyObject* const copied_at = reads.part(COPIED_AT);
  Py_ssize_t begin = 0, end = PyList_GET_SIZE(copied_at);
  while (begin < end) {
    const Py_ssize_t middle = begin + (end - begin) / 2;
    const long long here = PyLong_AsLongLong(PyList_GET_ITEM(copied_at, middle));
    if (here == -1 && PyErr_Occurred()) return -1;
    if (here < saved_at)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin > 0 && PyLong_AsLongLong(PyList_GET_ITEM(copied_at, begin - 1)) >= saved_at - reads.reach;
}

// Takes the storage of a value that autograd reads, if it is there and nothing is to be brought back after it. The caller
// holds the lock of the step.
inline Outcome read_here(const Reads& reads, PyObject* value, int64_t number, c10::Storage& storage) {
  static PyObject* const position = interned("_position");
  const Fields& fields = reads.fields;
  if (!fields.is_known(value) || fields.is_none(value, Fields::STORAGE) || !fields.is_none(value, Fields::TICKET))
    return Outcome::IN_PYTHON;
  const long long saved_at = fields.number(value, Fields::SAVED_AT);
  if (saved_at != 0) {
    if (PyDict_Size(reads.part(READING)) != 0) return Outcome::IN_PYTHON;
    const int is_near = is_any_near(reads, saved_at);
    if (is_near != 0) return is_near < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
    if (PyObject_SetAttr(reads.part(PRESSURE), position, fields.get(value, Fields::SAVED_AT)) < 0) return Outcome::FAILED;
  }
  storage = THPStorage_Unpack(fields.get(value, Fields::STORAGE));
  (*reads.state)->values->bind(storage, number);
  return Outcome::DONE;
}

// Ends a handle on a value, and with the last one lets go of its bytes, if they are there and nowhere else. The caller holds
// the lock of the step.
inline Outcome end_here(const Reads& reads, PyObject* value, int64_t number) {
  static PyObject* const growing = interned("growing");
  const Fields& fields = reads.fields;
  const long long handles = fields.is_known(value) ? fields.number(value, Fields::HANDLES) - 1 : -1;
  if (handles < 0) return Outcome::IN_PYTHON;
  if (handles == 0) {
    const bool is_simply_here = !fields.is_none(value, Fields::STORAGE) && fields.is_none(value, Fields::TICKET) &&
        fields.is_none(value, Fields::PLACE) && fields.is_none(value, Fields::WITNESS) && !fields.is_true(value, Fields::IS_COPIED);
    if (!is_simply_here) return Outcome::IN_PYTHON;
    Reference budget(PyObject_GetAttr(reads.part(STORE), growing));
    if (!budget) return Outcome::FAILED;
    if (budget.get() != Py_None) return Outcome::IN_PYTHON;
  }
  Reference left(PyLong_FromLongLong(handles)), key(PyLong_FromLongLong(number));
  if (!left || !key) return Outcome::FAILED;
  fields.set(value, Fields::HANDLES, std::move(left));
  if (handles != 0) return Outcome::DONE;
  const int is_saved = PyDict_Contains(reads.part(SAVED), key.get());
  if (is_saved < 0 || (is_saved == 1 && PyDict_DelItem(reads.part(SAVED), key.get()) < 0)) return Outcome::FAILED;
  Reference none(PyObject_CallOneArg(reads.part(FORGET), value));
  fields.set_none(value, Fields::STORAGE);
  return none ? Outcome::DONE : Outcome::FAILED;
}

}  // namespace watch

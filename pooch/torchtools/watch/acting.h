// What a plan has a step do at its slots, and with what autograd saves, reads and lets go of: natively as far as it is known
// here, and else in Python.
#pragma once
#include "replays.h"

namespace watch {

// Whether a value is looked at before its bytes are freed. -1: an error.
inline int is_looked_at(Moves& moves, PyObject* value, int64_t number) {
  if (moves.fields.is_true(value, Fields::HANDED_OUT)) return 1;
  if (moves.looked_at == nullptr) {
    moves.looked_at = PyObject_CallNoArgs(moves.part(LOOKED_AT));
    if (moves.looked_at == nullptr) return -1;
  }
  return has_number(moves.looked_at, number);
}

// Whether a value is not looked at before or after it moves, and no more than was planned. -1: an error.
inline int is_simple(Moves& moves, PyObject* value, const Move& move) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value) || !fields.is_none(value, Fields::WITNESS)) return 0;
  if (fields.number(value, Fields::SAVED_AT) != 0) return 0;  // it may leave under pressure
  const Room& room = moves.path().rooms.at(move.target);
  if (move.kind == Move::COPY_IN && !fields.is_none(value, Fields::PLACE)) {
    PyObject* const place = fields.get(value, Fields::PLACE);
    if (!moves.places.is_known(place)) return 0;  // it has left otherwise
    return moves.places.get(place, PLACE_ARENA) == moves.part(ARENA) &&
        moves.places.number(place, PLACE_OFFSET) == room.offset_bytes;
  }
  if (move.kind != Move::COPY_OUT) return 1;
  const bool is_here = !fields.is_none(value, Fields::STORAGE);
  const c10::Storage storage = is_here ? storage_in(moves, value) : (*moves.state)->made->get(move.target);
  if (storage && static_cast<int64_t>(storage.nbytes()) > room.size_bytes) return 0;
  const int is_looked = is_looked_at(moves, value, move.target);
  return is_looked < 0 ? -1 : is_looked == 0;
}

// Whether nothing is going on that only Python takes into account. -1: an error.
inline int is_quiet(const Moves& moves) {
  static PyObject *const is_profiled = interned("_is_profiler_enabled"), *const on_move = interned("on_move"),
                  *const depth = interned("depth");
  if (is_attribute_true(moves.part(PROFILER), is_profiled)) return PyErr_Occurred() ? -1 : 0;
  Reference told(PyObject_GetAttr(moves.part(STORE), on_move));
  if (!told) return -1;
  if (told.get() != Py_None) return 0;
  if (is_attribute_true(moves.part(MOVING), depth)) return PyErr_Occurred() ? -1 : 0;
  return 1;
}

// Notes that the actions of a slot begin.
inline bool has_begun(const Moves& moves, PyObject* slot) {
  PyObject* const ahead = moves.part(AHEAD);
  if (PySet_Add(moves.part(ACTED), slot) < 0) return false;
  for (Py_ssize_t count = PyList_GET_SIZE(ahead); count > 0; count = PyList_GET_SIZE(ahead)) {
    const int is_acted = PySet_Contains(moves.part(ACTED), PyList_GET_ITEM(ahead, count - 1));
    if (is_acted <= 0) return is_acted == 0;
    if (PyList_SetSlice(ahead, count - 1, count, nullptr) < 0) return false;
  }
  return true;
}

// Makes a move of a value that is copied, or says why not.
inline Outcome moved(Moves& moves, const Move& move) {
  if (!Path::holds(moves.path().simple, move.target)) return Outcome::IN_PYTHON;
  PyObject* const value = value_at(moves, move.target);
  const int is_known = value == nullptr ? -1 : is_simple(moves, value, move);
  if (is_known != 1) return is_known < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
  switch (move.kind) {
    case Move::COPY_OUT: return copy_out(moves, value, move.target);
    case Move::FREE: return free(moves, value);
    case Move::COPY_IN: return copy_in(moves, value, move.target);
    default: return wait(moves, value);
  }
}

inline Outcome done_here(Moves& moves, int64_t slot, const Move& move) {
  switch (move.kind) {
    case Move::REPLAY: return replay(moves, move);
    case Move::DROP: return drop(moves, slot, move.target);
    case Move::OTHER: return Outcome::IN_PYTHON;
    default: return moved(moves, move);
  }
}

// Runs the actions at the entry of a slot once, each of them in Python where it cannot be run here. The caller holds the lock
// of the step.
inline Outcome act_at(Moves& moves, int64_t number) {
  const auto found = moves.path().moves.find(number);
  if (found == moves.path().moves.end()) return Outcome::IN_PYTHON;
  Reference slot(PyLong_FromLongLong(number));
  const int is_acted = slot ? PySet_Contains(moves.part(ACTED), slot.get()) : -1;
  if (is_acted != 0) return is_acted < 0 ? Outcome::FAILED : Outcome::DONE;
  const int is_known = is_quiet(moves);
  if (is_known != 1) return is_known < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
  if (!has_begun(moves, slot.get())) return Outcome::FAILED;
  for (size_t index = 0; index < found->second.size(); ++index) {
    const Outcome outcome = done_here(moves, number, found->second[index]);
    if (outcome == Outcome::FAILED) return outcome;
    if (outcome == Outcome::DONE) continue;
    Reference place(PyLong_FromSize_t(index));
    if (!place) return Outcome::FAILED;
    Reference is_on_path(PyObject_CallFunctionObjArgs(moves.part(ACT), slot.get(), place.get(), nullptr));
    if (!is_on_path) return Outcome::FAILED;
    if (is_on_path.get() != Py_True) return Outcome::DONE;
  }
  return PySet_Add(moves.part(DONE), slot.get()) < 0 ? Outcome::FAILED : Outcome::DONE;
}

// Runs what is due before the first read of a value. The caller holds the lock of the step.
inline Outcome act_before_read(Moves& moves, int64_t value) {
  const auto found = moves.path().anchor_of.find(value);
  if (found == moves.path().anchor_of.end()) return Outcome::DONE;
  const int is_done = has_number(moves.part(DONE), found->second);
  if (is_done != 0) return is_done < 0 ? Outcome::FAILED : Outcome::DONE;
  return act_at(moves, found->second);
}

// Whether all that a value does is to be copied or to be made again, for autograd and perhaps for a replay.
inline bool is_simply_moved(const Path& path, int64_t number) {
  return Path::holds(path.simple, number);
}

// Prepares a value for a handle that autograd holds from now on.
inline Outcome hold(Moves& moves, PyObject* value, int64_t number, const at::Tensor& tensor) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value)) return Outcome::IN_PYTHON;
  if (!has_taken_made(moves, value, number)) return Outcome::FAILED;
  if (Path::holds(moves.path().recomputed, number)) {
    const Outcome outcome = watch_over(moves, value, number, storage_of(tensor));
    if (outcome != Outcome::DONE) return outcome;
  } else if (fields.is_none(value, Fields::STORAGE) && !fields.is_true(value, Fields::IS_COPIED) &&
             !has_put(moves, value, storage_of(tensor))) {
    return Outcome::FAILED;
  }
  Reference storage(THPStorage_Wrap(storage_of(tensor)));
  Reference in_program(storage ? PyWeakref_NewRef(storage.get(), nullptr) : nullptr);
  if (!in_program) return Outcome::FAILED;
  fields.set(value, Fields::IN_PROGRAM, std::move(in_program));
  return Outcome::DONE;
}

// Ends a handle on a value, and with the last one lets go of its bytes, unless the plan will have a later replay read them.
inline Outcome end_handle(const Moves& moves, PyObject* value, int64_t number) {
  const Fields& fields = moves.fields;
  const long long handles = fields.is_known(value) ? fields.number(value, Fields::HANDLES) - 1 : -1;
  if (handles < 0) return Outcome::IN_PYTHON;
  bool goes = handles == 0;
  if (goes) {
    if (fields.number(value, Fields::SAVED_AT) != 0) return Outcome::IN_PYTHON;
    const int is_easy = is_easily_let_go(moves, value, number);
    if (is_easy != 1) return is_easy < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
    const int is_read_later = (*moves.state)->on_path ? has_number(moves.part(TO_DROP), number) : 0;
    if (is_read_later < 0) return Outcome::FAILED;
    goes = is_read_later == 0;
  }
  Reference left(PyLong_FromLongLong(handles));
  if (!left) return Outcome::FAILED;
  fields.set(value, Fields::HANDLES, std::move(left));
  if (goes) let_go(moves, value, number);
  return Outcome::DONE;
}

// `released(values)` returns the keys of those in a dictionary of values that autograd has let go of, or whose storages nothing
// else holds. A step is recorded with a look at all of them before each op.
inline PyObject* released(PyObject*, PyObject* values) {
  static Fields fields;
  if (!PyDict_Check(values)) return PyErr_Format(PyExc_TypeError, "values are given in a dictionary");
  Reference found(PyList_New(0));
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (found && PyDict_Next(values, &position, &key, &value)) {
    if (!fields.is_known(value) && !fields.find(Py_TYPE(value))) return nullptr;
    const bool is_held = fields.number(value, Fields::HANDLES) != 0 && !fields.is_none(value, Fields::STORAGE) &&
        THPStorage_Unpack(fields.get(value, Fields::STORAGE)).use_count() > 1;
    if (!is_held && PyList_Append(found.get(), key) < 0) return nullptr;
  }
  return found.release();
}

}  // namespace watch

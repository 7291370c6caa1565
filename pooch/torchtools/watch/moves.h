// The moves of values that a plan copies and that nothing else is to be done about: what `executor.planned_values` does
// with them, without Python. Both work on the same values, under the same lock, and either can go on where the other was.
#pragma once
#include "region.h"

#include <c10/core/CPUAllocator.h>

#include <structmember.h>

#include <cstddef>

namespace watch {

// What the moves of a step work on, by the names of the attributes of what `Moves` is given.
enum Part : size_t {
  PLANNED,        // the values, by number
  LOCK,           // of the step, and what takes and gives it back
  ACQUIRE,
  RELEASE,
  STATS,
  OWNER,          // of the values
  ARENA,          // where they are copied to
  PLACE,          // the type of room in it
  HEALTH,
  STORE,
  ACTED,          // slots whose actions have begun, and those in which they are done
  DONE,
  AHEAD,          // slots with replays that are still to come, the next one last
  PENDING,        // values that wait for the program, in two dictionaries
  HELD_BACK,
  LOOKS_AT,       // whether a value is looked at before it leaves
  LEARN,          // takes the time of a copy into account
  END_COPY_OUT,   // ends a copy that has failed
  MOVING,         // has a depth where no copy may be under way in the calling thread
  PROFILER,       // PyTorch's module, which says whether moves have names
  PARTS
};

inline const std::array<const char*, PARTS>& part_names() {
  static const std::array<const char*, PARTS> names{
      "planned", "lock", "acquire", "release", "stats", "owner", "arena", "place", "health", "store",
      "acted", "done", "ahead", "pending", "held_back", "looks_at", "learn", "end_copy_out", "moving", "profiler"};
  return names;
}

// Where the fields of a value lie, and those of room in the tier: Python keeps what has slots as C keeps a structure.
class Fields {
 public:
  enum Field : size_t { HANDLES, STORAGE, SIZE_BYTES, PLACE, IS_COPIED, TICKET, WITNESS, SAVED_AT, IN_PROGRAM, IS_PINNED, COUNT };

  // False, with an error, where the type is another one than is known here.
  bool find(PyTypeObject* type) {
    static const char* const names[COUNT] = {
        "handles", "storage", "size_bytes", "place", "is_copied", "ticket", "witness", "saved_at", "in_program", "is_pinned"};
    for (size_t field = 0; field < COUNT; ++field) {
      Reference descriptor(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), names[field]));
      if (!descriptor) return false;
      if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type)
        return PyErr_Format(PyExc_TypeError, "a value has no slot %s", names[field]), false;
      offsets_[field] = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
    }
    type_ = type;
    return true;
  }

  bool is_known(PyObject* value) const { return Py_TYPE(value) == type_; }

  PyObject* get(PyObject* value, Field field) const { return at(value, field); }

  bool is_none(PyObject* value, Field field) const { return at(value, field) == Py_None; }

  bool is_true(PyObject* value, Field field) const { return at(value, field) == Py_True; }

  long long number(PyObject* value, Field field) const { return PyLong_AsLongLong(at(value, field)); }

  // What was there ends last: that may run anything.
  void set(PyObject* value, Field field, Reference found) const {
    Reference before(std::exchange(at(value, field), found.release()));
  }

  void set_none(PyObject* value, Field field) const { set(value, field, Reference::to(Py_None)); }

 private:
  PyObject*& at(PyObject* value, Field field) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(value) + offsets_[field]);
  }

  PyTypeObject* type_ = nullptr;
  std::array<Py_ssize_t, COUNT> offsets_{};
};

// What came of something that is done here if it can be.
enum class Outcome { DONE, IN_PYTHON, FAILED };

// In Python: `Moves(region, parts)`. Autograd holds it, and with it what it works on, but not the step.
struct Moves {
  PyObject_HEAD
  std::shared_ptr<State>* state;
  std::array<PyObject*, PARTS> parts;
  Fields fields;

  PyObject* part(Part which) const { return parts[which]; }
  const Path& path() const { return *(*state)->path; }
};

inline Moves* moves_of(PyObject* self) {
  return reinterpret_cast<Moves*>(self);
}

inline PyObject* moves_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *region, *given;
  if (!PyArg_ParseTuple(arguments, "O!O", region_type(), &region, &given)) return nullptr;
  if (!state_of(region).path) return PyErr_Format(PyExc_ValueError, "moves are those of a path");
  Reference object(type->tp_alloc(type, 0));
  if (!object) return nullptr;
  Moves* self = moves_of(object.get());
  self->state = new std::shared_ptr<State>(*region_of(region)->state);
  for (size_t part = 0; part < PARTS; ++part) {
    self->parts[part] = PyObject_GetAttrString(given, part_names()[part]);
    if (self->parts[part] == nullptr) return nullptr;
  }
  PyObject *number, *value;
  Py_ssize_t position = 0;
  if (!PyDict_Next(self->part(PLANNED), &position, &number, &value))
    return PyErr_Format(PyExc_ValueError, "a plan moves no value");
  if (!self->fields.find(Py_TYPE(value))) return nullptr;
  return object.release();
}

inline int moves_traverse(PyObject* self, visitproc visit, void* arg) {
  for (PyObject* part : moves_of(self)->parts) Py_VISIT(part);
  return 0;
}

inline int moves_clear(PyObject* self) {
  for (PyObject*& part : moves_of(self)->parts) Py_CLEAR(part);
  return 0;
}

inline void moves_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  moves_clear(self);
  delete moves_of(self)->state;
  Py_TYPE(self)->tp_free(self);
}

inline PyTypeObject* moves_type() {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(moves_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(moves_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(moves_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(moves_clear)},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Moves", sizeof(Moves), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// The lock -----------------------------------------------------------------------------------------------------------------

inline Py_ssize_t queued(const Moves& moves) {
  static PyObject* const name = interned("_queue");
  Reference queue(PyObject_GetAttr(moves.part(LOCK), name));
  return queue ? PyObject_Size(queue.get()) : -1;
}

inline bool set_depth(const Moves& moves, long depth) {
  static PyObject* const name = interned("_depth");
  Reference number(PyLong_FromLong(depth));
  return number && PyObject_SetAttr(moves.part(LOCK), name, number.get()) == 0;
}

inline bool has_called(PyObject* object, const char* method) {
  return static_cast<bool>(Reference(PyObject_CallMethod(object, method, nullptr)));
}

// Whether the lock is held by nobody: neither by another thread, nor by what this one is in the middle of.
inline Outcome is_taken(const Moves& moves) {
  static PyObject* const name = interned("_depth");
  Reference taken(PyObject_CallOneArg(moves.part(ACQUIRE), Py_False));
  if (!taken) return Outcome::FAILED;
  if (taken.get() != Py_True) return Outcome::IN_PYTHON;
  Reference depth(PyObject_GetAttr(moves.part(LOCK), name));
  const bool is_free = depth && PyLong_AsLong(depth.get()) == 0 && queued(moves) == 0;
  if (is_free && set_depth(moves, 1)) return Outcome::DONE;
  const bool has_failed = PyErr_Occurred() != nullptr;
  Reference none(PyObject_CallNoArgs(moves.part(RELEASE)));
  return has_failed || !none ? Outcome::FAILED : Outcome::IN_PYTHON;
}

// Gives the lock back as `StepLock` does: handles that have ended meanwhile are looked at first.
inline bool is_given_back(const Moves& moves) {
  bool is_well = queued(moves) == 0 || has_called(moves.part(LOCK), "_empty_queue");
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  is_well = set_depth(moves, 0) && is_well;
  Reference none(PyObject_CallNoArgs(moves.part(RELEASE)));
  if (none && queued(moves) != 0) is_well = has_called(moves.part(LOCK), "_settle") && is_well;
  if (type != nullptr) PyErr_Restore(type, value, trace);
  return is_well && none;
}

// Does something under the lock of the step, or leaves it to Python where that is not free.
template <class Function>
Outcome under_lock(const Moves& moves, Function&& function) {
  const Outcome taken = is_taken(moves);
  if (taken != Outcome::DONE) return taken;
  Outcome outcome = Outcome::FAILED;
  try {
    outcome = function();
  } catch (...) {  // an allocation has failed
    torch::translate_exception_to_python(std::current_exception());
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const bool is_well = is_given_back(moves);
  if (outcome == Outcome::FAILED) {
    PyErr_Restore(type, value, trace);
    return outcome;
  }
  return is_well ? outcome : Outcome::FAILED;
}

// Moves --------------------------------------------------------------------------------------------------------------------

inline bool is_attribute_true(PyObject* object, PyObject* name) {
  Reference found(PyObject_GetAttr(object, name));
  return !found || PyObject_IsTrue(found.get()) != 0;
}

inline bool has_added(PyObject* object, PyObject* name, Reference more) {
  Reference before(PyObject_GetAttr(object, name));
  if (!before || !more) return false;
  Reference after(PyNumber_Add(before.get(), more.get()));
  return after && PyObject_SetAttr(object, name, after.get()) == 0;
}

inline PyObject* value_at(const Moves& moves, int64_t number) {
  Reference key(PyLong_FromLongLong(number));
  return key ? PyDict_GetItemWithError(moves.part(PLANNED), key.get()) : nullptr;
}

inline const c10::Storage& storage_in(const Moves& moves, PyObject* value) {
  return THPStorage_Unpack(moves.fields.get(value, Fields::STORAGE));
}

inline bool has_put(const Moves& moves, PyObject* value, const c10::Storage& storage) {
  Reference size(PyLong_FromSize_t(storage.nbytes())), wrapped(THPStorage_Wrap(storage));
  if (!size || !wrapped) return false;
  moves.fields.set(value, Fields::STORAGE, std::move(wrapped));
  if (storage.nbytes() != 0) moves.fields.set(value, Fields::SIZE_BYTES, std::move(size));
  return true;
}

// Takes over a value that is held since it was made.
inline bool has_taken_made(const Moves& moves, PyObject* value, int64_t number) {
  const c10::Storage made = (*moves.state)->made->take(number);
  return !made || !moves.fields.is_none(value, Fields::STORAGE) || has_put(moves, value, made);
}

// Begins a copy between a storage and the room of a value. Returns null with an error.
inline Reference started(const Moves& moves, const char* method, PyObject* storage, int64_t offset_bytes) {
  static PyObject *const room_name = interned("_room"), *const under_way_name = interned("_under_way"),
                  *const next_look = interned("_next_look");
  PyObject* const arena = moves.part(ARENA);
  Reference room(PyObject_GetAttr(arena, room_name)), name(interned(method)), offset(PyLong_FromLongLong(offset_bytes));
  Reference under_way(PyObject_GetAttr(arena, under_way_name)), limit(PyObject_GetAttr(arena, next_look));
  if (!room || !name || !offset || !under_way || !limit) return Reference();
  Reference ticket(PyObject_CallMethodObjArgs(room.get(), name.get(), storage, offset.get(), nullptr));
  if (!ticket) return Reference();
  if (PyDict_Size(under_way.get()) >= PyLong_AsSsize_t(limit.get())) {
    if (!has_called(arena, "forget_ended")) return Reference();
    under_way = Reference(PyObject_GetAttr(arena, under_way_name));
    if (!under_way) return Reference();
  }
  Reference key(PyLong_FromVoidPtr(THPStorage_Unpack(storage).unsafeGetStorageImpl()));
  if (!key || PyDict_SetItem(under_way.get(), key.get(), ticket.get()) < 0) return Reference();
  return ticket;
}

inline Outcome copy_out(const Moves& moves, PyObject* value, int64_t number) {
  static PyObject* const counter = interned("swapped_out_bytes");
  const Fields& fields = moves.fields;
  if (!has_taken_made(moves, value, number)) return Outcome::FAILED;
  if (fields.is_none(value, Fields::STORAGE)) return Outcome::DONE;  // released by the program before autograd saved it
  if (fields.is_true(value, Fields::IS_COPIED) || !fields.is_none(value, Fields::TICKET)) return Outcome::DONE;
  const Room& room = moves.path().rooms.at(number);
  Reference offset(PyLong_FromLongLong(room.offset_bytes));
  Reference place(PyObject_CallFunctionObjArgs(moves.part(PLACE), moves.part(ARENA), offset.get(), moves.part(HEALTH), nullptr));
  Reference size(PyLong_FromSize_t(storage_in(moves, value).nbytes()));
  if (!offset || !place || !size) return Outcome::FAILED;
  fields.set(value, Fields::PLACE, std::move(place));
  fields.set(value, Fields::SIZE_BYTES, Reference::to(size.get()));
  Reference ticket = started(moves, "copy_out", fields.get(value, Fields::STORAGE), room.offset_bytes);
  if (!ticket) return Outcome::FAILED;
  fields.set(value, Fields::TICKET, std::move(ticket));
  return has_added(moves.part(STATS), counter, std::move(size)) ? Outcome::DONE : Outcome::FAILED;
}

// Waits for the copy of a value. `has_failed` says whether it went wrong, which is left to Python.
inline bool has_waited(const Moves& moves, PyObject* value, bool is_outwards, bool& has_failed) {
  static PyObject *const wait = interned("wait"), *const error_name = interned("error"), *const stall = interned("host_stall_ms");
  static PyObject* const keywords = PyTuple_Pack(1, interned("outwards"));
  Reference ticket = Reference::to(moves.fields.get(value, Fields::TICKET));
  Reference waited_ms(PyObject_CallMethodNoArgs(ticket.get(), wait));
  if (!waited_ms) return false;
  Reference error(PyObject_GetAttr(ticket.get(), error_name));
  if (!error) return false;
  has_failed = error.get() != Py_None;
  if (has_failed) return true;
  PyObject* const arguments[] = {ticket.get(), moves.fields.get(value, Fields::SIZE_BYTES), is_outwards ? Py_True : Py_False};
  Reference none(PyObject_Vectorcall(moves.part(LEARN), arguments, 2, keywords));
  return none && (PyFloat_AsDouble(waited_ms.get()) == 0.0 || has_added(moves.part(STATS), stall, std::move(waited_ms)));
}

inline Outcome free(const Moves& moves, PyObject* value) {
  const Fields& fields = moves.fields;
  if (!fields.is_none(value, Fields::TICKET) && !fields.is_true(value, Fields::IS_COPIED)) {
    bool has_failed = false;
    if (!has_waited(moves, value, true, has_failed)) return Outcome::FAILED;
    if (has_failed) {
      Reference none(PyObject_CallOneArg(moves.part(END_COPY_OUT), value));
      if (!none) return Outcome::FAILED;
    } else {
      fields.set(value, Fields::IS_COPIED, Reference::to(Py_True));
      fields.set_none(value, Fields::TICKET);
    }
  }
  const bool can_go = fields.is_true(value, Fields::IS_COPIED) && fields.is_none(value, Fields::TICKET) &&
      !fields.is_true(value, Fields::IS_PINNED);
  if (can_go) fields.set_none(value, Fields::STORAGE);
  return Outcome::DONE;
}

inline Outcome copy_in(const Moves& moves, PyObject* value, int64_t number) {
  static PyObject* const counter = interned("swapped_in_bytes");
  const Fields& fields = moves.fields;
  const bool is_wanted = fields.is_none(value, Fields::STORAGE) && fields.is_true(value, Fields::IS_COPIED) &&
      fields.number(value, Fields::HANDLES) > 0;
  if (!is_wanted) return Outcome::DONE;
  const auto size_bytes = static_cast<size_t>(fields.number(value, Fields::SIZE_BYTES));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes, c10::GetCPUAllocator(), true);
  Reference wrapped(THPStorage_Wrap(storage));
  if (!wrapped) return Outcome::FAILED;
  Reference ticket = started(moves, "copy_in", wrapped.get(), moves.path().rooms.at(number).offset_bytes);
  if (!ticket) return Outcome::FAILED;
  fields.set(value, Fields::STORAGE, std::move(wrapped));
  fields.set(value, Fields::TICKET, std::move(ticket));
  return has_added(moves.part(STATS), counter, Reference::to(fields.get(value, Fields::SIZE_BYTES))) ? Outcome::DONE
                                                                                                    : Outcome::FAILED;
}

inline Outcome wait(const Moves& moves, PyObject* value) {
  const Fields& fields = moves.fields;
  if (fields.is_none(value, Fields::TICKET) || !fields.is_true(value, Fields::IS_COPIED)) return Outcome::DONE;
  bool has_failed = false;
  if (!has_waited(moves, value, false, has_failed)) return Outcome::FAILED;
  if (has_failed) {
    Reference none(PyObject_CallMethod(moves.part(STORE), "finish_in", "OO", value, moves.part(STATS)));
    return none ? Outcome::DONE : Outcome::FAILED;
  }
  fields.set_none(value, Fields::TICKET);
  return Outcome::DONE;
}

// Whether a value is not looked at before or after it moves, and no more than was planned. -1: an error.
inline int is_simple(const Moves& moves, PyObject* value, const Move& move) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value) || !fields.is_none(value, Fields::WITNESS)) return 0;
  if (fields.number(value, Fields::SAVED_AT) != 0) return 0;  // it may leave under pressure
  const Room& room = moves.path().rooms.at(move.number);
  if (move.kind == Move::COPY_IN && !fields.is_none(value, Fields::PLACE)) {
    static PyObject *const arena = interned("arena"), *const offset = interned("offset_bytes");
    PyObject* const place = fields.get(value, Fields::PLACE);
    if (reinterpret_cast<PyObject*>(Py_TYPE(place)) != moves.part(PLACE)) return 0;  // it has left otherwise
    Reference there(PyObject_GetAttr(place, arena)), begin(PyObject_GetAttr(place, offset));
    if (!there || !begin) return -1;
    return there.get() == moves.part(ARENA) && PyLong_AsLongLong(begin.get()) == room.offset_bytes;
  }
  if (move.kind != Move::COPY_OUT) return 1;
  const bool is_here = !fields.is_none(value, Fields::STORAGE);
  const c10::Storage storage = is_here ? storage_in(moves, value) : (*moves.state)->made->get(move.number);
  if (storage && static_cast<int64_t>(storage.nbytes()) > room.size_bytes) return 0;
  Reference is_looked_at(PyObject_CallOneArg(moves.part(LOOKS_AT), value));
  return is_looked_at ? is_looked_at.get() == Py_False : -1;
}

// Whether nothing is going on that only Python takes into account. -1: an error.
inline int is_quiet(const Moves& moves) {
  static PyObject *const is_profiled = interned("_is_profiler_enabled"), *const on_move = interned("on_move"),
                  *const depth = interned("depth");
  if (PyDict_GET_SIZE(moves.part(PENDING)) != 0 || PyDict_GET_SIZE(moves.part(HELD_BACK)) != 0) return 0;
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

// Runs the actions at the entry of a slot once. The caller holds the lock of the step.
inline Outcome act_at(const Moves& moves, int64_t number) {
  const auto found = moves.path().moves.find(number);
  if (found == moves.path().moves.end()) return Outcome::IN_PYTHON;
  Reference slot(PyLong_FromLongLong(number));
  const int is_acted = slot ? PySet_Contains(moves.part(ACTED), slot.get()) : -1;
  if (is_acted != 0) return is_acted < 0 ? Outcome::FAILED : Outcome::DONE;
  int is_known = is_quiet(moves);
  c10::SmallVector<PyObject*, 8> values;
  for (const Move& move : found->second) {
    if (is_known == 1) values.push_back(value_at(moves, move.number));
    if (is_known == 1) is_known = values.back() == nullptr ? -1 : is_simple(moves, values.back(), move);
  }
  if (is_known != 1) return is_known < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
  if (!has_begun(moves, slot.get())) return Outcome::FAILED;
  for (size_t index = 0; index < values.size(); ++index) {
    const Move& move = found->second[index];
    Outcome outcome = Outcome::DONE;
    switch (move.kind) {
      case Move::COPY_OUT: outcome = copy_out(moves, values[index], move.number); break;
      case Move::FREE: outcome = free(moves, values[index]); break;
      case Move::COPY_IN: outcome = copy_in(moves, values[index], move.number); break;
      case Move::WAIT: outcome = wait(moves, values[index]); break;
    }
    if (outcome != Outcome::DONE) return outcome;
  }
  return PySet_Add(moves.part(DONE), slot.get()) < 0 ? Outcome::FAILED : Outcome::DONE;
}

// Runs what is due before the first read of a value. The caller holds the lock of the step.
inline Outcome act_before_read(const Moves& moves, int64_t value) {
  const auto found = moves.path().anchor_of.find(value);
  if (found == moves.path().anchor_of.end()) return Outcome::DONE;
  Reference slot(PyLong_FromLongLong(found->second));
  const int is_done = slot ? PySet_Contains(moves.part(DONE), slot.get()) : -1;
  if (is_done != 0) return is_done < 0 ? Outcome::FAILED : Outcome::DONE;
  return act_at(moves, found->second);
}

// Whether all that a value does is to be copied and to come back.
inline bool is_simply_moved(const Path& path, int64_t number) {
  return Path::holds(path.simple, number);
}

// Prepares a value for a handle that autograd holds from now on.
inline Outcome hold(const Moves& moves, PyObject* value, int64_t number, const at::Tensor& tensor) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value)) return Outcome::IN_PYTHON;
  if (!has_taken_made(moves, value, number)) return Outcome::FAILED;
  if (fields.is_none(value, Fields::STORAGE) && !fields.is_true(value, Fields::IS_COPIED) &&
      !has_put(moves, value, storage_of(tensor)))
    return Outcome::FAILED;
  Reference storage(THPStorage_Wrap(storage_of(tensor)));
  Reference in_program(storage ? PyWeakref_NewRef(storage.get(), nullptr) : nullptr);
  if (!in_program) return Outcome::FAILED;
  fields.set(value, Fields::IN_PROGRAM, std::move(in_program));
  return Outcome::DONE;
}

// What a weak reference is to, or nothing.
inline Reference there(PyObject* reference) {
  if (!PyWeakref_CheckRef(reference)) return Reference();
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  return Reference(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
  return found == nullptr || found == Py_None ? Reference() : Reference::to(found);
#endif
}

// Finds the storage of a value that is read, as far as it is there.
inline Outcome read(const Moves& moves, PyObject* value, c10::Storage& storage) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value) || fields.number(value, Fields::SAVED_AT) != 0) return Outcome::IN_PYTHON;
  if (fields.is_none(value, Fields::STORAGE) || !fields.is_none(value, Fields::TICKET)) return Outcome::IN_PYTHON;
  const Reference in_program = there(fields.get(value, Fields::IN_PROGRAM));  // plain training reads what is there
  if (in_program && THPStorage_Unpack(in_program.get()).nbytes() != 0)
    fields.set(value, Fields::STORAGE, Reference::to(in_program.get()));
  storage = storage_in(moves, value);
  return Outcome::DONE;
}

// Ends a handle on a value, and with the last one lets go of its bytes.
inline Outcome end_handle(const Moves& moves, PyObject* value, int64_t number) {
  const Fields& fields = moves.fields;
  const long long handles = fields.is_known(value) ? fields.number(value, Fields::HANDLES) - 1 : -1;
  const bool is_last = handles == 0;
  if (handles < 0) return Outcome::IN_PYTHON;
  if (is_last) {
    const bool is_simple = fields.is_none(value, Fields::WITNESS) && fields.is_none(value, Fields::TICKET) &&
        fields.number(value, Fields::SAVED_AT) == 0 && PyDict_GET_SIZE(moves.part(HELD_BACK)) == 0;
    if (!is_simple) return Outcome::IN_PYTHON;
  }
  Reference left(PyLong_FromLongLong(handles));
  if (!left) return Outcome::FAILED;
  fields.set(value, Fields::HANDLES, std::move(left));
  if (is_last) {
    const c10::Storage made = (*moves.state)->made->take(number);
    fields.set_none(value, Fields::STORAGE);
  }
  return Outcome::DONE;
}

}  // namespace watch

// The moves of values that a plan copies and that nothing else is to be done about: what `executor.planned_values` does
// with them, without Python. Both work on the same values, under the same lock, and either can go on where the other was.
// `replays.h` has the replays, and `acting.h` what is done where.
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
  END,            // reports the end of a handle
  STATS,
  OWNER,          // of the values
  ARENA,          // where they are copied to
  PLACE,          // the type of room in it
  HEALTH,
  STORE,
  ACTED,          // slots whose actions have begun, and those in which they are done
  DONE,
  AHEAD,          // slots with replays that are still to come, the next one last
  HELD_BACK,      // values that were copied, and that the program may still change
  TO_DROP,        // numbers of values that replays will read, whether autograd still holds them or not
  LOOKED_AT,      // returns the numbers of the values that are looked at before they leave
  SAMPLED,        // returns the numbers of those whose replays are looked at lightly, and whether they are at all
  TAINTED,        // numbers of values that the program may have changed through an address, and what is made of them
  WITNESS,        // the type of what a replay is compared with, and what such an object has: the level, the checksum,
  SAMPLE,
  CHECKSUM,
  PLAN,           // and the number of the plan
  CHECKED,        // counters of comparisons
  ACT,            // runs one action of a slot in Python, and says whether the step is still on the path
  PUT,            // takes what a replay gave for a value, and compares it
  LEARN,          // takes the times of copies into account
  END_COPY_OUT,   // ends a copy that has failed
  MOVING,         // has a depth where no copy may be under way in the calling thread
  PROFILER,       // PyTorch's module, which says whether moves have names
  PARTS_OF_MOVES,
  SAVED = PARTS_OF_MOVES,  // what follows is what `reads.h` works on: the values that autograd has saved, by number
  FORGET,         // has a value leave no more
  PRESSURE,       // the guide that has values leave, which knows where the backward pass is
  COPIED_AT,      // when the values that the tier has were saved, the first one first
  READING,        // values that are on their way back ahead of need
  PARTS
};

inline const std::array<const char*, PARTS>& part_names() {
  static const std::array<const char*, PARTS> names{
      "planned", "lock", "acquire", "release", "end", "stats", "owner", "arena", "place", "health", "store",
      "acted", "done", "ahead", "held_back", "to_drop", "looked_at", "sampled", "tainted", "witness", "sample",
      "checksum", "plan", "checked", "act", "put", "learn", "end_copy_out", "moving", "profiler", "saved", "forget",
      "pressure", "copied_at", "reading"};
  return names;
}

// Where the attributes of objects of a type lie: Python keeps what has slots as C keeps a structure.
class Slots {
 public:
  // False, with an error, where the type has no such slots.
  bool find(PyObject* type, std::initializer_list<const char*> names) {
    size_t slot = 0;
    for (const char* const name : names) {
      Reference descriptor(PyObject_GetAttrString(type, name));
      if (!descriptor) return false;
      if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type)
        return PyErr_Format(PyExc_TypeError, "there is no slot %s", name), false;
      offsets_.at(slot++) = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
    }
    type_ = reinterpret_cast<PyTypeObject*>(type);
    return true;
  }

  bool is_known(PyObject* object) const { return Py_TYPE(object) == type_; }

  // Returns a new object, without its constructor.
  Reference made() const { return Reference(type_->tp_alloc(type_, 0)); }

  PyObject* get(PyObject* object, size_t slot) const {
    PyObject* const found = at(object, slot);
    return found == nullptr ? Py_None : found;
  }

  bool is_none(PyObject* object, size_t slot) const { return get(object, slot) == Py_None; }

  bool is_true(PyObject* object, size_t slot) const { return get(object, slot) == Py_True; }

  long long number(PyObject* object, size_t slot) const { return PyLong_AsLongLong(get(object, slot)); }

  // What was there ends last: that may run anything.
  void set(PyObject* object, size_t slot, Reference found) const {
    Reference before(std::exchange(at(object, slot), found.release()));
  }

  void set_none(PyObject* object, size_t slot) const { set(object, slot, Reference::to(Py_None)); }

  // False, with an error.
  bool has_added(PyObject* object, size_t slot, Reference more) const {
    if (!more) return false;
    Reference sum(PyNumber_Add(get(object, slot), more.get()));
    if (!sum) return false;
    set(object, slot, std::move(sum));
    return true;
  }

 private:
  PyObject*& at(PyObject* object, size_t slot) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offsets_[slot]);
  }

  PyTypeObject* type_ = nullptr;
  std::array<Py_ssize_t, 11> offsets_{};
};

// The fields of a value.
struct Fields : Slots {
  enum Field : size_t {
    HANDLES, STORAGE, SIZE_BYTES, PLACE, IS_COPIED, TICKET, WITNESS, SAVED_AT, IN_PROGRAM, IS_PINNED, HANDED_OUT
  };

  bool find(PyTypeObject* type) {
    return Slots::find(reinterpret_cast<PyObject*>(type),
                       {"handles", "storage", "size_bytes", "place", "is_copied", "ticket", "witness", "saved_at",
                        "in_program", "is_pinned", "handed_out"});
  }
};

// Those of room in the tier, of the lock of a step, of an arena, of what a replay is compared with, and the counters of a step.
enum PlaceField : size_t { PLACE_ARENA, PLACE_OFFSET, PLACE_HEALTH };
enum LockField : size_t { DEPTH, QUEUE };
enum ArenaField : size_t { ROOM, UNDER_WAY, NEXT_LOOK };
enum WitnessField : size_t { RECIPE, LEVEL, CHECKSUM_OF, DIGEST, BYTES, COPY, COPYING };
enum Counter : size_t { SWAPPED_OUT, SWAPPED_IN, STALL, SPARED, RECOMPUTED };

// Times of copies in one direction of which Python has not learned yet. It learns of the first one at once, and of more and
// more together: to be called takes longer than all else about a small copy.
struct Timed {
  Py_ssize_t copies = 0, learned = 0;
  long long size_bytes = 0;
  double copy_ms = 0;

  bool is_due() const {
    constexpr Py_ssize_t MOST = 64;
    constexpr long long LARGE_BYTES = 1 << 20;
    return copies >= std::min(MOST, std::max<Py_ssize_t>(learned, 1)) || size_bytes >= LARGE_BYTES;
  }
};

// What came of something that is done here if it can be.
enum class Outcome { DONE, IN_PYTHON, FAILED };

// What is done natively to the values of a step, and what that works on. Autograd holds it, but not by it the step.
struct Work {
  PyObject_HEAD
  std::shared_ptr<State>* state;
  std::array<PyObject*, PARTS> parts;
  Fields fields;
  Slots locks;

  PyObject* part(Part which) const { return parts[which]; }

  // Takes parts of an object. False with an error.
  bool has_taken(PyObject* given, Part which) {
    parts[which] = PyObject_GetAttrString(given, part_names()[which]);
    return parts[which] != nullptr;
  }

  bool has_found(PyTypeObject* value_type) {
    return fields.find(value_type) && locks.find(reinterpret_cast<PyObject*>(Py_TYPE(part(LOCK))), {"_depth", "_queue"});
  }
};

inline int visit_parts(const Work& work, visitproc visit, void* arg) {
  for (PyObject* part : work.parts) Py_VISIT(part);
  return 0;
}

inline void clear_parts(Work& work) {
  for (PyObject*& part : work.parts) Py_CLEAR(part);
}

// In Python: `Moves(region, parts)`.
struct Moves : Work {
  Slots places, arenas, counters, witnesses, checks;
  PyObject *looked_at, *sampled;  // from `LOOKED_AT` and `SAMPLED`, once they were asked
  std::array<Timed, 2> timed;  // copies back, and copies out

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
  for (size_t part = 0; part < PARTS_OF_MOVES; ++part)
    if (!self->has_taken(given, static_cast<Part>(part))) return nullptr;
  PyObject *number, *value;
  Py_ssize_t position = 0;
  if (!PyDict_Next(self->part(PLANNED), &position, &number, &value))
    return PyErr_Format(PyExc_ValueError, "a plan moves no value");
  const auto type_of = [&](Part which) { return reinterpret_cast<PyObject*>(Py_TYPE(self->part(which))); };
  const bool are_found = self->has_found(Py_TYPE(value)) &&
      self->places.find(self->part(PLACE), {"arena", "offset_bytes", "health"}) &&
      self->arenas.find(type_of(ARENA), {"_room", "_under_way", "_next_look"}) &&
      self->counters.find(type_of(STATS), {"swapped_out_bytes", "swapped_in_bytes", "host_stall_ms", "spared_bytes", "recomputed_ops"}) &&
      self->witnesses.find(self->part(WITNESS), {"key", "level", "checksum", "digest", "storage", "place", "ticket"}) &&
      self->checks.find(type_of(CHECKED), {"sampled_natively"});
  return are_found ? object.release() : nullptr;
}

inline int moves_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(moves_of(self)->looked_at);
  Py_VISIT(moves_of(self)->sampled);
  return visit_parts(*moves_of(self), visit, arg);
}

inline int moves_clear(PyObject* self) {
  clear_parts(*moves_of(self));
  Py_CLEAR(moves_of(self)->looked_at);
  Py_CLEAR(moves_of(self)->sampled);
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

inline Py_ssize_t queued(const Work& work) {
  return PyObject_Size(work.locks.get(work.part(LOCK), QUEUE));
}

inline bool set_depth(const Work& work, long depth) {
  Reference number(PyLong_FromLong(depth));
  if (!number) return false;
  work.locks.set(work.part(LOCK), DEPTH, std::move(number));
  return true;
}

inline bool has_called(PyObject* object, const char* method) {
  return static_cast<bool>(Reference(PyObject_CallMethod(object, method, nullptr)));
}

// Whether the lock is held by nobody: neither by another thread, nor by what this one is in the middle of.
inline Outcome is_taken(const Work& work) {
  Reference taken(PyObject_CallOneArg(work.part(ACQUIRE), Py_False));
  if (!taken) return Outcome::FAILED;
  if (taken.get() != Py_True) return Outcome::IN_PYTHON;
  const bool is_free = work.locks.number(work.part(LOCK), DEPTH) == 0 && queued(work) == 0;
  if (is_free && set_depth(work, 1)) return Outcome::DONE;
  const bool has_failed = PyErr_Occurred() != nullptr;
  Reference none(PyObject_CallNoArgs(work.part(RELEASE)));
  return has_failed || !none ? Outcome::FAILED : Outcome::IN_PYTHON;
}

// Gives the lock back as `StepLock` does: handles that have ended meanwhile are looked at first.
inline bool is_given_back(const Work& work) {
  bool is_well = queued(work) == 0 || has_called(work.part(LOCK), "_empty_queue");
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  is_well = set_depth(work, 0) && is_well;
  Reference none(PyObject_CallNoArgs(work.part(RELEASE)));
  if (none && queued(work) != 0) is_well = has_called(work.part(LOCK), "_settle") && is_well;
  if (type != nullptr) PyErr_Restore(type, value, trace);
  return is_well && none;
}

// Does something under the lock of the step, or leaves it to Python where that is not free.
template <class Function>
Outcome under_lock(const Work& work, Function&& function) {
  const Outcome taken = is_taken(work);
  if (taken != Outcome::DONE) return taken;
  Outcome outcome = Outcome::FAILED;
  try {
    outcome = function();
  } catch (...) {  // an allocation has failed
    torch::translate_exception_to_python(std::current_exception());
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const bool is_well = is_given_back(work);
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

inline bool has_counted(const Moves& moves, Counter counter, Reference more) {
  return moves.counters.has_added(moves.part(STATS), counter, std::move(more));
}

inline PyObject* value_at(const Moves& moves, int64_t number) {
  Reference key(PyLong_FromLongLong(number));
  return key ? PyDict_GetItemWithError(moves.part(PLANNED), key.get()) : nullptr;
}

// Whether a set of Python's has a number. -1: an error.
inline int has_number(PyObject* set, int64_t number) {
  Reference key(PyLong_FromLongLong(number));
  return key ? PySet_Contains(set, key.get()) : -1;
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
inline Reference started(const Moves& moves, PyObject* method, PyObject* storage, int64_t offset_bytes) {
  const Slots& arenas = moves.arenas;
  PyObject* const arena = moves.part(ARENA);
  Reference offset(PyLong_FromLongLong(offset_bytes));
  if (!offset) return Reference();
  PyObject* const arguments[] = {arenas.get(arena, ROOM), storage, offset.get()};
  Reference ticket(PyObject_VectorcallMethod(method, arguments, 3, nullptr));
  if (!ticket) return Reference();
  const bool is_to_look = PyDict_Size(arenas.get(arena, UNDER_WAY)) >= arenas.number(arena, NEXT_LOOK);
  if (is_to_look && !has_called(arena, "forget_ended")) return Reference();
  Reference key(PyLong_FromVoidPtr(THPStorage_Unpack(storage).unsafeGetStorageImpl()));
  if (!key || PyDict_SetItem(arenas.get(arena, UNDER_WAY), key.get(), ticket.get()) < 0) return Reference();
  return ticket;
}

// Makes what Python knows as the room of a value. Returns null with an error.
inline Reference place_of(const Moves& moves, int64_t offset_bytes) {
  const Slots& places = moves.places;
  Reference place = places.made(), offset(PyLong_FromLongLong(offset_bytes));
  if (!place || !offset) return Reference();
  places.set(place.get(), PLACE_ARENA, Reference::to(moves.part(ARENA)));
  places.set(place.get(), PLACE_OFFSET, std::move(offset));
  places.set(place.get(), PLACE_HEALTH, Reference::to(moves.part(HEALTH)));
  return place;
}

inline Outcome copy_out(const Moves& moves, PyObject* value, int64_t number) {
  static PyObject* const method = interned("copy_out");
  const Fields& fields = moves.fields;
  if (!has_taken_made(moves, value, number)) return Outcome::FAILED;
  if (fields.is_none(value, Fields::STORAGE)) return Outcome::DONE;  // released by the program before autograd saved it
  if (fields.is_true(value, Fields::IS_COPIED) || !fields.is_none(value, Fields::TICKET)) return Outcome::DONE;
  const Room& room = moves.path().rooms.at(number);
  Reference place = place_of(moves, room.offset_bytes);
  Reference size(PyLong_FromSize_t(storage_in(moves, value).nbytes()));
  if (!place || !size) return Outcome::FAILED;
  fields.set(value, Fields::PLACE, std::move(place));
  fields.set(value, Fields::SIZE_BYTES, Reference::to(size.get()));
  Reference ticket = started(moves, method, fields.get(value, Fields::STORAGE), room.offset_bytes);
  if (!ticket) return Outcome::FAILED;
  fields.set(value, Fields::TICKET, std::move(ticket));
  return has_counted(moves, SWAPPED_OUT, std::move(size)) ? Outcome::DONE : Outcome::FAILED;
}

// Has Python learn how long copies took. The caller has waited for the one of a ticket, which has not failed.
inline bool has_learned(Moves& moves, PyObject* ticket, long long size_bytes, bool is_outwards) {
  static PyObject *const moved_bytes = interned("moved_bytes"), *const copy_ms = interned("copy_ms");
  Reference moved(PyObject_GetAttr(ticket, moved_bytes)), taken_ms(PyObject_GetAttr(ticket, copy_ms));
  if (!moved || !taken_ms) return false;
  const long long spared_bytes = size_bytes - PyLong_AsLongLong(moved.get());
  // What packing takes tells nothing of the tier.
  if (spared_bytes > 0) return has_counted(moves, SPARED, Reference(PyLong_FromLongLong(spared_bytes)));
  if (taken_ms.get() == Py_None) return true;  // the interpreter shuts down
  Timed& timed = moves.timed[is_outwards];
  timed.copies += 1, timed.size_bytes += size_bytes, timed.copy_ms += PyFloat_AsDouble(taken_ms.get());
  if (PyErr_Occurred()) return false;
  if (!timed.is_due()) return true;
  const Timed learned = std::exchange(timed, Timed{0, timed.learned + timed.copies, 0, 0});
  return static_cast<bool>(Reference(PyObject_CallFunction(
      moves.part(LEARN), "OnLd", is_outwards ? Py_True : Py_False, learned.copies, learned.size_bytes, learned.copy_ms)));
}

// Waits for the copy of a value. `has_failed` says whether it went wrong, which is left to Python.
inline bool has_waited(Moves& moves, PyObject* value, bool is_outwards, bool& has_failed) {
  static PyObject *const wait = interned("wait"), *const error_name = interned("error");
  Reference ticket = Reference::to(moves.fields.get(value, Fields::TICKET));
  Reference waited_ms(PyObject_CallMethodNoArgs(ticket.get(), wait));
  if (!waited_ms) return false;
  Reference error(PyObject_GetAttr(ticket.get(), error_name));
  if (!error) return false;
  has_failed = error.get() != Py_None;
  if (has_failed) return true;
  return has_learned(moves, ticket.get(), moves.fields.number(value, Fields::SIZE_BYTES), is_outwards) &&
      (PyFloat_AsDouble(waited_ms.get()) == 0.0 || has_counted(moves, STALL, std::move(waited_ms)));
}

inline Outcome free(Moves& moves, PyObject* value) {
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
  static PyObject* const method = interned("copy_in");
  const Fields& fields = moves.fields;
  if (!fields.is_none(value, Fields::STORAGE) || !fields.is_true(value, Fields::IS_COPIED)) return Outcome::DONE;
  const int is_wanted = fields.number(value, Fields::HANDLES) > 0 ? 1 : has_number(moves.part(TO_DROP), number);
  if (is_wanted != 1) return is_wanted < 0 ? Outcome::FAILED : Outcome::DONE;
  const auto size_bytes = static_cast<size_t>(fields.number(value, Fields::SIZE_BYTES));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), size_bytes, c10::GetCPUAllocator(), true);
  Reference wrapped(THPStorage_Wrap(storage));
  if (!wrapped) return Outcome::FAILED;
  Reference ticket = started(moves, method, wrapped.get(), moves.path().rooms.at(number).offset_bytes);
  if (!ticket) return Outcome::FAILED;
  fields.set(value, Fields::STORAGE, std::move(wrapped));
  fields.set(value, Fields::TICKET, std::move(ticket));
  return has_counted(moves, SWAPPED_IN, Reference::to(fields.get(value, Fields::SIZE_BYTES))) ? Outcome::DONE
                                                                                             : Outcome::FAILED;
}

inline Outcome wait(Moves& moves, PyObject* value) {
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

}  // namespace watch

// Values that a plan has made again, and the replays that make them: what `executor.planned_values` and `executor.leaving` do,
// without Python. It works where calls were recorded here and where a sample of what a replay gives is compared, as in most
// steps, or nothing of it. Proofs, copies, differences, and calls that read what has changed are left to Python.
#pragma once
#include "checksum.h"
#include "moves.h"

namespace watch {

constexpr size_t WHOLE_BYTES = 64 << 10;  // up to here a sample is the whole storage, which is read about as fast
constexpr size_t SAMPLED_WORDS = 256;

// A checksum of the whole of a small storage, and of words that are spread over a large one. Others are taken in Python, so
// it is compared with those alone that were taken here.
inline uint64_t sample_of(const c10::Storage& storage) {
  const auto* bytes = static_cast<const char*>(storage.data());
  copier::Checksum checksum;
  if (storage.nbytes() <= WHOLE_BYTES) {
    checksum.read(bytes, storage.nbytes());
    return checksum.value();
  }
  const size_t words = storage.nbytes() / sizeof(uint64_t);
  const size_t stride = (words / SAMPLED_WORDS) | 1;  // odd, so that it meets all columns of a matrix of even width
  c10::SmallVector<uint64_t, 2 * SAMPLED_WORDS> sample;
  for (size_t word = 0; word < words; word += stride) {
    uint64_t found;
    std::memcpy(&found, bytes + word * sizeof found, sizeof found);
    sample.push_back(found);
  }
  checksum.read(reinterpret_cast<const char*>(sample.data()), sample.size() * sizeof(uint64_t));
  return checksum.value();
}

// `sample_checksum(storage)`, of one on the CPU.
inline PyObject* sample_checksum(PyObject*, PyObject* storage) {
  HANDLE_TH_ERRORS
  if (!THPStorage_Check(storage)) return PyErr_Format(PyExc_TypeError, "a checksum is that of a storage");
  const c10::Storage& bytes = THPStorage_Unpack(storage);
  if (!bytes.device().is_cpu()) return PyErr_Format(PyExc_ValueError, "a sample is taken on the CPU");
  return PyLong_FromUnsignedLongLong(sample_of(bytes));
  END_HANDLE_TH_ERRORS
}

// What replays are compared with -----------------------------------------------------------------------------------------

// Whether a witness is one of a sample that was taken here, of bytes that only a replay will give again.
inline bool is_sample(const Moves& moves, PyObject* witness) {
  const Slots& slots = moves.witnesses;
  return slots.is_known(witness) && slots.get(witness, LEVEL) == moves.part(SAMPLE) &&
      slots.get(witness, CHECKSUM_OF) == moves.part(CHECKSUM) && slots.is_none(witness, BYTES);
}

// Whether no more than such a sample of a value is compared.
inline bool is_lightly_looked_at(const Moves& moves, PyObject* value) {
  PyObject* const witness = moves.fields.get(value, Fields::WITNESS);
  return witness == Py_None || is_sample(moves, witness);
}

inline bool has_witness(const Moves& moves, PyObject* value, int64_t number, const c10::Storage& storage) {
  const Slots& slots = moves.witnesses;
  Reference witness = slots.made(), index(PyLong_FromLongLong(number));
  Reference recipe(index ? PyTuple_Pack(2, moves.part(PLAN), index.get()) : nullptr);
  Reference digest(PyLong_FromUnsignedLongLong(sample_of(storage)));
  if (!witness || !recipe || !digest) return false;
  slots.set(witness.get(), RECIPE, std::move(recipe));
  slots.set(witness.get(), LEVEL, Reference::to(moves.part(SAMPLE)));
  slots.set(witness.get(), CHECKSUM_OF, Reference::to(moves.part(CHECKSUM)));
  slots.set(witness.get(), DIGEST, std::move(digest));
  for (const auto field : {BYTES, COPY, COPYING}) slots.set_none(witness.get(), field);
  moves.fields.set(value, Fields::WITNESS, std::move(witness));
  return true;
}

// Remembers what a value holds that autograd saves and a replay is to give again.
inline Outcome watch_over(Moves& moves, PyObject* value, int64_t number, const c10::Storage& storage) {
  const Fields& fields = moves.fields;
  State& state = **moves.state;
  if (!fields.is_none(value, Fields::STORAGE) || !fields.is_none(value, Fields::WITNESS)) return Outcome::DONE;
  const bool is_trusted = !fields.is_true(value, Fields::HANDED_OUT) && PySet_GET_SIZE(moves.part(TAINTED)) == 0;
  if (!is_trusted || !state.recorded.of(moves.path().made_at(number))) return Outcome::IN_PYTHON;
  if (moves.sampled == nullptr) moves.sampled = PyObject_CallNoArgs(moves.part(SAMPLED));
  Reference index(PyLong_FromLongLong(number));
  if (moves.sampled == nullptr || !index) return Outcome::FAILED;
  PyObject* const is_sampled = PyDict_GetItemWithError(moves.sampled, index.get());
  if (is_sampled == nullptr) return PyErr_Occurred() ? Outcome::FAILED : Outcome::IN_PYTHON;
  if (is_sampled != Py_True || storage.nbytes() == 0) return Outcome::DONE;
  return has_witness(moves, value, number, storage) ? Outcome::DONE : Outcome::FAILED;
}

// Replays ------------------------------------------------------------------------------------------------------------------

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

// What a replay reads of the step, each once. An op that writes gets a copy, unless the plan needs the old contents no more.
class Ingredients {
 public:
  Ingredients(Moves& moves, const Move& replay) : moves_(moves), replay_(replay) {}

  // Finds all of it, and changes nothing yet.
  Outcome find(const Recipe& recipe) {
    for (const TensorArgument& each : recipe.tensors) {
      if (each.origin != Origin::STEP || find(each.value) != nullptr) continue;
      Found found{each.value, (*moves_.state)->sources->get(each.value), each.is_written, true};
      if (!found.storage) {
        PyObject* const value = value_at(moves_, each.value);
        if (value == nullptr) return PyErr_Occurred() ? Outcome::FAILED : Outcome::IN_PYTHON;
        if (!moves_.fields.is_known(value)) return Outcome::IN_PYTHON;
        if (!has_taken_made(moves_, value, each.value)) return Outcome::FAILED;
        const Outcome outcome = read(moves_, value, found.storage);
        if (outcome != Outcome::DONE) return outcome;
        found.is_held = false;
      }
      found_.push_back(std::move(found));
    }
    return Outcome::DONE;
  }

  void prepare() {
    const auto& in_place = replay_.in_place;
    for (Found& each : found_) {
      if (!each.is_written) continue;
      const bool is_last = each.is_held && std::find(in_place.begin(), in_place.end(), each.value) != in_place.end();
      if (is_last) (*moves_.state)->sources->take(each.value);
      else each.storage = copied(each.storage);
    }
  }

  const c10::Storage& of(const TensorArgument& argument) { return find(argument.value)->storage; }

 private:
  struct Found {
    int64_t value;
    c10::Storage storage;
    bool is_written, is_held;  // for replays
  };

  Found* find(int64_t value) {
    for (Found& each : found_)
      if (each.value == value) return &each;
    return nullptr;
  }

  Moves& moves_;
  const Move& replay_;
  c10::SmallVector<Found, 4> found_;
};

// Takes what a replay gave for a value that stays. What differs is told, and made up for, in Python.
inline Outcome put(Moves& moves, int64_t number, const c10::Storage& storage) {
  const Fields& fields = moves.fields;
  PyObject* const value = value_at(moves, number);
  if (value == nullptr) {
    if (PyErr_Occurred()) return Outcome::FAILED;
    (*moves.state)->sources->put(number, storage);
    return Outcome::DONE;
  }
  const int is_wanted = fields.number(value, Fields::HANDLES) > 0 ? 1 : has_number(moves.part(TO_DROP), number);
  if (is_wanted < 0) return Outcome::FAILED;
  if (is_wanted == 0 || !fields.is_none(value, Fields::STORAGE)) return Outcome::DONE;
  const Reference in_program = there(fields.get(value, Fields::IN_PROGRAM));
  if (in_program && THPStorage_Unpack(in_program.get()).nbytes() != 0)
    return has_put(moves, value, THPStorage_Unpack(in_program.get())) ? Outcome::DONE : Outcome::FAILED;
  PyObject* const witness = fields.get(value, Fields::WITNESS);
  if (witness != Py_None) {
    const bool is_same = is_sample(moves, witness) &&
        PyLong_AsUnsignedLongLong(moves.witnesses.get(witness, DIGEST)) == sample_of(storage);
    if (!is_same) {
      Reference index(PyLong_FromLongLong(number)), wrapped(THPStorage_Wrap(storage));
      if (!index || !wrapped) return Outcome::FAILED;
      Reference none(PyObject_CallFunctionObjArgs(moves.part(PUT), index.get(), wrapped.get(), nullptr));
      return none ? Outcome::DONE : Outcome::FAILED;
    }
    if (!moves.checks.has_added(moves.part(CHECKED), 0, Reference(PyLong_FromLong(1)))) return Outcome::FAILED;
  }
  return has_put(moves, value, storage) ? Outcome::DONE : Outcome::FAILED;
}

// Runs the op of a slot again, and keeps those of its results that stay. `IN_PYTHON`: nothing was done.
inline Outcome replay(Moves& moves, const Move& action) {
  State& state = **moves.state;
  const Path& path = moves.path();
  const int64_t position = action.target - path.first_slot;
  const auto recipe = state.recorded.of(position);
  if (!recipe || !is_as_then(*recipe) || is_refused(*recipe)) return Outcome::IN_PYTHON;
  for (const int64_t number : action.outputs) {
    PyObject* const value = value_at(moves, number);
    if (value == nullptr && PyErr_Occurred()) return Outcome::FAILED;
    if (value != nullptr && (!moves.fields.is_known(value) || !is_lightly_looked_at(moves, value))) return Outcome::IN_PYTHON;
  }
  Storages made;
  {
    Ingredients ingredients(moves, action);
    const Outcome found = ingredients.find(*recipe);
    if (found != Outcome::DONE) return found;
    ingredients.prepare();
    made = made_again(*recipe, ingredients);
  }
  const auto& writes = (*state.path).at(static_cast<size_t>(position)).writes;
  if (made.size() != writes.size()) throw std::runtime_error("a replay gave more or fewer values than its op");
  if (!has_counted(moves, RECOMPUTED, Reference(PyLong_FromLong(1)))) return Outcome::FAILED;
  for (size_t index = 0; index < made.size(); ++index) {
    const bool stays = std::find(action.outputs.begin(), action.outputs.end(), writes[index]) != action.outputs.end();
    const Outcome outcome = stays ? put(moves, writes[index], made[index]) : Outcome::DONE;
    if (outcome != Outcome::DONE) return outcome;
  }
  return Outcome::DONE;
}

// Whether all that a value has can be let go of here. -1: an error.
inline int is_easily_let_go(const Moves& moves, PyObject* value, int64_t number) {
  const Fields& fields = moves.fields;
  if (!fields.is_known(value) || !fields.is_none(value, Fields::TICKET)) return 0;
  PyObject* const witness = fields.get(value, Fields::WITNESS);
  if (witness == Py_None) return 1;
  if (!moves.witnesses.is_known(witness) || !moves.witnesses.is_none(witness, BYTES)) return 0;
  Reference key(PyLong_FromLongLong(number));
  const int is_held_back = key ? PyDict_Contains(moves.part(HELD_BACK), key.get()) : -1;
  return is_held_back < 0 ? -1 : is_held_back == 0;
}

inline void let_go(const Moves& moves, PyObject* value, int64_t number) {
  const c10::Storage made = (*moves.state)->made->take(number);
  moves.fields.set_none(value, Fields::STORAGE);
}

// Ends the hold of the plan on a value, unless slots run out of order and a replay that was to come before is still to come.
inline Outcome drop(Moves& moves, int64_t slot, int64_t number) {
  const Path& path = moves.path();
  PyObject* const ahead = moves.part(AHEAD);
  const bool has_replays = (path.minds(number)) && PyList_GET_SIZE(ahead) != 0;
  if (has_replays && PyLong_AsLongLong(PyList_GET_ITEM(ahead, PyList_GET_SIZE(ahead) - 1)) < slot) return Outcome::DONE;
  PyObject* const value = value_at(moves, number);
  if (value == nullptr && PyErr_Occurred()) return Outcome::FAILED;
  const bool goes = value != nullptr && moves.fields.is_known(value) && moves.fields.number(value, Fields::HANDLES) == 0;
  const int is_easy = goes ? is_easily_let_go(moves, value, number) : 1;
  if (is_easy != 1) return is_easy < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;
  Reference index(PyLong_FromLongLong(number));
  if (!index || PySet_Discard(moves.part(TO_DROP), index.get()) < 0) return Outcome::FAILED;
  const c10::Storage held = (*moves.state)->sources->take(number);
  if (goes) let_go(moves, value, number);
  return Outcome::DONE;
}

}  // namespace watch

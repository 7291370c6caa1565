// The ops that a plan expects, as they ran the last time.
#pragma once
#include "operators.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace watch {

// What the results of an op were: all tensors among them, in order.
struct Shape {
  c10::ScalarType dtype;
  c10::SmallVector<int64_t, 5> sizes;
};

struct Recognised {
  const c10::FunctionSchema* schema;
  std::vector<Shape> shapes;
};

// One op of the path. What it looks like is learnt when it was recognised in Python for the first time.
struct Expected {
  std::vector<int64_t> writes;                // the values that it makes
  std::optional<std::vector<int64_t>> reads;  // those that are at hand where it runs again; empty: not known
  bool is_due = false;          // something is to be done before it
  bool is_replayed = false;     // its call is to be recorded
  bool is_awaited = false;      // Python is told of what it makes
  std::atomic<const Recognised*> recognised{nullptr};
};

// What happens at a slot: something to a value, or a replay of the op of another slot. All else is done in Python.
struct Move {
  enum Kind { COPY_OUT, FREE, COPY_IN, WAIT, REPLAY, DROP, OTHER } kind;
  int64_t target;
  std::vector<int64_t> outputs, in_place;  // of a replay: the values that stay, and those that it may overwrite
};

// Where a value is copied to, and how large it was planned to be.
struct Room {
  int64_t offset_bytes, size_bytes;
};

class Path {
 public:
  explicit Path(size_t count) : ops_(count) {}
  ~Path() {
    for (auto& op : ops_) delete op.recognised.load();
  }
  size_t size() const { return ops_.size(); }
  Expected& at(size_t position) { return ops_[position]; }

  // Values that a plan moves, those of them that it copies, those that its replays read, and those with whose first read
  // something is due.
  std::vector<bool> moved, swapped, sources, anchored;

  // Of values that are copied and come back, or are made again, and nothing else: which they are, which of them are made
  // again, and the room of the others. What is done at each slot. `anchor_of`: with the first read of which value a slot
  // begins.
  std::vector<bool> simple, recomputed;
  std::unordered_map<int64_t, Room> rooms;
  std::unordered_map<int64_t, std::vector<Move>> moves;
  std::unordered_map<int64_t, int64_t> anchor_of;
  int64_t first_slot = 0;

  // Whether results may have other sizes than they had, in as many dimensions.
  bool has_any_sizes = false;

  static bool holds(const std::vector<bool>& set, int64_t number) {
    return number >= 0 && static_cast<size_t>(number) < set.size() && set[number];
  }

  // Whether the plan moves a value, or replays read it.
  bool minds(int64_t number) const { return holds(moved, number) || holds(sources, number); }

  // The position of the op that makes a value, or -1.
  int64_t made_at(int64_t number) const {
    const auto found = made_at_.find(number);
    return found == made_at_.end() ? -1 : found->second;
  }

  void makes(size_t position, std::vector<int64_t> numbers) {
    for (const int64_t number : numbers) made_at_[number] = static_cast<int64_t>(position);
    ops_[position].writes = std::move(numbers);
  }

  // Called under the interpreter's lock. Other threads may be reading.
  void learn(size_t position, const c10::FunctionSchema* schema, const std::vector<at::Tensor>& outputs) {
    if (ops_[position].recognised.load(std::memory_order_relaxed) != nullptr) return;
    auto* learnt = new Recognised{schema, {}};
    for (const at::Tensor& output : outputs) {
      const auto sizes = output.sizes();
      learnt->shapes.push_back({output.scalar_type(), {sizes.begin(), sizes.end()}});
    }
    ops_[position].recognised.store(learnt, std::memory_order_release);
  }

  // Learns what another path of the same ops has learnt. Called under the interpreter's lock.
  void learn_from(const Path& other) {
    for (size_t position = 0; position < std::min(size(), other.size()); ++position) {
      const Recognised* learnt = other.ops_[position].recognised.load(std::memory_order_acquire);
      if (learnt == nullptr || ops_[position].recognised.load(std::memory_order_relaxed) != nullptr) continue;
      ops_[position].recognised.store(new Recognised(*learnt), std::memory_order_release);
    }
  }

  bool agrees(const Recognised& expected, const c10::FunctionSchema* schema, const at::Tensor* const* outputs,
              size_t count) const {
    if (expected.schema != schema || expected.shapes.size() != count) return false;
    for (size_t index = 0; index < count; ++index) {
      const Shape& shape = expected.shapes[index];
      if (outputs[index]->scalar_type() != shape.dtype || !agrees(outputs[index]->sizes(), shape.sizes)) return false;
    }
    return true;
  }

 private:
  bool agrees(c10::IntArrayRef sizes, c10::IntArrayRef expected) const {
    return has_any_sizes ? sizes.size() == expected.size() : sizes == expected;
  }

  std::vector<Expected> ops_;
  std::unordered_map<int64_t, int64_t> made_at_;
};

// In Python: `Path(writes, reads, due, replayed, awaited, moved, swapped, sources, anchored)`: a tuple of values, another one
// or None, and three flags for each op; four lists of values.
struct PathObject {
  PyObject_HEAD
  std::shared_ptr<Path>* path;
};

inline bool numbers_in(PyObject* sequence, std::vector<int64_t>& numbers) {
  Reference items(PySequence_Fast(sequence, "values are given as a sequence"));
  if (!items) return false;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index)
    numbers.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.get(), index)));
  return !PyErr_Occurred();
}

inline bool set_of(PyObject* sequence, std::vector<bool>& set) {
  std::vector<int64_t> numbers;
  if (!numbers_in(sequence, numbers)) return false;
  for (const int64_t number : numbers) {
    if (number < 0) continue;
    if (static_cast<size_t>(number) >= set.size()) set.resize(number + 1);
    set[number] = true;
  }
  return true;
}

inline PyObject* path_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *writes, *reads, *due, *replayed, *awaited, *moved, *swapped, *sources, *anchored;
  if (!PyArg_ParseTuple(arguments, "O!O!SSSOOOO", &PyTuple_Type, &writes, &PyTuple_Type, &reads, &due, &replayed,
                        &awaited, &moved, &swapped, &sources, &anchored))
    return nullptr;
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(writes));
  if (static_cast<size_t>(PyTuple_GET_SIZE(reads)) != count)
    return PyErr_Format(PyExc_ValueError, "a path has what each op makes and reads");
  for (PyObject* flags : {due, replayed, awaited})
    if (static_cast<size_t>(PyBytes_GET_SIZE(flags)) != count)
      return PyErr_Format(PyExc_ValueError, "a path has three flags for each op");
  auto path = std::make_shared<Path>(count);
  for (size_t position = 0; position < count; ++position) {
    Expected& op = path->at(position);
    std::vector<int64_t> numbers;
    if (!numbers_in(PyTuple_GET_ITEM(writes, position), numbers)) return nullptr;
    path->makes(position, std::move(numbers));
    PyObject* const read = PyTuple_GET_ITEM(reads, position);
    if (read != Py_None && !numbers_in(read, op.reads.emplace())) return nullptr;
    op.is_due = PyBytes_AS_STRING(due)[position] != 0;
    op.is_replayed = PyBytes_AS_STRING(replayed)[position] != 0;
    op.is_awaited = PyBytes_AS_STRING(awaited)[position] != 0;
  }
  if (!set_of(moved, path->moved) || !set_of(swapped, path->swapped) || !set_of(sources, path->sources) ||
      !set_of(anchored, path->anchored))
    return nullptr;
  auto* self = reinterpret_cast<PathObject*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->path = new std::shared_ptr<Path>(std::move(path));
  return reinterpret_cast<PyObject*>(self);
}

inline PyTypeObject* path_type();

inline PyObject* path_learn_from(PyObject* self, PyObject* other) {
  if (Py_TYPE(other) != path_type()) return PyErr_Format(PyExc_TypeError, "a path learns from another Path");
  (*reinterpret_cast<PathObject*>(self)->path)->learn_from(**reinterpret_cast<PathObject*>(other)->path);
  Py_RETURN_NONE;
}

// `plan(first_slot, rooms, recomputed, moves, anchors)`, before any step: rows of a value, its offset and its size; values;
// rows of a slot, a kind of move by its number, its target, and two sequences of values; and of a value and its slot.
inline PyObject* path_plan(PyObject* self, PyObject* arguments) {
  Path& path = **reinterpret_cast<PathObject*>(self)->path;
  long long first_slot, number, first, second;
  PyObject *rooms, *recomputed, *moves, *anchors, *outputs, *in_place;
  if (!PyArg_ParseTuple(arguments, "LO!OO!O!", &first_slot, &PyList_Type, &rooms, &recomputed, &PyList_Type, &moves, &PyList_Type, &anchors))
    return nullptr;
  path.first_slot = first_slot;
  Reference copied(PyList_New(0));
  for (Py_ssize_t row = 0; row < PyList_GET_SIZE(rooms); ++row) {
    if (!PyArg_ParseTuple(PyList_GET_ITEM(rooms, row), "LLL", &number, &first, &second)) return nullptr;
    path.rooms[number] = {first, second};
    Reference value(PyLong_FromLongLong(number));
    if (!value || PyList_Append(copied.get(), value.get()) < 0) return nullptr;
  }
  for (Py_ssize_t row = 0; row < PyList_GET_SIZE(moves); ++row) {
    if (!PyArg_ParseTuple(PyList_GET_ITEM(moves, row), "LLLOO", &number, &first, &second, &outputs, &in_place)) return nullptr;
    Move& move = path.moves[number].emplace_back(Move{static_cast<Move::Kind>(first), second, {}, {}});
    if (!numbers_in(outputs, move.outputs) || !numbers_in(in_place, move.in_place)) return nullptr;
  }
  for (Py_ssize_t row = 0; row < PyList_GET_SIZE(anchors); ++row) {
    if (!PyArg_ParseTuple(PyList_GET_ITEM(anchors, row), "LL", &number, &first)) return nullptr;
    path.anchor_of[number] = first;
  }
  if (!set_of(copied.get(), path.simple) || !set_of(recomputed, path.simple) || !set_of(recomputed, path.recomputed))
    return nullptr;
  Py_RETURN_NONE;
}

// `take_any_sizes()`: from now on, results may have other sizes than they had.
inline PyObject* path_take_any_sizes(PyObject* self, PyObject*) {
  (*reinterpret_cast<PathObject*>(self)->path)->has_any_sizes = true;
  Py_RETURN_NONE;
}

inline void path_dealloc(PyObject* self) {
  delete reinterpret_cast<PathObject*>(self)->path;
  Py_TYPE(self)->tp_free(self);
}

inline PyTypeObject* path_type() {
  static PyMethodDef methods[] = {
      {"learn_from", path_learn_from, METH_O, nullptr},
      {"plan", path_plan, METH_VARARGS, nullptr},
      {"take_any_sizes", path_take_any_sizes, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_methods, methods},
      {Py_tp_new, reinterpret_cast<void*>(path_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(path_dealloc)},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Path", sizeof(PathObject), 0, Py_TPFLAGS_DEFAULT, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

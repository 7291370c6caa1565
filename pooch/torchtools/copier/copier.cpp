// A thread that copies storages to and from files. It runs no Python, and whoever waits for it lets other threads run.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "thread.h"

#include <unordered_map>
#include <utility>

namespace copier {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds PATIENCE{50};  // after which whoever waits looks for Ctrl-C

PyObject* failed = nullptr;  // `failed(failure, code)` returns the error of a copy, or of a thread that cannot start
PyObject* memory_address = nullptr;  // of a storage: asking for it by its method would count as handing it out

// Lets other threads of Python run. A thread that comes back while the interpreter shuts down is unwound from there.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() noexcept(false) { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

// A copy with what is kept alive for it until somebody learns that it has ended, under the interpreter's lock: the thread
// that copies never waits for that.
struct Submitted {
  Copy copy;
  std::shared_ptr<Queue> queue;
  PyObject* storage = nullptr;  // null once it was released
  PyObject* file = nullptr;
};

// Ends a copy that no thread will make.
void end(Submitted& submitted, Failure why) {
  submitted.copy.fail(why);
  submitted.copy.is_done = true;
}

using SubmittedPointer = std::shared_ptr<Submitted>;

struct Copier {
  PyObject_HEAD
  std::shared_ptr<Queue>* queue;
  std::deque<SubmittedPointer>* submitted;  // in order, those that nobody has released yet among them
  PyObject* note;
  Py_ssize_t chunk_bytes, noted_bytes;
  bool packs;
};

struct Room {
  PyObject_HEAD
  PyObject *copier, *file;
  int descriptor;
  bool is_checked;
  std::unordered_map<int64_t, SubmittedPointer>* written;  // by offset
  SubmittedPointer* last;
};

struct Ticket {
  PyObject_HEAD
  PyObject *copier, *error;
  SubmittedPointer* submitted;
};

PyTypeObject *room_type = nullptr, *ticket_type = nullptr;

template <class Object>
Object* as(PyObject* self) {
  return reinterpret_cast<Object*>(self);
}

PyObject* error_of(Failure failure, int code) {
  return PyObject_CallFunction(failed, "ii", static_cast<int>(failure), code);
}

// Releases what was kept alive for a copy that has ended, and notes how fast it was.
bool release(Copier* copier, Submitted& submitted) {
  PyObject* const storage = std::exchange(submitted.storage, nullptr);
  if (storage == nullptr) return true;
  PyObject* const file = std::exchange(submitted.file, nullptr);
  Py_DECREF(storage);
  Py_DECREF(file);
  const Copy& copy = submitted.copy;
  if (copy.failure != Failure::NONE || copy.size < static_cast<size_t>(copier->noted_bytes)) return true;
  if (copy.moved < copy.size) return true;  // what is packed tells nothing of the file
  PyObject* none = PyObject_CallFunction(copier->note, "OLd", copy.is_outwards ? Py_True : Py_False,
                                         static_cast<long long>(copy.size), copy.seconds);
  Py_XDECREF(none);
  return none != nullptr;
}

// Releases all that has ended, in the order in which it was submitted.
bool release_ended(Copier* copier) {
  auto& submitted = *copier->submitted;
  while (!submitted.empty() && submitted.front()->copy.is_done.load(std::memory_order_acquire)) {
    const SubmittedPointer first = std::move(submitted.front());
    submitted.pop_front();
    if (!release(copier, *first)) return false;
  }
  return true;
}

// Copier -----------------------------------------------------------------------------------------------------------------

// Starts a thread, if there is none in this process. What a forked process has of the thread of its parent stays as it
// is: a lock may be held there that nobody will release.
bool ensure_thread(Copier* copier) {
  if (copier->queue != nullptr && (*copier->queue)->process == getpid()) return true;
  try {
    auto* queue = new std::shared_ptr<Queue>(Queue::started(static_cast<size_t>(copier->chunk_bytes)));
    copier->queue = queue;
    if (!copier->submitted->empty()) copier->submitted = new std::deque<SubmittedPointer>();
    return true;
  } catch (const std::exception&) {  // no memory for its buffer, or no room for another thread
    PyObject* error = error_of(Failure::NO_THREAD, static_cast<int>(copier->chunk_bytes));
    if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
    Py_XDECREF(error);
    return false;
  }
}

// `Copier(chunk_bytes, noted_bytes, note, packs)`: `note(is_outwards, size_bytes, elapsed_s)` is told of copies of that
// size on. Chunks of at most two different words are packed where `packs`.
PyObject* copier_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  Py_ssize_t chunk_bytes, noted_bytes;
  PyObject* note;
  int packs;
  if (!PyArg_ParseTuple(arguments, "nnOp", &chunk_bytes, &noted_bytes, &note, &packs)) return nullptr;
  auto* self = as<Copier>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->submitted = new std::deque<SubmittedPointer>();
  self->note = Py_NewRef(note);
  self->chunk_bytes = chunk_bytes, self->noted_bytes = noted_bytes, self->packs = packs != 0;
  if (!ensure_thread(self)) return Py_DECREF(self), nullptr;
  return reinterpret_cast<PyObject*>(self);
}

// Ends the thread of this process, once it has completed what was submitted.
PyObject* copier_stop(PyObject* object, PyObject*) {
  auto* self = as<Copier>(object);
  if (self->queue == nullptr || (*self->queue)->process != getpid()) Py_RETURN_NONE;
  const std::shared_ptr<Queue> queue = *self->queue;
  queue->stop();
  for (bool is_over = false; !is_over;) {
    {
      const Unlocked others_run;
      is_over = queue->wait_for_end(PATIENCE);
    }
    if (!is_over && PyErr_CheckSignals() < 0) return nullptr;
  }
  if (!release_ended(self)) return nullptr;
  Py_RETURN_NONE;
}

PyObject* copier_is_alive(PyObject* object, PyObject*) {
  auto* self = as<Copier>(object);
  return PyBool_FromLong(self->queue != nullptr && (*self->queue)->process == getpid() &&
                         !(*self->queue)->wait_for_end(milliseconds(0)));
}

// Whoever frees it has stopped it. Where that did not happen, what the thread works on stays.
void copier_dealloc(PyObject* object) {
  auto* self = as<Copier>(object);
  const bool is_idle = self->queue == nullptr || ((*self->queue)->process == getpid() && self->submitted->empty());
  if (is_idle) delete self->submitted, delete self->queue;
  Py_XDECREF(self->note);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// `room(file, descriptor, is_checked)`: room in a file, which is kept alive.
PyObject* copier_room(PyObject* object, PyObject* arguments) {
  PyObject* file;
  int descriptor, is_checked;
  if (!PyArg_ParseTuple(arguments, "Oip", &file, &descriptor, &is_checked)) return nullptr;
  auto* room = as<Room>(room_type->tp_alloc(room_type, 0));
  if (room == nullptr) return nullptr;
  room->copier = Py_NewRef(object), room->file = Py_NewRef(file);
  room->descriptor = descriptor, room->is_checked = is_checked != 0;
  room->written = new std::unordered_map<int64_t, SubmittedPointer>();
  room->last = new SubmittedPointer();
  return reinterpret_cast<PyObject*>(room);
}

// Room -------------------------------------------------------------------------------------------------------------------

// Takes a number that Python has returned, or its error.
bool is_number(PyObject* found, long long& number) {
  if (found == nullptr) return false;
  number = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return !PyErr_Occurred();
}

PyObject* submit(PyObject* object, PyObject* const* arguments, Py_ssize_t count, bool is_outwards) {
  static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
  auto* self = as<Room>(object);
  auto* copier = as<Copier>(self->copier);
  if (count != 2) return PyErr_Format(PyExc_TypeError, "a storage and an offset are given");
  long long address, size;
  const int64_t offset = PyLong_AsLongLong(arguments[1]);
  if (PyErr_Occurred() || !is_number(PyObject_CallOneArg(memory_address, arguments[0]), address)) return nullptr;
  if (!is_number(PyObject_CallMethodNoArgs(arguments[0], nbytes), size)) return nullptr;
  if (!ensure_thread(copier) || !release_ended(copier)) return nullptr;
  auto* ticket = as<Ticket>(ticket_type->tp_alloc(ticket_type, 0));
  if (ticket == nullptr) return nullptr;
  ticket->copier = Py_NewRef(self->copier);
  try {
    auto submitted = std::make_shared<Submitted>();
    ticket->submitted = new SubmittedPointer(submitted);
    Copy& copy = submitted->copy;
    copy.memory = reinterpret_cast<char*>(address), copy.size = static_cast<size_t>(size);
    copy.descriptor = self->descriptor, copy.offset = offset;
    copy.is_outwards = is_outwards, copy.is_checked = self->is_checked, copy.packs = copier->packs;
    submitted->queue = *copier->queue;
    if (is_outwards) {
      copy.forms.reserve(copy.size / static_cast<size_t>(copier->chunk_bytes) + 1);
      (*self->written)[offset] = submitted;
    } else {
      const auto found = self->written->find(offset);
      if (found != self->written->end()) copy.written = {found->second, &found->second->copy};
    }
    copier->submitted->push_back(submitted);
    submitted->queue->add({submitted, &copy});
    submitted->storage = Py_NewRef(arguments[0]), submitted->file = Py_NewRef(self->file);
    *self->last = std::move(submitted);
  } catch (const std::bad_alloc&) {
    if (ticket->submitted != nullptr) end(**ticket->submitted, Failure::LEFT_BEHIND);
    Py_DECREF(ticket);
    return PyErr_NoMemory();
  }
  return reinterpret_cast<PyObject*>(ticket);
}

PyObject* room_copy_out(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return submit(self, arguments, count, true);
}

PyObject* room_copy_in(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return submit(self, arguments, count, false);
}

// Waits until a copy has ended, and returns false with an error, which is Ctrl-C. While the interpreter shuts down nobody
// waits: the copy holds what it needs.
bool wait_for(Copier* copier, Submitted& submitted) {
  Copy& copy = submitted.copy;
  Queue& queue = *submitted.queue;
  while (!copy.is_done.load(std::memory_order_acquire)) {
    if (is_finalizing()) return true;
    if (queue.process != getpid()) {
      end(submitted, Failure::LEFT_BEHIND);
      break;
    }
    bool is_done;
    {
      const Unlocked others_run;
      is_done = queue.wait(copy, PATIENCE);
    }
    if (!is_done && PyErr_CheckSignals() < 0) return false;
  }
  return release_ended(copier) && release(copier, submitted);
}

// Waits for all copies of the room.
PyObject* room_finish(PyObject* object, PyObject*) {
  auto* self = as<Room>(object);
  auto* copier = as<Copier>(self->copier);
  const SubmittedPointer last = *self->last;
  if (last && !wait_for(copier, *last)) return nullptr;
  self->last->reset();
  Py_RETURN_NONE;
}

void room_dealloc(PyObject* object) {
  auto* self = as<Room>(object);
  delete self->written;
  delete self->last;
  Py_XDECREF(self->copier);
  Py_XDECREF(self->file);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// Ticket -----------------------------------------------------------------------------------------------------------------

PyObject* ticket_is_done(PyObject* object, PyObject*) {
  auto* self = as<Ticket>(object);
  Submitted& submitted = **self->submitted;
  if (!submitted.copy.is_done.load(std::memory_order_acquire)) Py_RETURN_FALSE;
  if (!release(as<Copier>(self->copier), submitted)) return nullptr;
  Py_RETURN_TRUE;
}

PyObject* ticket_wait(PyObject* object, PyObject*) {
  auto* self = as<Ticket>(object);
  Submitted& submitted = **self->submitted;
  auto* copier = as<Copier>(self->copier);
  if (submitted.copy.is_done.load(std::memory_order_acquire))
    return release(copier, submitted) ? PyFloat_FromDouble(0.0) : nullptr;
  const auto begin = Clock::now();
  if (!wait_for(copier, submitted)) return nullptr;
  return PyFloat_FromDouble(1000 * seconds_since(begin));
}

// Returns why the copy failed, or None, also as long as it is under way.
PyObject* ticket_get_error(PyObject* object, void*) {
  auto* self = as<Ticket>(object);
  const Copy& copy = (*self->submitted)->copy;
  if (!copy.is_done.load(std::memory_order_acquire) || copy.failure == Failure::NONE) Py_RETURN_NONE;
  if (self->error == nullptr) {
    PyObject* error = error_of(copy.failure, copy.code);
    if (error == nullptr) return nullptr;
    if (self->error != nullptr) Py_DECREF(error);  // another thread was faster
    else self->error = error;
  }
  return Py_NewRef(self->error);
}

PyObject* ticket_get_copy_ms(PyObject* object, void*) {
  const Copy& copy = (*as<Ticket>(object)->submitted)->copy;
  if (!copy.is_done.load(std::memory_order_acquire) || copy.failure != Failure::NONE) Py_RETURN_NONE;
  return PyFloat_FromDouble(1000 * copy.seconds);
}

// Returns how many bytes the file took or gave, as far as is known.
PyObject* ticket_get_moved_bytes(PyObject* object, void*) {
  const Copy& copy = (*as<Ticket>(object)->submitted)->copy;
  return PyLong_FromSize_t(copy.is_done.load(std::memory_order_acquire) ? copy.moved : copy.size);
}

PyObject* ticket_get_storage(PyObject* object, void*) {
  PyObject* storage = (*as<Ticket>(object)->submitted)->storage;
  return Py_NewRef(storage == nullptr ? Py_None : storage);
}

void ticket_dealloc(PyObject* object) {
  auto* self = as<Ticket>(object);
  delete self->submitted;
  Py_XDECREF(self->error);
  Py_XDECREF(self->copier);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// The module -------------------------------------------------------------------------------------------------------------

PyMethodDef copier_methods[] = {
    {"room", copier_room, METH_VARARGS, nullptr},
    {"stop", copier_stop, METH_NOARGS, nullptr},
    {"is_alive", copier_is_alive, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef room_methods[] = {
    {"copy_out", reinterpret_cast<PyCFunction>(room_copy_out), METH_FASTCALL, nullptr},
    {"copy_in", reinterpret_cast<PyCFunction>(room_copy_in), METH_FASTCALL, nullptr},
    {"finish", room_finish, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyMethodDef ticket_methods[] = {
    {"is_done", ticket_is_done, METH_NOARGS, nullptr},
    {"wait", ticket_wait, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef ticket_attributes[] = {
    {"error", ticket_get_error, nullptr, nullptr, nullptr},
    {"copy_ms", ticket_get_copy_ms, nullptr, nullptr, nullptr},
    {"moved_bytes", ticket_get_moved_bytes, nullptr, nullptr, nullptr},
    {"storage", ticket_get_storage, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject* made(const char* name, size_t size, destructor dealloc, PyMethodDef* methods, PyGetSetDef* attributes,
                   newfunc create) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_methods, methods},
      {attributes == nullptr ? 0 : Py_tp_getset, attributes},
      {0, nullptr}};
  const unsigned flags = Py_TPFLAGS_DEFAULT | (create == nullptr ? Py_TPFLAGS_DISALLOW_INSTANTIATION : 0);
  PyType_Spec spec{name, static_cast<int>(size), 0, flags, slots};
  auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type != nullptr && create != nullptr) type->tp_new = create;
  return type;
}

// `use(failed, memory_address)`: what is called of Python.
PyObject* use(PyObject*, PyObject* functions) {
  PyObject *failure, *address;
  if (!PyArg_ParseTuple(functions, "OO", &failure, &address)) return nullptr;
  Py_XDECREF(std::exchange(failed, Py_NewRef(failure)));
  Py_XDECREF(std::exchange(memory_address, Py_NewRef(address)));
  Py_RETURN_NONE;
}

// `packed_bytes(address, size)`: how many bytes of some memory a copy would move.
PyObject* packed_bytes(PyObject*, PyObject* arguments) {
  long long address;
  Py_ssize_t size;
  if (!PyArg_ParseTuple(arguments, "Ln", &address, &size)) return nullptr;
  constexpr size_t PART_BYTES = size_t{1} << 16;
  char scratch[PART_BYTES / GROUP + 1];
  size_t stored = 0;
  for (size_t start = 0; start < static_cast<size_t>(size); start += PART_BYTES) {
    const size_t part = std::min(PART_BYTES, static_cast<size_t>(size) - start);
    stored += packed(reinterpret_cast<const char*>(address) + start, part, scratch).stored_bytes;
  }
  return PyLong_FromSize_t(stored);
}

PyMethodDef functions[] = {{"use", use, METH_VARARGS, nullptr},
                           {"packed_bytes", packed_bytes, METH_VARARGS, nullptr},
                           {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition{PyModuleDef_HEAD_INIT, "copier", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace copier

PyMODINIT_FUNC PyInit_copier() {
  using namespace copier;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  PyTypeObject* type = made("copier.Copier", sizeof(Copier), copier_dealloc, copier_methods, nullptr, copier_new);
  room_type = made("copier.Room", sizeof(Room), room_dealloc, room_methods, nullptr, nullptr);
  ticket_type = made("copier.Ticket", sizeof(Ticket), ticket_dealloc, ticket_methods, ticket_attributes, nullptr);
  if (type == nullptr || room_type == nullptr || ticket_type == nullptr ||
      PyModule_AddObject(module, "Copier", reinterpret_cast<PyObject*>(type)) < 0)
    return nullptr;
  return module;
}

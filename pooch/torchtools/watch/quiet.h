// Steps that are far away from the budget, for which nothing is to be done: they begin and end here, without Python, as
// long as each is known again. Whatever Python has to see to takes the step over (`take`), and goes on as if it had begun
// it itself.
#pragma once
#include "settings.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <structmember.h>

#include <chrono>
#include <map>

namespace watch {

enum class Phase { IN_PYTHON, BETWEEN_STEPS, IN_CALL, AFTER_CALL, IN_BACKWARD };

// Numbers of threads are given again, these are not.
inline uint64_t thread_serial() {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t serial = ++last;
  return serial;
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What tells steps apart: see `QuietCalls` in Python, which compares the same.
using Signature = std::vector<int64_t>;

struct KnownStep {
  PyObject* kind;  // a `QuietKind`
  int64_t start_bytes, rise_bytes, steps;

  int64_t expected_bytes(int64_t now_bytes) const { return std::max(now_bytes, start_bytes) + rise_bytes; }
};

constexpr size_t MOST_KNOWN = 256;  // others are left to Python

// Parameters by which a step is known again. The model alone holds them.
class Watched {
 public:
  Watched() = default;
  explicit Watched(const at::Tensor& tensor) : implementation_(tensor.getIntrusivePtr()) {}
  at::Tensor get() const { return at::Tensor(implementation_.lock()); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> implementation_{
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
};

// The objects of Python that are looked at in every step.
enum Looked { CALL, LIVE, BUDGET, REQUESTS, GIVEN, OF_TIER, EVICTOR, RUNNING, LISTENING, COMPILER, COMPILING_NOW, LOOKED };

class QuietSteps {
 public:
  std::array<PyObject*, LOOKED> looked{};
  const int64_t* live_bytes = nullptr;
  int64_t *peak_bytes = nullptr, *missed_bytes = nullptr;
  double far_share = 0;

  Phase phase = Phase::IN_PYTHON;
  uint64_t thread = 0;
  PyObject* listeners = nullptr;  // of backward passes: ours alone
  int64_t changes = -1;           // how often modules were given something when the model was looked through
  Watched first, last;            // trained parameters
  std::vector<Watched> frozen;
  std::map<Signature, KnownStep> known;

  // Of the step that runs.
  KnownStep* step = nullptr;
  double begin_s = 0, far_bytes = 0;
  int64_t start_bytes = 0;

  // Counted since Python has asked.
  int64_t steps = 0, highest_bytes = 0, last_bytes = 0, between_bytes = 0;
  double steps_s = 0;

  void forget() {
    std::map<Signature, KnownStep> gone;
    known.swap(gone);
    step = nullptr;
    for (auto& each : gone) Py_DECREF(each.second.kind);
  }

  // Returns whether a number of Python's could be read.
  static bool is_read(PyObject* object, PyObject* name, int64_t& number) {
    Reference found(PyObject_GetAttr(object, name));
    if (found && PyLong_Check(found.get())) number = PyLong_AsLongLong(found.get());
    const bool is_number = found && PyLong_Check(found.get()) && !PyErr_Occurred();
    PyErr_Clear();
    return is_number;
  }

  bool has_earlier_bytes(int64_t& bytes) const {
    static PyObject* const name = interned("_earlier_bytes");
    return is_read(looked[LIVE], name, bytes);
  }

  void reset_peak() {
    *peak_bytes = *live_bytes;
    *missed_bytes = 0;
  }
};

// That of the calling thread which began last.
inline std::weak_ptr<QuietSteps>& stepping() {
  thread_local std::weak_ptr<QuietSteps> quiet;
  return quiet;
}

// In a call of whose model the calling thread is, if the call began here.
inline const QuietSteps*& calling() {
  thread_local const QuietSteps* quiet = nullptr;
  return quiet;
}

// Whether the program computes for training now, without modes, transforms or a tracer around it.
inline bool nothing_is_around() {
  return c10::GradMode::is_enabled() && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
      at::impl::PythonTorchFunctionTLS::stack_len() == 0 &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
      !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

inline bool is_added(PyObject* item, Signature& signature) {
  enum { TENSOR, TEXT, TRUE, FALSE, NONE, INTEGER, FLOAT };
  if (THPVariable_CheckExact(item)) {
    const at::Tensor& tensor = THPVariable_Unpack(item);
    if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_nested()) return false;
    signature.insert(signature.end(), {TENSOR, static_cast<int64_t>(tensor.scalar_type()), tensor.requires_grad(), tensor.dim()});
    signature.insert(signature.end(), tensor.sizes().begin(), tensor.sizes().end());
  } else if (PyUnicode_CheckExact(item)) {
    signature.insert(signature.end(), {TEXT, PyObject_Hash(item)});
  } else if (item == Py_True || item == Py_False) {
    signature.push_back(item == Py_True ? TRUE : FALSE);
  } else if (item == Py_None) {
    signature.push_back(NONE);
  } else if (PyLong_CheckExact(item) || PyFloat_CheckExact(item)) {
    signature.push_back(PyLong_CheckExact(item) ? INTEGER : FLOAT);
  } else {
    return false;
  }
  return true;
}

// Works out what tells the step that a call begins, unless that is not worth finding out.
inline bool is_told(const QuietSteps& quiet, PyObject* model, PyObject* args, PyObject* kwargs, Signature& signature) {
  static PyObject* const training = interned("training");
  const at::Tensor first = quiet.first.get(), last = quiet.last.get();
  if (!first.defined() || !last.defined()) return false;
  for (const Watched& each : quiet.frozen) {
    const at::Tensor parameter = each.get();
    if (!parameter.defined() || parameter.requires_grad()) return false;
  }
  Reference is_training(PyObject_GetAttr(model, training));
  if (is_training.get() != Py_True && is_training.get() != Py_False) return PyErr_Clear(), false;
  signature.insert(signature.end(), {is_training.get() == Py_True, first.grad().defined() || last.grad().defined(),
                                     cast_to(at::kCPU), cast_to(at::kCUDA)});
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(args); ++index)
    if (!is_added(PyTuple_GET_ITEM(args, index), signature)) return false;
  if (kwargs == nullptr) return true;
  PyObject *name, *value;
  for (Py_ssize_t place = 0; PyDict_Next(kwargs, &place, &name, &value);)
    if (!is_added(name, signature) || !is_added(value, signature)) return false;
  return true;
}

inline bool is_compiling(const QuietSteps& quiet) {
  static PyObject* const flag = interned("_is_compiling_flag");
  Reference callback(PyObject_CallNoArgs(quiet.looked[COMPILING_NOW]));
  Reference is_exporting(PyObject_GetAttr(quiet.looked[COMPILER], flag));
  const bool is_none = callback && is_exporting && !PyCallable_Check(callback.get()) && is_exporting.get() == Py_False;
  PyErr_Clear();
  return !is_none;
}

// Whether a call begins a step that is known to be far away from the budget. It has begun then.
inline bool begins(const std::shared_ptr<QuietSteps>& owned, PyObject* model, PyObject* args, PyObject* kwargs) {
  static PyObject *const count = interned("count"), *const have_come = interned("have_come"), *const size = interned("size_bytes");
  QuietSteps& quiet = *owned;
  if (quiet.phase != Phase::BETWEEN_STEPS || quiet.thread != thread_serial() || !nothing_is_around()) return false;
  int64_t changes, budget_bytes, earlier_bytes;
  if (!quiet.is_read(quiet.looked[GIVEN], count, changes) || changes != quiet.changes) return false;
  if (!quiet.is_read(quiet.looked[BUDGET], size, budget_bytes) || !quiet.has_earlier_bytes(earlier_bytes)) return false;
  Reference has_answers(PyObject_GetAttr(quiet.looked[REQUESTS], have_come));
  if (has_answers.get() != Py_False) return PyErr_Clear(), false;
  if (is_compiling(quiet)) return false;
  thread_local Signature signature;
  signature.clear();
  if (!is_told(quiet, model, args, kwargs, signature)) return false;
  const auto found = quiet.known.find(signature);
  if (found == quiet.known.end()) return false;
  const int64_t start_bytes = earlier_bytes + *quiet.live_bytes;
  const double far_bytes = quiet.far_share * static_cast<double>(budget_bytes);
  if (static_cast<double>(found->second.expected_bytes(start_bytes)) > far_bytes) return false;
  quiet.between_bytes = std::max(quiet.between_bytes, earlier_bytes + *quiet.peak_bytes);
  quiet.reset_peak();
  quiet.step = &found->second, quiet.start_bytes = start_bytes, quiet.far_bytes = far_bytes;
  quiet.begin_s = seconds_now();
  quiet.phase = Phase::IN_CALL;
  stepping() = owned;
  return true;
}

// Whether a step is over after its backward pass, and nothing had to be done for it.
inline bool has_ended(QuietSteps& quiet) {
  int64_t earlier_bytes;
  if (quiet.phase != Phase::IN_BACKWARD || quiet.step == nullptr || !quiet.has_earlier_bytes(earlier_bytes)) return false;
  const int64_t peak_bytes = earlier_bytes + *quiet.peak_bytes;
  if (static_cast<double>(peak_bytes) > quiet.far_bytes || PyList_GET_SIZE(quiet.looked[OF_TIER]) != 0) return false;
  ++quiet.steps, ++quiet.step->steps;
  quiet.steps_s += seconds_now() - quiet.begin_s;
  quiet.last_bytes = peak_bytes, quiet.highest_bytes = std::max(quiet.highest_bytes, peak_bytes);
  quiet.reset_peak();
  quiet.phase = Phase::BETWEEN_STEPS;
  return true;
}

// In Python: `QuietSteps(looked, live_address, peak_address, missed_address, far_share)`.
struct Quiet {
  PyObject_HEAD
  std::shared_ptr<QuietSteps>* steps;
};

inline const std::shared_ptr<QuietSteps>& quiet_steps_of(PyObject* self) {
  return *reinterpret_cast<Quiet*>(self)->steps;
}

inline PyObject* quiet_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject* looked;
  long long live_address, peak_address, missed_address;
  double far_share;
  if (!PyArg_ParseTuple(arguments, "O!LLLd", &PyTuple_Type, &looked, &live_address, &peak_address, &missed_address, &far_share))
    return nullptr;
  if (PyTuple_GET_SIZE(looked) != LOOKED || !PyList_Check(PyTuple_GET_ITEM(looked, OF_TIER)))
    return PyErr_Format(PyExc_TypeError, "%d objects are looked at, with a list among them", LOOKED);
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  auto steps = std::make_shared<QuietSteps>();
  for (int index = 0; index < LOOKED; ++index) steps->looked[index] = Py_NewRef(PyTuple_GET_ITEM(looked, index));
  steps->live_bytes = reinterpret_cast<int64_t*>(live_address), steps->peak_bytes = reinterpret_cast<int64_t*>(peak_address);
  steps->missed_bytes = reinterpret_cast<int64_t*>(missed_address), steps->far_share = far_share;
  reinterpret_cast<Quiet*>(self)->steps = new std::shared_ptr<QuietSteps>(std::move(steps));
  return self;
}

inline int quiet_traverse(PyObject* self, visitproc visit, void* arg) {
  const auto* steps = reinterpret_cast<Quiet*>(self)->steps;
  if (steps == nullptr) return 0;
  for (PyObject* each : (*steps)->looked) Py_VISIT(each);
  for (const auto& each : (*steps)->known) Py_VISIT(each.second.kind);
  Py_VISIT((*steps)->listeners);
  return 0;
}

inline int quiet_clear(PyObject* self) {
  QuietSteps& steps = *quiet_steps_of(self);
  steps.phase = Phase::IN_PYTHON;
  steps.forget();
  for (PyObject*& each : steps.looked) Py_CLEAR(each);
  Py_CLEAR(steps.listeners);
  return 0;
}

inline void quiet_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  quiet_clear(self);
  delete reinterpret_cast<Quiet*>(self)->steps;
  Py_TYPE(self)->tp_free(self);
}

// `see(first, last, frozen, changes)`: by which parameters the model is known again, and as of when it was looked through.
inline PyObject* quiet_see(PyObject* self, PyObject* arguments) {
  PyObject *first, *last, *frozen;
  long long changes;
  if (!PyArg_ParseTuple(arguments, "OOO!L", &first, &last, &PyList_Type, &frozen, &changes)) return nullptr;
  std::vector<Watched> watched;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(frozen); ++index) {
    if (!THPVariable_Check(PyList_GET_ITEM(frozen, index))) return PyErr_Format(PyExc_TypeError, "parameters are seen");
    watched.emplace_back(THPVariable_Unpack(PyList_GET_ITEM(frozen, index)));
  }
  if (!THPVariable_Check(first) || !THPVariable_Check(last)) return PyErr_Format(PyExc_TypeError, "parameters are seen");
  QuietSteps& steps = *quiet_steps_of(self);
  steps.first = Watched(THPVariable_Unpack(first)), steps.last = Watched(THPVariable_Unpack(last));
  steps.frozen = std::move(watched), steps.changes = changes;
  Py_RETURN_NONE;
}

// `learn(model, args, kwargs, kind, start_bytes, rise_bytes)`: that a call like this one begins a step of a kind.
inline PyObject* quiet_learn(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *model, *args, *kwargs, *kind;
  long long start_bytes, rise_bytes;
  if (!PyArg_ParseTuple(arguments, "OO!O!OLL", &model, &PyTuple_Type, &args, &PyDict_Type, &kwargs, &kind, &start_bytes, &rise_bytes))
    return nullptr;
  QuietSteps& steps = *quiet_steps_of(self);
  Signature signature;
  if (!is_told(steps, model, args, kwargs, signature)) Py_RETURN_NONE;
  if (steps.known.size() >= MOST_KNOWN && !steps.known.contains(signature)) Py_RETURN_NONE;
  KnownStep& known = steps.known[signature];
  PyObject* const before = std::exchange(known.kind, Py_NewRef(kind));
  known.start_bytes = start_bytes, known.rise_bytes = rise_bytes;
  Py_XDECREF(before);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// `go_on(listeners)`: the next steps of this thread are to begin here, if they are known.
inline PyObject* quiet_go_on(PyObject* self, PyObject* listeners) {
  QuietSteps& steps = *quiet_steps_of(self);
  PyObject* const before = std::exchange(steps.listeners, Py_NewRef(listeners));
  steps.thread = thread_serial(), steps.phase = Phase::BETWEEN_STEPS;
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

inline PyObject* quiet_forget(PyObject* self, PyObject*) {
  quiet_steps_of(self)->forget();
  Py_RETURN_NONE;
}

// Has Python do everything from here on. Returns None if it does already, True between two steps, and otherwise what there is
// to know of the step that runs: (kind, start_bytes, begin_s, far_bytes, is_in_backward).
inline PyObject* quiet_take(PyObject* self, PyObject*) {
  QuietSteps& steps = *quiet_steps_of(self);
  const Phase phase = std::exchange(steps.phase, Phase::IN_PYTHON);
  if (phase == Phase::IN_PYTHON) Py_RETURN_NONE;
  if (phase == Phase::BETWEEN_STEPS) Py_RETURN_TRUE;
  PyObject* is_in_backward = phase == Phase::IN_BACKWARD ? Py_True : Py_False;
  return Py_BuildValue("OLddO", steps.step->kind, static_cast<long long>(steps.start_bytes), steps.begin_s, steps.far_bytes,
                       is_in_backward);
}

// Returns what was counted since the last time: (steps, steps_ms, peak_bytes, last_peak_bytes, between_peak_bytes, {kind:
// steps}). None: nothing.
inline PyObject* quiet_count(PyObject* self, PyObject*) {
  QuietSteps& steps = *quiet_steps_of(self);
  if (steps.steps == 0 && steps.between_bytes == 0) Py_RETURN_NONE;
  Reference of_kinds(PyList_New(0));
  if (!of_kinds) return nullptr;
  for (auto& [signature, known] : steps.known) {
    if (known.steps == 0) continue;
    Reference entry(Py_BuildValue("OL", known.kind, static_cast<long long>(known.steps)));
    if (!entry || PyList_Append(of_kinds.get(), entry.get()) < 0) return nullptr;
  }
  PyObject* found = Py_BuildValue("LdLLLO", static_cast<long long>(steps.steps), steps.steps_s * 1000,
                                  static_cast<long long>(steps.highest_bytes), static_cast<long long>(steps.last_bytes),
                                  static_cast<long long>(steps.between_bytes), of_kinds.get());
  if (found == nullptr) return nullptr;
  for (auto& each : steps.known) each.second.steps = 0;
  steps.steps = steps.highest_bytes = steps.between_bytes = 0;
  steps.steps_s = 0;
  return found;
}

struct AfterSteps {
  std::weak_ptr<QuietSteps> steps;
  PyObject* in_python;
};

// Called after each step of an optimizer. Between quiet steps there is nothing to note, unless room was missing.
inline PyObject* after_step(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  static PyObject* const name = interned("_missing_bytes");
  const auto* after = static_cast<const AfterSteps*>(PyCapsule_GetPointer(self, nullptr));
  if (after == nullptr) return nullptr;
  const auto steps = after->steps.lock();
  int64_t missing_bytes = 0;
  if (steps && steps->phase == Phase::BETWEEN_STEPS && steps->thread == thread_serial() && *steps->missed_bytes == 0 &&
      QuietSteps::is_read(steps->looked[EVICTOR], name, missing_bytes) && missing_bytes == 0)
    Py_RETURN_NONE;
  return PyObject_Vectorcall(after->in_python, arguments, static_cast<size_t>(count), nullptr);
}

inline void forget_after(PyObject* capsule) {
  auto* after = static_cast<AfterSteps*>(PyCapsule_GetPointer(capsule, nullptr));
  Py_DECREF(after->in_python);
  delete after;
}

// `after_step(in_python)`: returns what is called after the steps of optimizers. It does not keep this alive.
inline PyObject* quiet_after_step(PyObject* self, PyObject* in_python) {
  static PyMethodDef method{"after_step", reinterpret_cast<PyCFunction>(after_step), METH_FASTCALL, nullptr};
  Reference capsule(PyCapsule_New(new AfterSteps{quiet_steps_of(self), Py_NewRef(in_python)}, nullptr, forget_after));
  return capsule ? PyCFunction_New(&method, capsule.get()) : nullptr;
}

inline PyTypeObject* quiet_type() {
  static PyMethodDef methods[] = {
      {"see", quiet_see, METH_VARARGS, nullptr},     {"learn", quiet_learn, METH_VARARGS, nullptr},
      {"after_step", quiet_after_step, METH_O, nullptr},
      {"go_on", quiet_go_on, METH_O, nullptr},       {"forget", quiet_forget, METH_NOARGS, nullptr},
      {"take", quiet_take, METH_NOARGS, nullptr},    {"count", quiet_count, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(quiet_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(quiet_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(quiet_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(quiet_clear)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec{"watch.QuietSteps", sizeof(Quiet), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

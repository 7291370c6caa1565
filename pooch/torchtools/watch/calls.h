// Calls of governed modules, and backward passes, as far as they are those of steps that begin and end without Python.
#pragma once
#include "quiet.h"

namespace watch {

// In Python: what a class of regions around calls is derived from, beside `CallRegion`, which does what is not done here.
struct GovernedCall {
  PyObject_HEAD
  std::shared_ptr<QuietSteps>* quiet;  // null: everything is done in Python
  PyObject* module;                    // a weak reference
  bool begins_steps;
};

inline GovernedCall* governed_of(PyObject* self) {
  return reinterpret_cast<GovernedCall*>(self);
}

inline int governed_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(governed_of(self)->module);
  return 0;
}

inline int governed_clear(PyObject* self) {
  delete std::exchange(governed_of(self)->quiet, nullptr);
  Py_CLEAR(governed_of(self)->module);
  return 0;
}

inline void governed_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  governed_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyTypeObject* governed_type();

// `run_natively(steps, module, begins_steps)`; `steps` is None where everything is to be done in Python from here on.
inline PyObject* governed_run_natively(PyObject* self, PyObject* arguments) {
  PyObject *quiet, *module;
  int begins_steps;
  if (!PyArg_ParseTuple(arguments, "OOp", &quiet, &module, &begins_steps)) return nullptr;
  if (quiet != Py_None && Py_TYPE(quiet) != quiet_type()) return PyErr_Format(PyExc_TypeError, "QuietSteps or None");
  Reference reference(PyWeakref_NewRef(module, nullptr));
  if (!reference) return nullptr;
  Reference before(std::exchange(governed_of(self)->module, reference.release()));
  delete std::exchange(governed_of(self)->quiet,
                       quiet == Py_None ? nullptr : new std::shared_ptr<QuietSteps>(quiet_steps_of(quiet)));
  governed_of(self)->begins_steps = begins_steps != 0;
  Py_RETURN_NONE;
}

inline PyObject* called_plainly(PyObject* module, PyObject* args, PyObject* kwargs) {
  static PyObject* const name = interned("_call_impl");
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  if ((kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0) || count > 6) {
    Reference method(PyObject_GetAttr(module, name));
    return method ? PyObject_Call(method.get(), args, kwargs) : nullptr;
  }
  PyObject* given[8] = {nullptr, module};
  for (Py_ssize_t index = 0; index < count; ++index) given[index + 2] = PyTuple_GET_ITEM(args, index);
  const size_t flags = static_cast<size_t>(count + 1) | PY_VECTORCALL_ARGUMENTS_OFFSET;
  return PyObject_VectorcallMethod(name, given + 1, flags, nullptr);
}

// Notes at the object that surrounds calls what has become of this one.
inline bool has_noted(PyObject* call, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(call, name, value) == 0;
}

// Runs the call that begins a step, as `_QuietCall` in Python surrounds it.
inline PyObject* called_quietly(const std::shared_ptr<QuietSteps>& owned, PyObject* module, PyObject* args, PyObject* kwargs) {
  static PyObject *const is_left = interned("is_left"), *const is_ended = interned("is_ended"), *const exit = interned("__exit__");
  QuietSteps& quiet = *owned;
  const Reference call = Reference::to(quiet.looked[CALL]);
  if (!has_noted(call.get(), is_left, Py_False) || !has_noted(call.get(), is_ended, Py_False)) return nullptr;
  const QuietSteps* const around = std::exchange(calling(), &quiet);
  Reference result(called_plainly(module, args, kwargs));
  calling() = around;
  if (result) {
    if (quiet.phase == Phase::IN_CALL) quiet.phase = Phase::AFTER_CALL;
    const bool is_noted = has_noted(call.get(), is_left, Py_True) && has_noted(call.get(), is_ended, Py_True);
    return is_noted ? result.release() : nullptr;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* const none = Py_None;
  Reference ended(PyObject_CallMethodObjArgs(call.get(), exit, type, value == nullptr ? none : value,
                                             trace == nullptr ? none : trace, nullptr));
  if (!ended) {
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
    return nullptr;
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
}

// The `__call__` that Python has for the class.
inline PyObject*& called_in_python() {
  static PyObject* function = nullptr;
  return function;
}

// Whether the attributes of one module alone have a region, which is being called: they hold it, and so does the caller.
// Python looks which module is called otherwise. This costs nothing, unlike that.
inline bool is_of_one_module(PyObject* self) {
  return Py_REFCNT(self) <= 2;
}

inline PyObject* governed_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  // No errors are translated here: that would hold warnings back until the call is over.
  const GovernedCall* governed = governed_of(self);
  if (governed->quiet != nullptr && is_of_one_module(self)) {
    const bool is_within = calling() == governed->quiet->get();
    if (is_within || (governed->begins_steps && (*governed->quiet)->phase == Phase::BETWEEN_STEPS)) {
      const Reference module = Reference::to(PyWeakref_GetObject(governed->module));
      if (is_within) return called_plainly(module.get(), args, kwargs);
      const std::shared_ptr<QuietSteps> quiet = *governed->quiet;
      if (begins(quiet, module.get(), args, kwargs)) return called_quietly(quiet, module.get(), args, kwargs);
    }
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  Reference all(PyTuple_New(count + 1));
  if (!all) return nullptr;
  PyTuple_SET_ITEM(all.get(), 0, Py_NewRef(self));
  for (Py_ssize_t index = 0; index < count; ++index)
    PyTuple_SET_ITEM(all.get(), index + 1, Py_NewRef(PyTuple_GET_ITEM(args, index)));
  return PyObject_Call(called_in_python(), all.get(), kwargs);
}

// `take_calls(class)`: calls of its objects come here first. Its `__call__` stays what it is, for compilers that trace it.
inline PyObject* take_calls(PyObject*, PyObject* kind) {
  if (!PyType_Check(kind) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(kind), governed_type()))
    return PyErr_Format(PyExc_TypeError, "a class that is derived from GovernedCall");
  Reference function(PyObject_GetAttrString(kind, "__call__"));
  if (!function) return nullptr;
  Py_XDECREF(std::exchange(called_in_python(), function.release()));
  reinterpret_cast<PyTypeObject*>(kind)->tp_call = governed_call;
  PyType_Modified(reinterpret_cast<PyTypeObject*>(kind));
  Py_RETURN_NONE;
}

inline PyTypeObject* governed_type() {
  static PyMethodDef methods[] = {
      {"run_natively", governed_run_natively, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(governed_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(governed_traverse)},
      {Py_tp_clear, reinterpret_cast<void*>(governed_clear)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec{"watch.GovernedCall", sizeof(GovernedCall), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// In Python: `BackwardPasses(original, in_python)`. It runs a backward pass by the first, or by the second, which tells of it.
struct BackwardPasses {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *original, *in_python;
  PyObject* weak_references;
};

inline BackwardPasses* passes_of(PyObject* self) {
  return reinterpret_cast<BackwardPasses*>(self);
}

// Whether a backward pass is that of the step that this thread runs without Python.
inline bool is_of_step(QuietSteps& quiet) {
  static PyObject* const name = interned("_listeners");
  if (quiet.phase != Phase::AFTER_CALL || quiet.thread != thread_serial()) return false;
  if (c10::impl::TorchDispatchModeTLS::stack_len() != 0) return false;
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) return false;
  Reference listeners(PyObject_GetAttr(quiet.looked[LISTENING], name));
  return listeners ? listeners.get() == quiet.listeners : (PyErr_Clear(), false);
}

// Has Python end the step, as it does with those that it runs itself.
inline bool has_told_end(PyObject* listeners, bool is_finished) {
  static PyObject* const tell_end = interned("tell_end");
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Reference told(PyObject_CallMethodObjArgs(PyTuple_GET_ITEM(listeners, 0), tell_end, is_finished ? Py_True : Py_False,
                                            Py_False, nullptr));
  if (told) return PyErr_Restore(type, value, trace), true;
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(trace);
  return false;
}

inline PyObject* passes_call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  static PyObject* const depth = interned("depth");
  static PyObject *const none = PyLong_FromLong(0), *const one = PyLong_FromLong(1);
  const BackwardPasses* passes = passes_of(self);
  const std::shared_ptr<QuietSteps> quiet = stepping().lock();
  const bool builds_no_graph = PyVectorcall_NARGS(flags) > 3 && arguments[3] == Py_False;
  if (!quiet || !builds_no_graph || !is_of_step(*quiet))
    return PyObject_Vectorcall(passes->in_python, arguments, flags, names);
  const Reference running = Reference::to(quiet->looked[RUNNING]), listeners = Reference::to(quiet->listeners);
  if (PyObject_SetAttr(running.get(), depth, one) < 0) return nullptr;
  quiet->phase = Phase::IN_BACKWARD;
  Reference result(PyObject_Vectorcall(passes->original, arguments, flags, names));
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const bool is_reset = PyObject_SetAttr(running.get(), depth, none) == 0;
  if (!is_reset) PyErr_Clear();
  PyErr_Restore(type, value, trace);
  if (result && has_ended(*quiet)) return result.release();
  return has_told_end(listeners.get(), static_cast<bool>(result)) ? result.release() : nullptr;
}

inline PyObject* passes_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *original, *in_python;
  if (!PyArg_ParseTuple(arguments, "OO", &original, &in_python)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  passes_of(self)->call = passes_call;
  passes_of(self)->original = Py_NewRef(original), passes_of(self)->in_python = Py_NewRef(in_python);
  return self;
}

inline int passes_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(passes_of(self)->original);
  Py_VISIT(passes_of(self)->in_python);
  return 0;
}

inline void passes_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (passes_of(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  Py_CLEAR(passes_of(self)->original);
  Py_CLEAR(passes_of(self)->in_python);
  Py_TYPE(self)->tp_free(self);
}

inline PyTypeObject* passes_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(BackwardPasses, call), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(BackwardPasses, weak_references), READONLY, nullptr},
      {"__wrapped__", T_OBJECT_EX, offsetof(BackwardPasses, in_python), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(passes_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(passes_dealloc)},
      {Py_tp_traverse, reinterpret_cast<void*>(passes_traverse)},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_members, members},
      {0, nullptr}};
  static PyType_Spec spec{"watch.BackwardPasses", sizeof(BackwardPasses), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

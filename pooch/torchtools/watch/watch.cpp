// Watches the ops of a region, and what autograd saves there, without Python where nothing is to be done.
#include "calls.h"
#include "frames.h"
#include "kernel.h"
#include "objects.h"
#include "saved.h"

#include <torch/csrc/profiler/orchestration/observer.h>

namespace {

// `use(describe, settings_now, refuse, changed)`: what is called of Python.
PyObject* use(PyObject*, PyObject* functions) {
  PyObject *describe, *settings_now, *refuse, *changed;
  if (!PyArg_ParseTuple(functions, "OOOO", &describe, &settings_now, &refuse, &changed)) return nullptr;
  Py_XDECREF(std::exchange(watch::describe(), Py_NewRef(describe)));
  Py_XDECREF(std::exchange(watch::settings_now(), Py_NewRef(settings_now)));
  Py_XDECREF(std::exchange(watch::refuse(), Py_NewRef(refuse)));
  Py_XDECREF(std::exchange(watch::changed(), Py_NewRef(changed)));
  Py_RETURN_NONE;
}

// Whether the ops of the calling thread come to the kernel.
PyObject* is_watching(PyObject*, PyObject*) {
  return PyBool_FromLong(c10::impl::tls_is_dispatch_key_included(watch::KEY));
}

// The key as a set of PyTorch's own type: its name is not among those that Python knows.
PyObject* keys(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return pybind11::cast(c10::DispatchKeySet(watch::KEY)).release().ptr();
  END_HANDLE_TH_ERRORS
}

// Whether a tensor is all in its bytes and its geometry, so that a handle can be on it.
PyObject* is_ordinary(PyObject*, PyObject* tensor) {
  return PyBool_FromLong(THPVariable_Check(tensor) && watch::is_ordinary(THPVariable_Unpack(tensor)));
}

PyObject* is_plain(PyObject*, PyObject* tensor) {
  return PyBool_FromLong(THPVariable_Check(tensor) && watch::is_plain(THPVariable_Unpack(tensor)));
}

// Whether a profiler records what ops read, with their addresses, before anything else hears of them.
PyObject* records_inputs(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  using namespace torch::profiler::impl;
  return PyBool_FromLong(profilerEnabled() && getProfilerConfig().report_input_shapes);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"is_plain", is_plain, METH_O, nullptr},
    {"released", watch::released, METH_O, nullptr},
    {"sample_checksum", watch::sample_checksum, METH_O, nullptr},
    {"use", use, METH_VARARGS, nullptr},
    {"is_ordinary", is_ordinary, METH_O, nullptr},
    {"is_watching", is_watching, METH_NOARGS, nullptr},
    {"records_inputs", records_inputs, METH_NOARGS, nullptr},
    {"is_away", watch::is_away, METH_O, nullptr},
    {"is_marked", watch::is_marked_here, METH_O, nullptr},
    {"set_in_type", watch::set_in_type, METH_VARARGS, nullptr},
    {"unmark", watch::unmark_here, METH_O, nullptr},
    {"tensors_beside", watch::tensors_beside, METH_O, nullptr},
    {"references_to", watch::references_to, METH_O, nullptr},
    {"is_in_op", watch::is_in_op, METH_NOARGS, nullptr},
    {"is_of_allocator", watch::is_of_allocator, METH_O, nullptr},
    {"use_homes", watch::use_homes, METH_VARARGS, nullptr},
    {"with_homes", watch::with_homes, METH_O, nullptr},
    {"count_uses", watch::count_uses, METH_NOARGS, nullptr},
    {"take_uses", watch::take_uses, METH_NOARGS, nullptr},
    {"keys_of_homes", watch::keys_of_homes, METH_O, nullptr},
    {"keys_of", watch::keys_of, METH_O, nullptr},
    {"have_homes", watch::have_homes, METH_VARARGS, nullptr},
    {"here_bytes", watch::here_bytes, METH_O, nullptr},
    {"objects_of", watch::objects_of, METH_VARARGS, nullptr},
    {"keys", keys, METH_NOARGS, nullptr},
    {"take_calls", watch::take_calls, METH_O, nullptr},
    {"note_in_place", watch::note_in_place, METH_O, nullptr},
    {"frame_setter", watch::frame_setter, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition{PyModuleDef_HEAD_INIT, "watch", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add(PyObject* module, const char* name, PyTypeObject* type) {
  return type != nullptr && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit_watch() {
  HANDLE_TH_ERRORS
  auto& dispatcher = c10::Dispatcher::singleton();
  // A second fallback for a key would end the process.
  if (dispatcher.hasBackendFallbackForDispatchKey(watch::KEY))
    return PyErr_Format(PyExc_ImportError, "the dispatch key %s is in use", c10::toString(watch::KEY)), nullptr;
  watch::Reference module(PyModule_Create(&definition));
  if (!module || !add(module.get(), "StorageMap", watch::storage_map_type()) ||
      !add(module.get(), "Path", watch::path_type()) || !add(module.get(), "Region", watch::region_type()) ||
      !add(module.get(), "Call", watch::call_type()) || !add(module.get(), "Handle", watch::handle_type()) ||
      !add(module.get(), "Home", watch::home_type()) || !add(module.get(), "KeptTensor", watch::kept_type()) || !add(module.get(), "Hooks", watch::hooks_type()) ||
      !add(module.get(), "Moves", watch::moves_type()) || !add(module.get(), "Reads", watch::reads_type()) || !add(module.get(), "QuietSteps", watch::quiet_type()) ||
      !add(module.get(), "GovernedCall", watch::governed_type()) ||
      !add(module.get(), "BackwardPasses", watch::passes_type()))
    return nullptr;
  // It stays for as long as the process: a library that is unloaded would leave PyTorch with nowhere to go.
  static const auto* registration = new c10::RegistrationHandleRAII(dispatcher.registerFallback(
      watch::KEY, c10::KernelFunction::makeFromBoxedFunction<&watch::kernel>(), "pooch"));
  static_cast<void>(registration);
  return module.release();
  END_HANDLE_TH_ERRORS
}

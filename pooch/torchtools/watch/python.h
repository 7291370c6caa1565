// What is called of Python, and how its errors travel through PyTorch.
#pragma once
#include <torch/csrc/autograd/python_variable.h>  // first: it brings Python.h along

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>

#include <stdexcept>
#include <utility>

namespace torch::utils {
PyObject* getTHPMemoryFormat(at::MemoryFormat);  // its header is not installed with every version
}
namespace torch::jit {
pybind11::object toPyObject(c10::IValue);  // its header takes longer to compile than all of this
}

namespace watch {

// Holds the lock of the interpreter. PyTorch has released it by the time an op runs.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

// A reference to a Python object. The lock of the interpreter is held wherever one is made or ends.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(owned) {}
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }
  static Reference to(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Reference(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Throws the error that Python has raised. The caller holds the lock of the interpreter.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw error;
}

inline Reference checked(PyObject* owned) {
  if (owned == nullptr) raise();
  return Reference(owned);
}

// Calls a method, whose error is thrown.
template <class... Arguments>
Reference call(PyObject* object, PyObject* name, Arguments*... arguments) {
  return checked(PyObject_CallMethodObjArgs(object, name, arguments..., nullptr));
}

// Without the lock of the interpreter, Python 3.12 and later end the process here, and earlier ones go on by luck.
inline PyObject* interned(const char* text) {
  if (PyGILState_Check() == 0) throw std::logic_error("a name of Python's is made without the interpreter's lock");
  return PyUnicode_InternFromString(text);
}

}  // namespace watch

// What stands in for Dynamo's `set_eval_frame`, which functions that are exempt from compiling call four times each, such
// as `zero_grad` of optimizers.
#pragma once
#include "python.h"

namespace watch {

// Whether hooks or modes of Pooch's may be in place in the calling thread.
inline bool& is_in_place() {
  thread_local bool is = true;  // until Python has found nothing there
  return is;
}

// `note_in_place(is)`: for the calling thread.
inline PyObject* note_in_place(PyObject*, PyObject* is) {
  is_in_place() = is == Py_True;
  Py_RETURN_NONE;
}

// Whether the function of Python that calls is of a name.
inline bool is_called_by(PyObject* name) {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  if (frame == nullptr) return false;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const bool is = PyUnicode_Compare(code->co_name, name) == 0;
  Py_DECREF(code);
  Py_DECREF(frame);
  return is;
}

// `self`: what it stands in for, what does all else in Python, and the name of the function that begins compiled calls.
inline PyObject* frames_set(PyObject* self, PyObject* callback) {
  const bool is_idle = !is_in_place() && (callback != Py_None || !is_called_by(PyTuple_GET_ITEM(self, 2)));
  return PyObject_CallOneArg(PyTuple_GET_ITEM(self, is_idle ? 0 : 1), callback);
}

// `frame_setter(original, in_python, name)`
inline PyObject* frame_setter(PyObject*, PyObject* arguments) {
  static PyMethodDef method{"set_eval_frame", frames_set, METH_O, nullptr};
  if (PyTuple_GET_SIZE(arguments) != 3 || !PyUnicode_Check(PyTuple_GET_ITEM(arguments, 2)))
    return PyErr_Format(PyExc_TypeError, "frame_setter takes two functions and a name");
  return PyCFunction_New(&method, arguments);
}

}  // namespace watch

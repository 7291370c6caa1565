// Which objects of some types there are.
#pragma once
#include "python.h"

#include <unordered_set>

namespace watch {

// `objects_of(get_objects, generations, types)`: the objects of these very types that `gc.get_objects` gives for some
// generations. Between taking them all and letting go of the others, no other thread runs: see `live_objects.py`.
inline PyObject* objects_of(PyObject*, PyObject* arguments) {
  PyObject *get_objects, *generations, *types;
  if (!PyArg_ParseTuple(arguments, "OO!O!", &get_objects, &PyTuple_Type, &generations, &PyTuple_Type, &types))
    return nullptr;
  std::unordered_set<PyTypeObject*> wanted;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i)
    wanted.insert(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(types, i)));
  Reference found(PyList_New(0));
  for (Py_ssize_t i = 0; found && i < PyTuple_GET_SIZE(generations); ++i) {
    const Reference all(PyObject_CallOneArg(get_objects, PyTuple_GET_ITEM(generations, i)));
    if (!all) return nullptr;
    if (!PyList_CheckExact(all.get())) return PyErr_Format(PyExc_TypeError, "gc.get_objects gives no list"), nullptr;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(all.get()); ++at) {
      auto* object = PyList_GET_ITEM(all.get(), at);
      if (wanted.count(Py_TYPE(object)) != 0 && PyList_Append(found.get(), object) < 0) return nullptr;
    }
  }
  return found.release();
}

}  // namespace watch

// Storages that a step holds, by the numbers of their values.
#pragma once
#include "storages.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>

namespace watch {

class Holding {
 public:
  void put(int64_t number, c10::Storage storage) {
    std::lock_guard guard(lock_);
    std::swap(storages_[number], storage);  // what was there ends after the lock is released
  }

  bool has(int64_t number) {
    std::lock_guard guard(lock_);
    return storages_.find(number) != storages_.end();
  }

  c10::Storage get(int64_t number) {
    std::lock_guard guard(lock_);
    const auto found = storages_.find(number);
    return found == storages_.end() ? c10::Storage() : found->second;
  }

  c10::Storage take(int64_t number) {
    std::lock_guard guard(lock_);
    const auto found = storages_.find(number);
    if (found == storages_.end()) return {};
    c10::Storage storage = std::move(found->second);
    storages_.erase(found);
    return storage;
  }

 private:
  std::mutex lock_;
  ska::flat_hash_map<int64_t, c10::Storage> storages_;
};

// In Python: `Holding`, which has what its users need of a dictionary.
struct HoldingObject {
  PyObject_HEAD
  std::shared_ptr<Holding>* holding;
};

inline Holding& holding_of(PyObject* self) {
  return **reinterpret_cast<HoldingObject*>(self)->holding;
}

inline void holding_dealloc(PyObject* self) {
  delete reinterpret_cast<HoldingObject*>(self)->holding;
  Py_TYPE(self)->tp_free(self);
}

inline PyObject* storage_or(c10::Storage storage, PyObject* otherwise) {
  return storage ? THPStorage_Wrap(std::move(storage)) : Py_NewRef(otherwise);
}

inline bool number_in(PyObject* const* arguments, Py_ssize_t count, int64_t& number, PyObject*& otherwise) {
  if (count < 1 || count > 2) return PyErr_SetString(PyExc_TypeError, "a number is asked for, and what to return else"), false;
  number = PyLong_AsLongLong(arguments[0]);
  otherwise = count == 2 ? arguments[1] : Py_None;
  return !PyErr_Occurred();
}

inline PyObject* holding_get(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  int64_t number;
  PyObject* otherwise;
  if (!number_in(arguments, count, number, otherwise)) return nullptr;
  return storage_or(holding_of(self).get(number), otherwise);
}

inline PyObject* holding_pop(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  int64_t number;
  PyObject* otherwise;
  if (!number_in(arguments, count, number, otherwise)) return nullptr;
  return storage_or(holding_of(self).take(number), otherwise);
}

inline int holding_contains(PyObject* self, PyObject* key) {
  if (key == Py_None) return 0;  // what is no value
  const int64_t number = PyLong_AsLongLong(key);
  if (PyErr_Occurred()) return -1;
  return holding_of(self).has(number);
}

inline int holding_assign(PyObject* self, PyObject* key, PyObject* storage) {
  const int64_t number = PyLong_AsLongLong(key);
  if (PyErr_Occurred()) return -1;
  if (storage == nullptr) return holding_of(self).take(number), 0;
  if (!THPStorage_Check(storage)) return PyErr_SetString(PyExc_TypeError, "a storage is held"), -1;
  holding_of(self).put(number, THPStorage_Unpack(storage));
  return 0;
}

inline PyTypeObject* holding_type() {
  static PyMethodDef methods[] = {
      {"get", reinterpret_cast<PyCFunction>(holding_get), METH_FASTCALL, nullptr},
      {"pop", reinterpret_cast<PyCFunction>(holding_pop), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(holding_dealloc)},
      {Py_tp_methods, methods},
      {Py_sq_contains, reinterpret_cast<void*>(holding_contains)},
      {Py_mp_ass_subscript, reinterpret_cast<void*>(holding_assign)},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Holding", sizeof(HoldingObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

inline PyObject* to_python(const std::shared_ptr<Holding>& holding) {
  auto* self = reinterpret_cast<HoldingObject*>(holding_type()->tp_alloc(holding_type(), 0));
  if (self != nullptr) self->holding = new std::shared_ptr<Holding>(holding);
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace watch

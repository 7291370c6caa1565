// Which value does a storage hold?
#pragma once
#include "python.h"

#include <c10/util/flat_hash_map.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace watch {

// Of all keys below autograd and Python only this one has no kernels of its own and is no backend. It is in no tensor's
// keys, so nothing is paid outside of a region, which includes it for its thread.
constexpr auto KEY = c10::DispatchKey::Fake;

// Up to PyTorch 2.12 it is just above Python instead.
constexpr bool IS_ABOVE_PYTHON = static_cast<uint16_t>(KEY) > static_cast<uint16_t>(c10::DispatchKey::Python);

using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Whether a tensor has strided memory that can be copied byte by byte. Others are looked at in Python.
inline bool is_plain(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  return !tensor.is_nested() && !tensor.is_quantized() && !tensor.is_meta() && !tensor._is_zerotensor() &&
      !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

inline const c10::Storage& storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

// Returns the tensor without its history, with the same version counter: autograd's own op would hold itself.
inline at::Tensor detached(const at::Tensor& tensor, bool has_history) {
  if (!has_history) return tensor;
  auto* implementation = tensor.unsafeGetTensorImpl();
  return at::Tensor(implementation->shallow_copy_and_detach(implementation->version_counter(), false));
}

// Weak pointers keep the small structures of storages that are gone, so that no address is used twice.
class StorageMap {
 public:
  std::optional<int64_t> get(c10::StorageImpl* storage) {
    std::lock_guard guard(lock_);
    const auto found = entries_.find(storage);
    if (found == entries_.end() || found->second.storage.expired()) return std::nullopt;
    return found->second.number;
  }

  void bind(const c10::Storage& storage, int64_t number) { bind(storage.unsafeGetStorageImpl(), storage, number); }

  void bind(c10::StorageImpl* address, const c10::Storage& storage, int64_t number) {
    // Destroyed after the lock is released: the end of a storage may wait for the interpreter, and whoever holds that for us.
    std::vector<Weak> gone;
    std::lock_guard guard(lock_);
    const auto found = entries_.find(address);
    if (found != entries_.end()) {
      found->second.number = number;
      return;
    }
    if (entries_.size() >= sweep_at_) gone = sweep();
    entries_.emplace(address, Entry{number, storage.getWeakStorageImpl()});
  }

 private:
  struct Entry {
    int64_t number;
    Weak storage;
  };

  std::vector<Weak> sweep() {
    std::vector<Weak> gone;
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (entry->second.storage.expired()) {
        gone.push_back(std::move(entry->second.storage));
        entry = entries_.erase(entry);
      } else {
        ++entry;
      }
    }
    sweep_at_ = std::max<size_t>(4096, 2 * entries_.size());
    return gone;
  }

  std::mutex lock_;
  ska::flat_hash_map<c10::StorageImpl*, Entry> entries_;
  size_t sweep_at_ = 4096;
};

// In Python: `StorageMap`, with `get(key)` and `bind(storage, value)`.
struct StorageMapObject {
  PyObject_HEAD
  std::shared_ptr<StorageMap>* map;
};

inline std::shared_ptr<StorageMap>& map_of(PyObject* self) {
  return *reinterpret_cast<StorageMapObject*>(self)->map;
}

inline PyObject* storage_map_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<StorageMapObject*>(type->tp_alloc(type, 0));
  if (self != nullptr) self->map = new std::shared_ptr<StorageMap>(std::make_shared<StorageMap>());
  return reinterpret_cast<PyObject*>(self);
}

inline void storage_map_dealloc(PyObject* self) {
  delete reinterpret_cast<StorageMapObject*>(self)->map;
  Py_TYPE(self)->tp_free(self);
}

inline c10::StorageImpl* address_in(PyObject* key) {
  return static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(key));
}

inline PyObject* storage_map_get(PyObject* self, PyObject* key) {
  c10::StorageImpl* address = address_in(key);
  if (address == nullptr && PyErr_Occurred()) return nullptr;
  const auto number = map_of(self)->get(address);
  if (!number) Py_RETURN_NONE;
  return PyLong_FromLongLong(*number);
}

inline PyObject* storage_map_bind(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  static PyObject* const cdata = interned("_cdata");
  if (count != 2) return PyErr_Format(PyExc_TypeError, "bind takes a storage and a value");
  Reference key(PyObject_GetAttr(arguments[0], cdata));
  if (!key) return nullptr;
  c10::StorageImpl* address = address_in(key.get());
  const int64_t number = PyLong_AsLongLong(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  const c10::Storage storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(address));
  map_of(self)->bind(address, storage, number);
  Py_RETURN_NONE;
}

inline PyTypeObject* storage_map_type() {
  static PyMethodDef methods[] = {
      {"get", storage_map_get, METH_O, nullptr},
      {"bind", reinterpret_cast<PyCFunction>(storage_map_bind), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(storage_map_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(storage_map_dealloc)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec{"watch.StorageMap", sizeof(StorageMapObject), 0, Py_TPFLAGS_DEFAULT, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

}  // namespace watch

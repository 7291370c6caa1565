// Storages that the program holds while their bytes may be elsewhere: parameters, gradients, states of optimizers.
//
// The bytes are taken out of such a storage, whose size stays what it is, and PyTorch itself refuses each access to memory
// that is not there. Tensors on it carry the key of the watch among their own, as do views and detached tensors, which get
// their keys from them. So every op on them comes to the kernel, in any thread and outside of regions, and the bytes are
// brought back before it runs.
#pragma once
#include "operators.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/headeronly/version.h>

namespace watch {

constexpr auto ABSENT = "its bytes are away, and what reads them here is seen by neither PyTorch's dispatcher nor Pooch: "
                        "read the tensor by an op, such as tensor.clone(); a profiler that begins in the middle of a step "
                        "needs record_shapes=False";

// Grants access to the keys of a tensor, which PyTorch lets only its own subclasses change.
template <auto Member>
struct Reveal {
  friend c10::DispatchKeySet c10::TensorImpl::* keys_of_tensors() { return Member; }
};
c10::DispatchKeySet c10::TensorImpl::* keys_of_tensors();
template struct Reveal<&c10::TensorImpl::key_set_>;

inline bool is_marked(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(KEY);
}

inline void mark(const at::Tensor& tensor) {
  auto& keys = tensor.unsafeGetTensorImpl()->*keys_of_tensors();
  keys = keys.add(KEY);
}

// Ops on a tensor come to the kernel within regions alone from here on. It has no home any more.
inline void unmark(const at::Tensor& tensor) {
  auto& keys = tensor.unsafeGetTensorImpl()->*keys_of_tensors();
  keys = keys.remove(KEY);
}

inline c10::StreamId current_stream(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

struct Home {
  explicit Home(const c10::Storage& storage) : storage(storage.getWeakStorageImpl()) {}

  // Has its bytes stay once an op on another stream than the current one has worked on them, for nothing waits for that.
  void stay_on_stream(const c10::Device& device) {
    stream = current_stream(device);
    is_of_one_stream = true;
  }

  void used_on(const c10::Device& device) {
    if (is_of_one_stream && current_stream(device) != stream) is_elsewhere = true;
  }

  bool is_used() const { return uses > 0 || is_exposed || is_elsewhere || is_in_sparse; }

  Weak storage;
  std::atomic<bool> is_here{true};
  std::atomic<bool> is_exposed{false};  // to an op that may work on it after it has returned
  std::atomic<bool> is_read{false};     // by a copy on another stream, for which an op that writes to it has to wait
  std::atomic<bool> is_of_one_stream{false};
  std::atomic<bool> is_elsewhere{false};  // an op on another stream than its own has worked on it
  std::atomic<bool> is_in_sparse{false};  // a sparse tensor is made of it: ops on that one read it, and are none on it
  c10::StreamId stream = 0;
  std::atomic<int> uses{0};  // by ops that are running
  std::atomic<uint64_t> writes{0};  // counted where an op that writes begins and where it ends
  std::atomic<uint64_t> last_use{0};
};

class Homes {
 public:
  bool has_any() const { return count_.load(std::memory_order_acquire) != 0; }

  std::shared_ptr<Home> at(const c10::StorageImpl* storage) {
    std::lock_guard guard(lock_);
    const auto found = homes_.find(storage);
    return found == homes_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Home> of(const at::Tensor& tensor) { return at(storage_of(tensor).unsafeGetStorageImpl()); }

  std::shared_ptr<Home> add(const c10::Storage& storage) {
    auto home = std::make_shared<Home>(storage);  // holds the address, so that no other storage comes to be there
    std::lock_guard guard(lock_);
    auto& place = homes_[storage.unsafeGetStorageImpl()];
    if (place) return nullptr;
    place = home;
    count_.store(homes_.size(), std::memory_order_release);
    return home;
  }

  void remove(const c10::StorageImpl* storage) {
    std::shared_ptr<Home> removed;  // ends after the lock is released
    std::lock_guard guard(lock_);
    const auto found = homes_.find(storage);
    if (found == homes_.end()) return;
    removed = std::move(found->second);
    homes_.erase(found);
    count_.store(homes_.size(), std::memory_order_release);
  }

  void used(Home& home) {
    std::lock_guard guard(lock_);
    const auto* storage = home.storage._unsafe_get_target();
    if (log_.empty() || log_.back() != storage) log_.push_back(storage);
    home.last_use = clock_ + log_.size();
  }

  // The bytes of those on a device that are there.
  size_t here_bytes(const c10::Device& device) {
    size_t bytes = 0;
    std::vector<c10::intrusive_ptr<c10::StorageImpl>> ends;  // after the lock is released, if these are the last references
    std::lock_guard guard(lock_);
    for (const auto& [_, home] : homes_) {
      auto storage = home->is_here ? home->storage.lock() : nullptr;
      if (!storage) continue;
      if (storage->device() == device) bytes += storage->nbytes();
      ends.push_back(std::move(storage));
    }
    return bytes;
  }

  // How many uses there were since the log was taken.
  size_t uses() {
    std::lock_guard guard(lock_);
    return log_.size();
  }

  std::vector<const c10::StorageImpl*> take_log() {
    std::lock_guard guard(lock_);
    clock_ += log_.size();
    return std::exchange(log_, {});
  }

 private:
  std::mutex lock_;
  ska::flat_hash_map<const c10::StorageImpl*, std::shared_ptr<Home>> homes_;
  std::atomic<size_t> count_{0};
  uint64_t clock_ = 0;
  std::vector<const c10::StorageImpl*> log_;
};

inline Homes& homes() {
  static auto* all = new Homes;
  return *all;
}

// Has what a sparse tensor is made of stay, for good: nothing tells when that one is gone.
inline void stay_in(const at::Tensor& sparse) {
  const auto stay = [](const at::Tensor& part) {
    const auto home = part.defined() && part.has_storage() ? homes().of(part) : nullptr;
    if (home) home->is_in_sparse = true;
  };
  if (!sparse.defined() || sparse.layout() == at::kStrided || sparse.key_set().has(c10::DispatchKey::Python)) return;
  if (sparse.is_sparse()) {
    const auto* parts = static_cast<const at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
    for (const at::Tensor& part : {parts->indices(), parts->values()}) stay(part);
  } else if (sparse.unsafeGetTensorImpl()->is_sparse_compressed()) {
    const auto* parts = static_cast<const at::SparseCsrTensorImpl*>(sparse.unsafeGetTensorImpl());
    for (const at::Tensor& part : {parts->compressed_indices(), parts->plain_indices(), parts->values()}) stay(part);
  }
}

// Ops on lists of tensors, which treat each item by itself, run in parts of so many bytes. 0: as a whole.
inline std::atomic<size_t>& part_bytes() {
  static std::atomic<size_t> bytes{0};
  return bytes;
}

// `bring_back(keys)` has the bytes of storages be there, and copies that read them come before what writes to them.
inline PyObject*& bring_back() {
  static PyObject* function = nullptr;
  return function;
}

// Keeps the bytes of what an op works on where they are while it runs. Those that are away are brought back before.
class Use {
 public:
  // `written`: the positions of arguments that the op writes, by bits. `exposes`: whether it may work on any of them after
  // it has returned, as collectives do.
  template <class Values>
  Use(const Values& arguments, uint64_t written, bool exposes) {
    if (!homes().has_any()) return;
    size_t position = 0;
    for (const c10::IValue& argument : arguments) {
      const bool is_written = position < 64 && (written >> position & 1) != 0;
      each_tensor(argument, [&](const at::Tensor& tensor) {
        if (!is_marked(tensor)) return;
        auto home = homes().of(tensor);
        if (!home) return;
        home->used_on(tensor.device());
        begin(std::move(home), is_written || exposes, exposes);
      });
      ++position;
    }
    if (std::any_of(used_.begin(), used_.end(), must_come_first)) bring_all_back();
  }
  ~Use() { end(); }
  Use(const Use&) = delete;

 private:
  struct Used {
    std::shared_ptr<Home> home;
    bool is_written;
    bool waits;  // for a copy that reads it
  };

  static bool must_come_first(const Used& each) { return !each.home->is_here || each.waits; }

  void begin(std::shared_ptr<Home> home, bool is_written, bool exposes) {
    if (exposes) home->is_exposed = true;
    ++home->uses;  // before a look at whether it is here: who takes the bytes looks the other way round
    if (is_written) ++home->writes;
    homes().used(*home);
    const bool waits = is_written && home->is_read.exchange(false);
    used_.push_back({std::move(home), is_written, waits});
  }

  void end() {
    for (const Used& each : used_) {
      if (each.is_written) ++each.home->writes;
      --each.home->uses;
    }
    used_.clear();
  }

  void bring_all_back() {
    try {
      Gil gil;
      Reference keys = checked(PyList_New(0));
      for (const Used& each : used_) {
        if (!must_come_first(each)) continue;
        Reference key = checked(PyLong_FromVoidPtr(each.home->storage._unsafe_get_target()));
        if (PyList_Append(keys.get(), key.get()) < 0) raise();
      }
      checked(PyObject_CallOneArg(bring_back(), keys.get()));
    } catch (...) {
      end();
      throw;
    }
  }

  std::vector<Used> used_;
};

// How many tensors there are on a storage, as far as that can be told: its Python object holds it, too.
inline size_t tensors_on(size_t references, c10::StorageImpl* storage) {
  return references - (storage->pyobj_slot()->load_pyobj() != nullptr ? 1 : 0);
}

// In Python: `Home(tensor)`, which is None's if the tensor's storage has one already.
struct HomeObject {
  PyObject_HEAD
  std::shared_ptr<Home>* home;
};

inline Home& home_of(PyObject* self) {
  return **reinterpret_cast<HomeObject*>(self)->home;
}

inline PyObject* home_new(PyTypeObject* type, PyObject* arguments, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* object;
  if (!PyArg_ParseTuple(arguments, "O", &object)) return nullptr;
  if (!THPVariable_Check(object) || !is_plain(THPVariable_Unpack(object)))
    return PyErr_Format(PyExc_TypeError, "a home is of a tensor with plain memory");
  const at::Tensor& tensor = THPVariable_Unpack(object);
  auto home = homes().add(storage_of(tensor));
  if (!home) return PyErr_Format(PyExc_ValueError, "its storage has a home already");
  auto* self = reinterpret_cast<HomeObject*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->home = new std::shared_ptr<Home>(std::move(home));
  mark(tensor);
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

inline void home_dealloc(PyObject* self) {
  homes().remove(home_of(self).storage._unsafe_get_target());
  delete reinterpret_cast<HomeObject*>(self)->home;
  Py_TYPE(self)->tp_free(self);
}

// Marks a further tensor on the storage, which was made before the storage had a home.
inline PyObject* home_mark(PyObject* self, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(object)) return PyErr_Format(PyExc_TypeError, "a tensor is marked");
  mark(THPVariable_Unpack(object));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Has the bytes stay once another stream than the one that is current now has worked on them.
inline PyObject* home_stay_on_stream(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto storage = home_of(self).storage.lock();
  if (storage) home_of(self).stay_on_stream(storage->device());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether the memory of a storage is that of PyTorch's CPU allocator, and so nobody's else. `torch.load` makes such storages
// without an allocator of their own, as if the memory were that of a mapped file or of an array.
inline bool is_of_cpu_allocator(const c10::StorageImpl& storage) {
  if (storage.device_type() != c10::DeviceType::CPU) return false;
  const c10::DataPtr& bytes = storage.data_ptr();
  const auto deleter = bytes.get_deleter();
  return bytes.get() != nullptr && bytes.get() == bytes.get_context() &&
         (deleter == c10::GetDefaultCPUAllocator()->raw_deleter() || deleter == c10::GetCPUAllocator()->raw_deleter());
}

// `take(writes)` takes the bytes out and returns them as a storage of their own, or None if they are in use, away, gone, or
// were written to since there were so many writes. Without an argument, that does not matter.
inline PyObject* home_take(PyObject* self, PyObject* arguments) {
  HANDLE_TH_ERRORS
  unsigned long long writes = ~0ull;
  if (!PyArg_ParseTuple(arguments, "|K", &writes)) return nullptr;
  Home& home = home_of(self);
  const auto storage = home.storage.lock();
  if (!storage || !home.is_here.exchange(false)) Py_RETURN_NONE;
  // An op that begins from here on waits until they are back. Without an allocator they are shared, or somebody else's.
  if (home.is_used() || (writes != ~0ull && home.writes != writes) ||
      (storage->allocator() == nullptr && !is_of_cpu_allocator(*storage))) {
    home.is_here = true;
    Py_RETURN_NONE;
  }
  auto taken = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
      storage->set_data_ptr(c10::DataPtr(nullptr, storage->device())), storage->allocator(), storage->resizable());
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(ABSENT));
  return THPStorage_Wrap(c10::Storage(std::move(taken)));
  END_HANDLE_TH_ERRORS
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
// PyTorch 2.11 has nothing that ends its refusal.
template <auto Member>
struct RevealRefusal {
  friend bool c10::StorageImpl::* refusal_of_storages() { return Member; }
};
bool c10::StorageImpl::* refusal_of_storages();
template struct RevealRefusal<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

inline void stop_refusing(c10::StorageImpl& storage) {
  storage.*refusal_of_storages() = false;  // what PyTorch derives from it follows with the next pointer
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
}
#else
inline void stop_refusing(c10::StorageImpl& storage) {
  storage.clear_data_ptr_access_error_msg_();
}
#endif

// Puts the bytes of another storage, which is empty then, to where they were.
inline PyObject* home_give(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  if (!THPStorage_Check(given)) return PyErr_Format(PyExc_TypeError, "bytes are given in a storage");
  Home& home = home_of(self);
  const auto storage = home.storage.lock();
  if (!storage || home.is_here) Py_RETURN_NONE;
  const c10::Storage& from = THPStorage_Unpack(given);
  stop_refusing(*storage);
  storage->set_data_ptr_noswap(std::move(from.unsafeGetStorageImpl()->mutable_data_ptr()));
  from.unsafeGetStorageImpl()->reset();
  home.is_here = true;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The storage itself, for who knows when its bytes are there. None once the program has released it.
inline PyObject* home_get_storage(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto storage = home_of(self).storage.lock();
  if (!storage) Py_RETURN_NONE;
  return THPStorage_Wrap(c10::Storage(std::move(storage)));
  END_HANDLE_TH_ERRORS
}

inline PyObject* home_get_tensors(PyObject* self, void*) {
  const auto storage = home_of(self).storage.lock();
  return PyLong_FromSize_t(storage ? tensors_on(storage.use_count() - 1, storage.get()) : 0);
}

inline PyObject* home_get_is_here(PyObject* self, void*) {
  return PyBool_FromLong(home_of(self).is_here);
}

inline PyObject* home_get_is_used(PyObject* self, void*) {
  return PyBool_FromLong(home_of(self).is_used());
}

// What an op was still working on when it returned is done by now.
inline PyObject* home_close(PyObject* self, PyObject*) {
  if (home_of(self).is_exposed.exchange(false)) ++home_of(self).writes;
  Py_RETURN_NONE;
}

inline PyObject* home_get_is_read(PyObject* self, void*) {
  return PyBool_FromLong(home_of(self).is_read);
}

inline int home_set_is_read(PyObject* self, PyObject* value, void*) {
  home_of(self).is_read = value == Py_True;
  return 0;
}

inline PyObject* home_get_is_gone(PyObject* self, void*) {
  return PyBool_FromLong(home_of(self).storage.expired());
}

inline PyObject* home_get_key(PyObject* self, void*) {
  return PyLong_FromVoidPtr(home_of(self).storage._unsafe_get_target());
}

inline PyObject* home_get_writes(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(home_of(self).writes);
}

inline PyObject* home_get_last_use(PyObject* self, void*) {
  return PyLong_FromUnsignedLongLong(home_of(self).last_use);
}

inline PyTypeObject* home_type() {
  static PyMethodDef methods[] = {
      {"take", home_take, METH_VARARGS, nullptr},
      {"give", home_give, METH_O, nullptr},
      {"close", home_close, METH_NOARGS, nullptr},
      {"mark", home_mark, METH_O, nullptr},
      {"stay_on_stream", home_stay_on_stream, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"storage", home_get_storage, nullptr, nullptr, nullptr},
      {"tensors", home_get_tensors, nullptr, nullptr, nullptr},
      {"is_here", home_get_is_here, nullptr, nullptr, nullptr},
      {"is_used", home_get_is_used, nullptr, nullptr, nullptr},
      {"is_read", home_get_is_read, home_set_is_read, nullptr, nullptr},
      {"is_gone", home_get_is_gone, nullptr, nullptr, nullptr},
      {"key", home_get_key, nullptr, nullptr, nullptr},
      {"writes", home_get_writes, nullptr, nullptr, nullptr},
      {"last_use", home_get_last_use, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(home_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(home_dealloc)},
      {Py_tp_methods, methods},
      {Py_tp_getset, attributes},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Home", sizeof(HomeObject), 0, Py_TPFLAGS_DEFAULT, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

// In Python: `is_away(key)`: whether the bytes of a storage are away.
inline PyObject* is_away(PyObject*, PyObject* key) {
  const c10::StorageImpl* storage = address_in(key);
  if (PyErr_Occurred()) return nullptr;
  const auto home = homes().at(storage);
  return PyBool_FromLong(home && !home->is_here);
}

// Calls `see` with each tensor with plain memory in nested lists, tuples and dictionaries, until it returns false.
template <class See>
bool each_plain_tensor(PyObject* nesting, const See& see) {
  if (THPVariable_Check(nesting)) {
    const at::Tensor& tensor = THPVariable_Unpack(nesting);
    return !is_plain(tensor) || see(tensor);
  }
  if (PyDict_Check(nesting)) {
    Py_ssize_t place = 0;
    PyObject* item = nullptr;
    while (PyDict_Next(nesting, &place, nullptr, &item))
      if (!each_plain_tensor(item, see)) return false;
    return true;
  }
  const bool is_list = PyList_Check(nesting);
  if (!is_list && !PyTuple_Check(nesting)) return true;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(nesting); ++index)
    if (!each_plain_tensor(PySequence_Fast_GET_ITEM(nesting, index), see)) return false;
  return true;
}

// In Python: `keys_of_homes(nesting)`: the keys of the homes of tensors in lists, tuples and dictionaries, in their order.
inline PyObject* keys_of_homes(PyObject*, PyObject* nesting) {
  HANDLE_TH_ERRORS
  Reference keys = checked(PyList_New(0));
  each_plain_tensor(nesting, [&](const at::Tensor& tensor) {
    auto* storage = storage_of(tensor).unsafeGetStorageImpl();
    if (!homes().at(storage)) return true;
    Reference key = checked(PyLong_FromVoidPtr(storage));
    if (PyList_Append(keys.get(), key.get()) < 0) raise();
    return true;
  });
  return keys.release();
  END_HANDLE_TH_ERRORS
}

// In Python: `keys_of(tensors)`: the keys of the storages of the tensors in a list, None for one without plain memory.
inline PyObject* keys_of(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "the tensors are in a list");
  Reference keys = checked(PyList_New(PyList_GET_SIZE(tensors)));
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); ++index) {
    PyObject* object = PyList_GET_ITEM(tensors, index);
    const bool has_key = THPVariable_Check(object) && is_plain(THPVariable_Unpack(object));
    Reference key = has_key ? checked(PyLong_FromVoidPtr(storage_of(THPVariable_Unpack(object)).unsafeGetStorageImpl()))
                            : Reference::to(Py_None);
    PyList_SET_ITEM(keys.get(), index, key.release());
  }
  return keys.release();
  END_HANDLE_TH_ERRORS
}

// In Python: `have_homes(nesting, device, least_bytes)`: whether all tensors on a device in lists, tuples and dictionaries,
// but for those with fewer bytes, are on storages with homes, and marked.
inline PyObject* have_homes(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  PyObject *nesting, *device;
  unsigned long long least_bytes;
  if (!PyArg_ParseTuple(arguments, "OOK", &nesting, &device, &least_bytes)) return nullptr;
  if (!THPDevice_Check(device)) return PyErr_Format(PyExc_TypeError, "a device is asked about");
  return PyBool_FromLong(each_plain_tensor(nesting, [&](const at::Tensor& tensor) {
    const c10::Storage& storage = storage_of(tensor);
    if (storage.nbytes() < least_bytes || tensor.device() != reinterpret_cast<THPDevice*>(device)->device) return true;
    return is_marked(tensor) && homes().at(storage.unsafeGetStorageImpl()) != nullptr;
  }));
  END_HANDLE_TH_ERRORS
}

// In Python: `here_bytes(device)`: the bytes of all homes on a device that are there.
inline PyObject* here_bytes(PyObject*, PyObject* device) {
  if (!THPDevice_Check(device)) return PyErr_Format(PyExc_TypeError, "a device is asked about");
  return PyLong_FromSize_t(homes().here_bytes(reinterpret_cast<THPDevice*>(device)->device));
}

// In Python: `is_marked(tensor)`: whether ops on a tensor come to the kernel wherever they run.
inline PyObject* is_marked_here(PyObject*, PyObject* tensor) {
  return PyBool_FromLong(THPVariable_Check(tensor) && is_marked(THPVariable_Unpack(tensor)));
}

// In Python: `set_in_type(type, name, value)`: sets an attribute of a type of PyTorch's, which Python does not let be set.
inline PyObject* set_in_type(PyObject*, PyObject* arguments) {
  PyTypeObject* type = nullptr;
  PyObject *name = nullptr, *value = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!UO", &PyType_Type, &type, &name, &value)) return nullptr;
#if PY_VERSION_HEX >= 0x030C0000
  Reference entries(PyType_GetDict(type));
#else
  Reference entries(Py_NewRef(type->tp_dict));
#endif
  if (PyDict_SetItem(entries.get(), name, value) < 0) return nullptr;
  PyType_Modified(type);
  Py_RETURN_NONE;
}

// In Python: `unmark(tensor)`, which has no home any more.
inline PyObject* unmark_here(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(tensor)) return PyErr_Format(PyExc_TypeError, "a tensor is marked no longer");
  unmark(THPVariable_Unpack(tensor));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// In Python: `tensors_beside(tensor)`: how many tensors there are on its storage, with it.
inline PyObject* tensors_beside(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return PyErr_Format(PyExc_TypeError, "a tensor is asked about");
  const c10::Storage& storage = storage_of(THPVariable_Unpack(tensor));
  return PyLong_FromSize_t(tensors_on(storage.use_count(), storage.unsafeGetStorageImpl()));
}

// In Python: `references_to(tensor)`: how many references there are to the tensor itself: one is that of its Python object,
// and each view that knows it as its base has one.
inline PyObject* references_to(PyObject*, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return PyErr_Format(PyExc_TypeError, "a tensor is asked about");
  return PyLong_FromSize_t(THPVariable_Unpack(tensor).use_count());
}

// In Python: `is_of_allocator(tensor)`: whether its memory is that of PyTorch's CPU allocator, and its own.
inline PyObject* is_of_allocator(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  if (!THPVariable_Check(tensor)) return PyErr_Format(PyExc_TypeError, "a tensor is asked about");
  return PyBool_FromLong(is_of_cpu_allocator(*storage_of(THPVariable_Unpack(tensor)).unsafeGetStorageImpl()));
  END_HANDLE_TH_ERRORS
}

// In Python: `use_homes(bring_back, part_bytes)`.
inline PyObject* use_homes(PyObject*, PyObject* arguments) {
  PyObject* function;
  unsigned long long bytes;
  if (!PyArg_ParseTuple(arguments, "OK", &function, &bytes)) return nullptr;
  Py_XDECREF(std::exchange(bring_back(), Py_NewRef(function)));
  part_bytes() = bytes;
  Py_RETURN_NONE;
}

// Has ops come to the kernel again where it is running, and so is off.
class KernelOn {
 public:
  KernelOn() { c10::impl::tls_set_dispatch_key_excluded(KEY, false); }
  ~KernelOn() { c10::impl::tls_set_dispatch_key_excluded(KEY, true); }
  KernelOn(const KernelOn&) = delete;
};

// In Python: `with_homes(function)` calls a function whose ops have the bytes of homes brought back, also where the kernel
// is running that would do so, in which it is off. No step sees them.
inline PyObject* with_homes(PyObject*, PyObject* function) {
  if (!homes().has_any() || !c10::impl::tls_is_dispatch_key_excluded(KEY)) return PyObject_CallNoArgs(function);
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);
  const KernelOn on;
  return PyObject_CallNoArgs(function);
}

// In Python: `is_in_op()`: whether the kernel is running an op in this thread. It holds the tensors that the op works on.
inline PyObject* is_in_op(PyObject*, PyObject*) {
  return PyBool_FromLong(c10::impl::tls_is_dispatch_key_excluded(KEY));
}

// In Python: `count_uses()` returns how many uses there were since `take_uses`.
inline PyObject* count_uses(PyObject*, PyObject*) {
  return PyLong_FromSize_t(homes().uses());
}

// In Python: `take_uses()` returns the keys of the homes in the order in which ops have used them since the last call.
inline PyObject* take_uses(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  const auto log = homes().take_log();
  Reference list = checked(PyList_New(static_cast<Py_ssize_t>(log.size())));
  for (size_t index = 0; index < log.size(); ++index)
    PyList_SET_ITEM(list.get(), index, checked(PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(log[index]))).release());
  return list.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace watch

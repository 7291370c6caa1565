// Calls of ops that can run again. What they read of the step is known by value and geometry, so that no storage is kept.
#pragma once
#include "home.h"
#include "settings.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Storage.h>

#include <memory>

namespace watch {

// Everything about a tensor except its bytes.
struct Geometry {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;

  static Geometry of(const at::Tensor& tensor) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    return {{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, tensor.storage_offset(), tensor.dtype()};
  }

  at::Tensor on(c10::Storage storage) const {
    const auto key = c10::computeDispatchKey(dtype.toScalarType(), c10::kStrided, storage.device());
    const bool is_home = homes().has_any() && homes().at(storage.unsafeGetStorageImpl());
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    if (is_home) mark(tensor);
    return tensor;
  }
};

// A tensor that is all in its bytes and its geometry.
inline bool is_ordinary(const at::Tensor& tensor) {
  return is_plain(tensor) && !tensor.is_conj() && !tensor.is_neg();
}

inline uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

enum class Origin : uint8_t {
  STEP,     // a value that the step has made
  OUTSIDE,  // from before the step: it must not change until the call runs again
  SCRATCH,  // running statistics that the op updates without reading them: the call updates a copy
};

struct TensorArgument {
  size_t argument;
  int64_t item;  // in its list, or -1
  Origin origin;
  bool is_written = false, is_preserved = false;
  int64_t value = -1;
  uint32_t version = 0;
  Geometry geometry;
  c10::Device device = at::kCPU;
  at::Tensor tensor, alias;  // from outside: the program's, if it has no history, and one on the storage that it had
};

struct Recipe {
  const Operator* facts;
  c10::OperatorHandle handle;
  Arguments arguments;  // without tensors
  std::vector<TensorArgument> tensors;
  const Settings* settings;
  bool has_gradients;
  int64_t made = -1;  // the first value that it made, in a step without a plan
};

constexpr size_t MOST_PRESERVED_BYTES = 16 << 20;  // of a storage from outside that is copied before an op changes it

inline c10::Storage copied(const c10::Storage& storage) {
  const at::AutoDispatchBelowAutograd below;
  const c10::impl::ExcludeDispatchKeyGuard modes(c10::DispatchKeySet(c10::DispatchKey::Python));
  const Geometry bytes{{static_cast<int64_t>(storage.nbytes())}, {1}, 0, caffe2::TypeMeta::Make<uint8_t>()};
  return storage_of(bytes.on(storage).clone());
}

// The calls that have read storages from outside of the step.
class Readers {
 public:
  bool is_empty() const { return count_.load(std::memory_order_acquire) == 0; }

  void add(const std::shared_ptr<Recipe>& recipe) {
    std::lock_guard guard(lock_);
    for (size_t index = 0; index < recipe->tensors.size(); ++index)
      if (recipe->tensors[index].origin == Origin::OUTSIDE)
        by_storage_[storage_of(recipe->tensors[index].alias).unsafeGetStorageImpl()].push_back({recipe, index});
    count_.store(by_storage_.size(), std::memory_order_release);
  }

  bool has(const c10::StorageImpl* storage) {
    if (is_empty()) return false;
    std::lock_guard guard(lock_);
    return by_storage_.find(storage) != by_storage_.end();
  }

  // Returns the first values that calls have made which read a storage, and forgets them.
  std::vector<int64_t> take(const c10::StorageImpl* storage) {
    std::lock_guard guard(lock_);
    std::vector<int64_t> made;
    const auto found = by_storage_.find(storage);
    if (found == by_storage_.end()) return made;
    for (const auto& [recipe, index] : found->second)
      if (const auto there = recipe.lock()) made.push_back(there->made);
    by_storage_.erase(found);
    count_.store(by_storage_.size(), std::memory_order_release);
    return made;
  }

  // Copies a storage that an op is about to change, for the calls that have read it. What is large stays as it is, and
  // the call is refused then.
  void preserve(const c10::StorageImpl* storage) {
    std::vector<std::pair<std::shared_ptr<Recipe>, size_t>> readers;
    {
      std::lock_guard guard(lock_);
      const auto found = by_storage_.find(storage);
      if (found == by_storage_.end()) return;
      for (auto& [recipe, index] : found->second)
        if (auto there = recipe.lock()) readers.emplace_back(std::move(there), index);
      by_storage_.erase(found);
      count_.store(by_storage_.size(), std::memory_order_release);
    }
    if (readers.empty() || storage->nbytes() > MOST_PRESERVED_BYTES) return;
    c10::Storage copy;
    for (const auto& [recipe, index] : readers) {
      TensorArgument& argument = recipe->tensors[index];
      const c10::Storage& original = storage_of(argument.alias);
      if (original.unsafeGetStorageImpl() != storage) continue;  // another one has come to its address
      if (!copy) copy = copied(original);
      argument.alias = Geometry::of(argument.alias).on(copy);
      argument.is_preserved = true;
    }
  }

 private:
  std::mutex lock_;
  std::unordered_map<const c10::StorageImpl*, std::vector<std::pair<std::weak_ptr<Recipe>, size_t>>> by_storage_;
  std::atomic<size_t> count_{0};
};

template <class Function>
void each_marked(uint64_t marks, const Arguments& arguments, Function&& function) {
  for (size_t index = 0; marks >> index != 0 && index < arguments.size(); ++index)
    if (marks >> index & 1) each_tensor(arguments[index], function);
}

// Running statistics that a batch norm updates. In evaluation mode it reads them.
inline uint64_t changed_statistics(const Operator& facts, const Arguments& arguments) {
  const bool is_training = facts.training < 0 || (arguments[facts.training].isBool() && arguments[facts.training].toBool());
  return is_training ? facts.statistics : 0;
}

inline bool is_simple(const c10::IValue& value) {
  return value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isString() ||
      value.isComplexDouble() || value.isDevice() || value.isIntList() || value.isDoubleList() || value.isBoolList();
}

// Whether a call is one of those that can be recorded here. Python records the others.
inline bool is_recordable(const Operator& facts, const Arguments& arguments) {
  if (!facts.is_recordable || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
  bool are_ordinary = true;
  const auto look = [&](const at::Tensor& tensor) {
    are_ordinary = are_ordinary && (!tensor.defined() || (is_ordinary(tensor) && (!facts.depends_on_call || tensor.is_cpu())));
  };
  for (const c10::IValue& argument : arguments) {
    const bool has_tensors = argument.isTensor() || argument.isTensorList() || argument.isOptionalTensorList();
    if (!has_tensors && !is_simple(argument)) return false;
    if (has_tensors) each_tensor(argument, look);
  }
  return are_ordinary;
}

inline void record_tensor(StorageMap& values, const std::vector<const c10::StorageImpl*>& written, bool is_statistics,
                          const at::Tensor& tensor, size_t argument, int64_t item, std::vector<TensorArgument>& found) {
  TensorArgument& made = found.emplace_back(TensorArgument{argument, item, Origin::SCRATCH});
  made.geometry = Geometry::of(tensor);
  made.device = tensor.device();
  if (is_statistics) return;
  auto* storage = storage_of(tensor).unsafeGetStorageImpl();
  const auto number = values.get(storage);
  if (number && *number >= 0) {
    made.origin = Origin::STEP;
    made.value = *number;
    made.is_written = std::find(written.begin(), written.end(), storage) != written.end();
    return;
  }
  made.origin = Origin::OUTSIDE;
  made.version = version_of(tensor);
  made.alias = detached(tensor, true);
  // It may be given other data, which a tensor with a history is not. That would hold the hooks of the step.
  if (!tensor.grad_fn()) made.tensor = tensor;
}

// Records a call that is about to run.
inline std::shared_ptr<Recipe> recorded(StorageMap& values, const Operator& facts, const c10::OperatorHandle& handle,
                                        const Arguments& arguments) {
  auto recipe = std::make_shared<Recipe>(Recipe{&facts, handle, arguments, {}, settings_here(), at::GradMode::is_enabled()});
  std::vector<const c10::StorageImpl*> written;
  each_marked(facts.written, arguments,
              [&](const at::Tensor& tensor) { written.push_back(storage_of(tensor).unsafeGetStorageImpl()); });
  const uint64_t statistics = changed_statistics(facts, arguments);
  for (size_t index = 0; index < arguments.size(); ++index) {
    const bool is_statistics = statistics >> index & 1;
    c10::IValue& argument = recipe->arguments[index];
    if (argument.isTensor()) {
      if (!argument.toTensor().defined()) continue;
      record_tensor(values, written, is_statistics, argument.toTensor(), index, -1, recipe->tensors);
      argument = c10::IValue();
    } else if (argument.isList() && !is_simple(argument)) {
      c10::impl::GenericList without(argument.toList().elementType());
      const auto items = argument.toListRef();
      for (size_t item = 0; item < items.size(); ++item) {
        const bool is_tensor = items[item].isTensor() && items[item].toTensor().defined();
        if (is_tensor)
          record_tensor(values, written, false, items[item].toTensor(), index, static_cast<int64_t>(item), recipe->tensors);
        without.push_back(is_tensor ? c10::IValue() : items[item]);
      }
      argument = c10::IValue(std::move(without));
    }
  }
  return recipe;
}

// A storage for each value that an op has made: those of its results in order, then what it has written besides.
inline c10::SmallVector<const c10::Storage*, 4> made_by(const Operator& facts, const Arguments& arguments,
                                                       const at::Tensor* const* outputs, size_t count) {
  c10::SmallVector<const c10::StorageImpl*, 8> read;
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage()) read.push_back(storage_of(tensor).unsafeGetStorageImpl());
    });
  c10::SmallVector<const c10::Storage*, 4> written, made;
  each_marked(facts.written, arguments, [&](const at::Tensor& tensor) {
    if (is_plain(tensor)) written.push_back(&storage_of(tensor));
  });
  const auto is_among = [](const auto& storages, const c10::StorageImpl* wanted) {
    return std::any_of(storages.begin(), storages.end(), [&](const c10::Storage* each) {
      return each->unsafeGetStorageImpl() == wanted;
    });
  };
  for (size_t index = 0; index < count; ++index) {
    const c10::Storage& storage = storage_of(*outputs[index]);
    const auto* address = storage.unsafeGetStorageImpl();
    const bool is_read = std::find(read.begin(), read.end(), address) != read.end();
    if (is_among(made, address) || (!is_among(written, address) && is_read)) continue;
    made.push_back(&storage);
  }
  for (const c10::Storage* storage : written)
    if (!is_among(made, storage->unsafeGetStorageImpl())) made.push_back(storage);
  return made;
}

// In Python: `Call`, which `executor.replay` runs again.
struct CallObject {
  PyObject_HEAD
  std::shared_ptr<Recipe>* recipe;
};

inline Recipe& recipe_of(PyObject* self) {
  return **reinterpret_cast<CallObject*>(self)->recipe;
}

inline void call_dealloc(PyObject* self) {
  delete reinterpret_cast<CallObject*>(self)->recipe;
  Py_TYPE(self)->tp_free(self);
}

inline PyObject* call_get_func(PyObject* self, void*) {
  return Py_NewRef(recipe_of(self).facts->function);
}

inline PyObject* call_get_settings(PyObject* self, void*) {
  return Py_NewRef(recipe_of(self).settings->python);
}

inline PyObject* call_get_reads(PyObject* self, void*) {
  c10::SmallVector<int64_t, 8> numbers;
  for (const auto& each : recipe_of(self).tensors)
    if (each.origin == Origin::STEP && std::find(numbers.begin(), numbers.end(), each.value) == numbers.end())
      numbers.push_back(each.value);
  PyObject* reads = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t index = 0; index < numbers.size(); ++index)
    PyTuple_SET_ITEM(reads, index, PyLong_FromLongLong(numbers[index]));
  return reads;
}

inline PyObject* call_get_reads_outside(PyObject* self, void*) {
  const auto& tensors = recipe_of(self).tensors;
  return PyBool_FromLong(std::any_of(tensors.begin(), tensors.end(), [](const TensorArgument& each) {
    return each.origin == Origin::OUTSIDE;
  }));
}

// Whether PyTorch's settings are what they were.
inline bool is_as_then(const Recipe& recipe) {
  return recipe.settings->stamp == stamp_now();
}

inline PyObject* call_get_is_as_then(PyObject* self, void*) {
  return PyBool_FromLong(is_as_then(recipe_of(self)));
}

inline bool has_no_memory(const at::Tensor& tensor) {
  return tensor.numel() > 0 && storage_of(tensor).nbytes() == 0;
}

// `refuse(tensor, version)` raises what is wrong with a tensor from outside: it has changed since `version`, or is empty.
inline PyObject*& refuse() {
  static PyObject* function = nullptr;
  return function;
}

inline bool has_moved(const TensorArgument& argument) {
  const at::Tensor& tensor = argument.tensor.defined() ? argument.tensor : argument.alias;
  if (argument.is_preserved || version_of(tensor) == argument.version) return false;
  return !is_plain(tensor) || storage_of(tensor).unsafeGetStorageImpl() == storage_of(argument.alias).unsafeGetStorageImpl();
}

// The storages of the values that a call reads, each asked for once: arguments that share one do so again.
class Resolved {
 public:
  explicit Resolved(PyObject* resolve) : resolve_(resolve) {}

  const c10::Storage& of(const TensorArgument& argument) {
    for (const auto& [value, storage] : found_)
      if (value == argument.value) return storage;
    Reference number = checked(PyLong_FromLongLong(argument.value));
    Reference storage = checked(
        PyObject_CallFunctionObjArgs(resolve_, number.get(), argument.is_written ? Py_True : Py_False, nullptr));
    return found_.emplace_back(argument.value, THPStorage_Unpack(storage.get())).second;
  }

 private:
  PyObject* resolve_;
  c10::SmallVector<std::pair<int64_t, c10::Storage>, 4> found_;
};

// Whether a call would not read what it has read outside of the step: `refuse` says why.
inline bool is_refused(const Recipe& recipe) {
  return std::any_of(recipe.tensors.begin(), recipe.tensors.end(), [](const TensorArgument& each) {
    return each.origin == Origin::OUTSIDE && (has_moved(each) || has_no_memory(each.alias));
  });
}

template <class Resolver>
at::Tensor argument_again(const TensorArgument& argument, Resolver& resolved) {
  if (argument.origin == Origin::STEP) return argument.geometry.on(resolved.of(argument));
  if (argument.origin == Origin::SCRATCH)
    return at::zeros(argument.geometry.sizes, at::TensorOptions(argument.geometry.dtype).device(argument.device));
  if (has_moved(argument) || has_no_memory(argument.alias)) {
    const at::Tensor& tensor = argument.tensor.defined() ? argument.tensor : argument.alias;
    Reference wrapped = checked(THPVariable_Wrap(has_moved(argument) ? tensor : argument.alias));
    Reference version = checked(PyLong_FromUnsignedLong(argument.version));
    checked(PyObject_CallFunctionObjArgs(refuse(), wrapped.get(), version.get(), nullptr));
  }
  return argument.alias;
}

// The arguments of a call as they were. `resolved.of(argument)` returns the storage of one that the step has made.
template <class Resolver>
Arguments arguments_again(const Recipe& recipe, Resolver& resolved) {
  Arguments arguments = recipe.arguments;
  for (c10::IValue& argument : arguments)
    if (argument.isList() && !is_simple(argument)) argument = c10::IValue(argument.toList().copy());
  for (const TensorArgument& each : recipe.tensors) {
    at::Tensor tensor = argument_again(each, resolved);
    if (each.item < 0) arguments[each.argument] = std::move(tensor);
    else arguments[each.argument].toList().set(each.item, c10::IValue(std::move(tensor)));
  }
  return arguments;
}

// Runs a call again, below autograd and under the gradient mode of the first run.
inline void run_again(const Recipe& recipe, Stack& stack) {
  const pybind11::gil_scoped_release without_lock;
  const at::AutoDispatchBelowAutograd below;
  const c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKeySet({c10::DispatchKey::Python, KEY}));
  const at::AutoGradMode gradients(recipe.has_gradients);
  recipe.handle.callBoxed(stack);
}

using Storages = c10::SmallVector<c10::Storage, 4>;

// Runs a call again, and returns the storages of its new values.
template <class Resolver>
Storages made_again(const Recipe& recipe, Resolver& resolved) {
  const Arguments arguments = arguments_again(recipe, resolved);
  const Use use(arguments, recipe.facts->written, false);
  Stack stack(arguments.begin(), arguments.end());
  run_again(recipe, stack);
  c10::SmallVector<const at::Tensor*, 8> outputs;
  for (const c10::IValue& result : stack)
    each_tensor(result, [&](const at::Tensor& tensor) {
      if (is_plain(tensor)) outputs.push_back(&tensor);
    });
  Storages made;
  for (const c10::Storage* storage : made_by(*recipe.facts, arguments, outputs.data(), outputs.size()))
    made.push_back(*storage);
  return made;
}

// `replay(resolve)` runs the call again, and returns the storages of its new values.
inline PyObject* call_replay(PyObject* self, PyObject* resolve) {
  HANDLE_TH_ERRORS
  Resolved resolved(resolve);
  const Storages made = made_again(recipe_of(self), resolved);
  Reference list = checked(PyList_New(static_cast<Py_ssize_t>(made.size())));
  for (size_t index = 0; index < made.size(); ++index)
    PyList_SET_ITEM(list.get(), index, checked(THPStorage_Wrap(made[index])).release());
  return list.release();
  END_HANDLE_TH_ERRORS
}

inline PyTypeObject* call_type() {
  static PyGetSetDef attributes[] = {
      {"func", call_get_func, nullptr, nullptr, nullptr},
      {"settings", call_get_settings, nullptr, nullptr, nullptr},
      {"reads", call_get_reads, nullptr, nullptr, nullptr},
      {"reads_outside", call_get_reads_outside, nullptr, nullptr, nullptr},
      {"is_as_then", call_get_is_as_then, nullptr, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef methods[] = {{"replay", call_replay, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(call_dealloc)},
      {Py_tp_getset, attributes},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec{"watch.Call", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return type;
}

inline Reference to_python(std::shared_ptr<Recipe> recipe) {
  auto* self = reinterpret_cast<CallObject*>(checked(call_type()->tp_alloc(call_type(), 0)).release());
  self->recipe = new std::shared_ptr<Recipe>(std::move(recipe));
  return Reference(reinterpret_cast<PyObject*>(self));
}

}  // namespace watch

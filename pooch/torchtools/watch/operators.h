// What is known about an operator, and its arguments as Python gets them from a dispatch mode.
#pragma once
#include "storages.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace watch {

using Stack = torch::jit::Stack;
using Arguments = c10::SmallVector<c10::IValue, 12>;

struct Operator {
  c10::OperatorName name;
  PyObject* function;  // the OpOverload, which is never released
  uint64_t written;    // positions of arguments that it writes, by bits
  uint64_t statistics;  // those of running statistics that it updates unless the argument at `training` is false
  int training;         // -1: there is no such argument
  bool is_view, reads_nothing, is_special, is_recordable, depends_on_call;
  bool may_write_any;  // of its arguments, without declaring it
  bool makes_views;    // of its arguments, without declaring it
  uint64_t number;     // of its name
  bool gives_tensors;
};

inline uint64_t combined(uint64_t hash, uint64_t more) {
  return (hash ^ (more + 0x9e3779b97f4a7c15 + (hash << 6) + (hash >> 2))) * 0xff51afd7ed558ccd;
}

inline bool gives_tensors(const c10::FunctionSchema& schema) {
  const auto& returned = schema.returns();
  return std::any_of(returned.begin(), returned.end(), [](const c10::Argument& each) {
    const auto list = each.type()->cast<c10::ListType>();
    return (list ? list->getElementType() : each.type())->isSubtypeOf(*c10::TensorType::get());
  });
}

// `describe(name, overload)` returns the OpOverload, masks of arguments, and flags; see `watch/__init__.py`.
inline PyObject*& describe() {
  static PyObject* function = nullptr;
  return function;
}

inline const Operator& operator_of(const c10::OperatorHandle& handle) {
  static std::mutex lock;
  static auto* known = new ska::flat_hash_map<const c10::FunctionSchema*, const Operator*>;
  thread_local ska::flat_hash_map<const c10::FunctionSchema*, const Operator*> seen;
  const c10::FunctionSchema* key = &handle.schema();
  const auto found = seen.find(key);
  // An operator of the program's may have ended, and another one have come to its address.
  if (found != seen.end() && found->second->name == handle.operator_name()) return *found->second;
  {
    std::lock_guard guard(lock);
    const auto entry = known->find(key);
    if (entry != known->end() && entry->second->name == handle.operator_name()) {
      seen[key] = entry->second;
      return *entry->second;
    }
  }
  const Operator* made = nullptr;
  {
    Gil gil;
    const auto& name = handle.operator_name();
    Reference found_facts = checked(PyObject_CallFunction(describe(), "ss", name.name.c_str(), name.overload_name.c_str()));
    PyObject* function = nullptr;
    unsigned long long written = 0, statistics = 0;
    int training = -1, is_view = 0, reads_nothing = 0, is_special = 0, is_recordable = 0, depends_on_call = 0;
    int may_write_any = 0, makes_views = 0;
    if (!PyArg_ParseTuple(found_facts.get(), "OKKippppppp", &function, &written, &statistics, &training, &is_view,
                          &reads_nothing, &is_special, &is_recordable, &depends_on_call, &may_write_any, &makes_views))
      raise();
    Py_INCREF(function);
    made = new Operator{name, function, written, statistics, training, is_view != 0, reads_nothing != 0, is_special != 0,
                        is_recordable != 0, depends_on_call != 0, may_write_any != 0, makes_views != 0,
                        combined(std::hash<std::string>()(name.name), std::hash<std::string>()(name.overload_name)),
                        gives_tensors(*key)};
  }
  std::lock_guard guard(lock);
  (*known)[key] = made;  // one that was there before is never freed: another thread may hold it
  seen[key] = made;
  return *made;
}

template <class Function>
void each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef())
      if (each.isTensor()) function(each.toTensor());
  }
}

// The tensors among the results of an op.
template <class Function>
void each_result(const Stack& stack, const c10::OperatorHandle& handle, Function&& function) {
  const auto count = static_cast<std::ptrdiff_t>(handle.schema().returns().size());
  for (auto value = stack.end() - count; value != stack.end(); ++value)
    each_tensor(*value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) function(tensor);
    });
}

inline bool is_of_kind(const c10::Argument& argument, c10::TypeKind kind) {
  const auto& type = argument.real_type();
  if (type->kind() == kind) return true;
  const auto optional = type->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == kind;
}

inline Reference to_python(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isNone()) return Reference::to(Py_None);
  if (value.isInt()) {
    if (is_of_kind(argument, c10::ScalarTypeType::Kind))
      return Reference::to(reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<c10::ScalarType>(value.toInt()))));
    if (is_of_kind(argument, c10::LayoutType::Kind))
      return Reference::to(reinterpret_cast<PyObject*>(torch::getTHPLayout(static_cast<c10::Layout>(value.toInt()))));
    if (is_of_kind(argument, c10::MemoryFormatType::Kind))
      return Reference::to(torch::utils::getTHPMemoryFormat(static_cast<c10::MemoryFormat>(value.toInt())));
  }
  return Reference(torch::jit::toPyObject(value).release().ptr());
}

// The arguments of a call as a dispatch mode gets them: without those at the end that have their default.
inline std::pair<Reference, Reference> to_python(const c10::OperatorHandle& handle, const Arguments& arguments) {
  const auto& declared = handle.schema().arguments();
  const auto is_default = [&](size_t index) {
    const auto& standard = declared[index].default_value();
    return standard.has_value() && *standard == arguments[index];
  };
  size_t positional = 0;
  while (positional < declared.size() && !declared[positional].kwarg_only()) ++positional;
  size_t given = positional;
  while (given > 0 && is_default(given - 1)) --given;
  Reference args = checked(PyTuple_New(static_cast<Py_ssize_t>(given)));
  for (size_t index = 0; index < given; ++index)
    PyTuple_SET_ITEM(args.get(), index, to_python(declared[index], arguments[index]).release());
  Reference kwargs = checked(PyDict_New());
  for (size_t index = positional; index < declared.size(); ++index) {
    if (is_default(index)) continue;
    Reference value = to_python(declared[index], arguments[index]);
    if (PyDict_SetItemString(kwargs.get(), declared[index].name().c_str(), value.get()) < 0) raise();
  }
  return {std::move(args), std::move(kwargs)};
}

}  // namespace watch

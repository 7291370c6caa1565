// Ops on lists of tensors that have homes, in parts: as a whole they would need the bytes of all of them at once.
#pragma once
#include "home.h"

namespace watch {

// Whether an operator treats each item of its lists by itself, so that parts of them give the same. A tensor of scalars,
// one for each item, would have to be cut as well.
inline bool is_by_items(const c10::OperatorHandle& handle) {
  const std::string_view name = handle.operator_name().name;
  for (const c10::Argument& argument : handle.schema().arguments())
    if (argument.name() == "scalars" && argument.type()->kind() == c10::TypeKind::TensorType) return false;
  return name.starts_with("aten::_foreach_") || name == "aten::_amp_foreach_non_finite_check_and_unscale_";
}

// The lists of a call, cut at the same places.
class Parts {
 public:
  explicit Parts(const Arguments& arguments) : arguments_(arguments) {
    bool is_first = true;  // it may be empty, which PyTorch refuses
    for (const c10::IValue& argument : arguments) {
      if (!argument.isList()) continue;
      const size_t size = argument.toListRef().size();
      is_even_ = is_even_ && (is_first || size == count_);
      count_ = size, is_first = false;
    }
    cut();
  }

  // Whether there is more than one, and each list has as many items as the others.
  bool are_several() const { return is_even_ && ends_.size() > 1; }

  size_t size() const { return ends_.size(); }

  Arguments at(size_t index) const {
    const size_t begin = index == 0 ? 0 : ends_[index - 1];
    Arguments part = arguments_;
    for (c10::IValue& argument : part) {
      if (!argument.isList()) continue;
      const auto whole = argument.toList();
      c10::impl::GenericList items(whole.elementType());
      for (size_t item = begin; item < ends_[index]; ++item) items.push_back(whole.get(item));
      argument = c10::IValue(std::move(items));
    }
    return part;
  }

 private:
  // The bytes of an item in all lists, as far as they have homes.
  size_t bytes_of(size_t item) const {
    size_t bytes = 0;
    for (const c10::IValue& argument : arguments_) {
      if (!argument.isTensorList()) continue;
      const at::Tensor tensor = argument.toListRef()[item].toTensor();
      if (is_marked(tensor)) bytes += storage_of(tensor).nbytes();
    }
    return bytes;
  }

  void cut() {
    if (!is_even_) return;
    const size_t most_bytes = part_bytes();
    size_t bytes = 0;
    for (size_t item = 0; item < count_; ++item) {
      const size_t more = bytes_of(item);
      if (bytes != 0 && bytes + more > most_bytes) ends_.push_back(item), bytes = 0;
      bytes += more;
    }
    ends_.push_back(count_);
  }

  const Arguments& arguments_;
  size_t count_ = 0;
  bool is_even_ = true;
  std::vector<size_t> ends_;
};

// Runs a call part by part, and leaves the lists of its results on the stack as if it had been one.
template <class Run>
void run_in_parts(const c10::OperatorHandle& handle, const Parts& parts, Stack* stack, Run&& run) {
  const size_t count = handle.schema().returns().size();
  std::vector<c10::List<at::Tensor>> results(count);
  for (size_t index = 0; index < parts.size(); ++index) {
    Stack part;
    for (c10::IValue& argument : parts.at(index)) part.push_back(argument);
    run(&part);
    for (size_t place = 0; place < count; ++place)
      for (const at::Tensor& tensor : part[place].toTensorVector()) results[place].push_back(tensor);
  }
  stack->resize(stack->size() - handle.schema().arguments().size());
  for (auto& list : results) stack->emplace_back(std::move(list));
}

}  // namespace watch

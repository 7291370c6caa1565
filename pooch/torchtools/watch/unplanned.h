// Ops of a step without a plan: their results get numbers, and their calls are recorded, so that what they have made can
// be made again. Python takes the calls once something has to leave.
#pragma once
#include "region.h"

#include <torch/csrc/autograd/function.h>

#include <chrono>

namespace watch {

inline int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// Whether a tensor was there before the step, or is a view of one that was. Others may hold the step by their history.
inline bool is_from_before(const at::Tensor& tensor, uint64_t first_node) {
  const auto node = (tensor.is_view() ? tensor._base() : at::TensorBase(tensor)).grad_fn();
  return !node || node->sequence_nr() < first_node;
}

// Tells an op, with all that leads to it, from others; nothing, if it reads what cannot be made again.
inline std::optional<uint64_t> recipe_number(State& state, const Operator& facts, const Arguments& arguments) {
  uint64_t number = facts.number;
  bool is_replayable = true;
  const auto look = [&](const at::Tensor& tensor) {
    if (!is_replayable || !tensor.defined()) return;
    auto* storage = storage_of(tensor).unsafeGetStorageImpl();
    const auto value = state.values->get(storage);
    if (value && *value >= 0) {
      const auto source = state.made_here.of(*value);
      is_replayable = source.has_value();
      if (source) number = combined(combined(number, source->recipe), source->place);
    } else {
      is_replayable = is_from_before(tensor, state.first_node) && !state.handed_out.holds(storage);
    }
  };
  for (const c10::IValue& argument : arguments) each_tensor(argument, look);
  return is_replayable ? std::optional<uint64_t>(number) : std::nullopt;
}

// Whether nothing about an op has to be done in Python.
inline bool is_ordinary_op(State& state, const Operator& facts, const Arguments& arguments) {
  if (!state.records || state.needs_attention || facts.is_special || !state.is_at_home()) return false;
  if (!state.away.is_empty() || state.awaited.is_any_released()) return false;  // as where a plan was left
  if (!is_recordable(facts, arguments)) return false;
  bool is_ordinary = true;
  each_marked(facts.written | changed_statistics(facts, arguments), arguments, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* storage = storage_of(tensor).unsafeGetStorageImpl();
    is_ordinary = is_ordinary && !state.readers.has(storage) && !state.read_in_python.holds(storage);
  });
  return is_ordinary;
}

// The time that an op took, without what making room for it took. Only that takes long.
inline double op_ms(State& state, int64_t elapsed_ns) {
  constexpr int64_t LONG_NS = 50'000;
  double elapsed_ms = static_cast<double>(elapsed_ns) / 1e6;
  if (elapsed_ns < LONG_NS) return elapsed_ms;
  Gil gil;
  static PyObject* const name = interned("stall_ms");
  if (state.carrier == nullptr) return elapsed_ms;
  Reference carrier = Reference::to(state.carrier), stall = checked(PyObject_CallMethodNoArgs(carrier.get(), name));
  const double stall_ms = PyFloat_AsDouble(stall.get());
  return std::max(0.0, elapsed_ms - (stall_ms - std::exchange(state.stall_ms, stall_ms)));
}

// Asks Python where in the program a recipe is met that is new.
inline void note_place(State& state, uint64_t recipe) {
  static std::mutex lock;
  static auto* known = new std::unordered_set<uint64_t>;
  constexpr size_t MOST = 1 << 18;
  {
    std::lock_guard guard(lock);
    if (known->size() >= MOST) known->clear();
    if (!known->insert(combined(state.places, recipe)).second) return;
  }
  Gil gil;
  static PyObject* const name = interned("note_place");
  if (state.carrier == nullptr) return;
  Reference carrier = Reference::to(state.carrier), number = checked(PyLong_FromLongLong(static_cast<int64_t>(recipe)));
  call(carrier.get(), name, number.get());
}

// Gives new numbers to what an op has made, and keeps its call.
inline void number_made(State& state, const c10::SmallVector<const c10::Storage*, 4>& made,
                        std::shared_ptr<Recipe> recipe, uint64_t number, double time_ms) {
  std::vector<int64_t> writes;
  for (const c10::Storage* storage : made) {
    writes.push_back(state.next_number++);
    state.values->bind(*storage, writes.back());
  }
  if (!recipe) return;
  note_place(state, number);
  for (size_t place = 0; place < writes.size(); ++place) state.made_here.add(writes[place], {number, place});
  recipe->made = writes.front();
  state.readers.add(recipe);
  state.unplanned.add({std::move(recipe), std::move(writes), number, time_ms});
}

template <class Run>
void run_unplanned(State& state, const Operator& facts, const c10::OperatorHandle& handle, const Arguments& arguments,
                   Stack* stack, Run&& run) {
  const int64_t begin_ns = now_ns();
  const bool can_repeat = note_written(state, facts, arguments);
  const auto number = can_repeat ? recipe_number(state, facts, arguments) : std::nullopt;
  auto recipe = number ? recorded(*state.values, facts, handle, arguments) : nullptr;
  const int64_t start_ns = now_ns();
  run();
  const int64_t end_ns = now_ns();
  c10::SmallVector<const at::Tensor*, 8> outputs;
  bool are_ordinary = true;
  each_result(*stack, handle, [&](const at::Tensor& tensor) {
    are_ordinary = are_ordinary && is_ordinary(tensor);
    if (is_plain(tensor)) outputs.push_back(&tensor);
  });
  const auto made = made_by(facts, arguments, outputs.data(), outputs.size());
  if (!made.empty()) {
    const bool is_kept = recipe && are_ordinary && !state.has_overlapped;
    number_made(state, made, is_kept ? std::move(recipe) : nullptr, number.value_or(0), op_ms(state, end_ns - start_ns));
  }
  each_marked(changed_statistics(facts, arguments), arguments, [&](const at::Tensor& tensor) {
    if (tensor.defined() && state.values->get(storage_of(tensor).unsafeGetStorageImpl()))
      state.values->bind(storage_of(tensor), state.next_number++);
  });
  state.recording_ns += now_ns() - end_ns + start_ns - begin_ns;
}

}  // namespace watch

// Sees every op of a region below autograd and Python, where a dispatch mode would see it.
//
// Where a plan is followed, an op that is expected next is compared with what ran there before, its results are bound to
// their values, and nothing of it comes to Python unless something is due. All other ops are passed to Python before and
// after they run. The op itself always runs here.
#pragma once
#include "acting.h"
#include "parts.h"
#include "unplanned.h"

namespace watch {

// The keys below this one, to which ops are passed on. `callBoxed` would compute them anew, and enter autograd again.
inline const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);

// Notes that an op is running: of those that overlap, none can be told apart from the others.
class Running {
 public:
  explicit Running(State& state) : state_(state), is_alone(!state.is_busy.exchange(true)) {
    state.has_overlapped = !is_alone;
  }
  ~Running() {
    if (is_alone) state_.is_busy = false;
  }
  Running(const Running&) = delete;

 private:
  State& state_;

 public:
  const bool is_alone;
};

inline Arguments arguments_on(const Stack& stack, const c10::OperatorHandle& handle) {
  return {stack.end() - static_cast<std::ptrdiff_t>(handle.schema().arguments().size()), stack.end()};
}

// Asks Python whether an op that has failed can run again. If not, its error is thrown.
inline void ask_to_run_again(State& state, const Operator& facts) {
  const auto failure = std::current_exception();
  Gil gil;
  static PyObject* const name = interned("can_run_again");
  if (state.carrier == nullptr) std::rethrow_exception(failure);
  Reference carrier = Reference::to(state.carrier);
  torch::translate_exception_to_python(failure);
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  Reference error = Reference::to(value == nullptr ? Py_None : value);
  Reference can_run(PyObject_CallMethodObjArgs(carrier.get(), name, facts.function, error.get(), nullptr));
  if (can_run.get() == Py_True) {
    Reference owned_type(type), owned_value(value), owned_trace(trace);
    return;
  }
  if (!can_run) PyErr_Clear();  // what the op has raised comes first
  PyErr_Restore(type, value, trace);
  raise();  // and not the error of C++: that of Python code can be passed to Python once only
}

// Runs an op, and once more if memory ran out, nothing had happened, and there is more now.
inline void run(State& state, const Operator& facts, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                const Arguments& arguments, Stack* stack) {
  const size_t beneath = stack->size() - arguments.size();
  try {
    handle.redispatchBoxed(keys, stack);
    return;
  } catch (const std::exception&) {
    stack->resize(std::min(beneath, stack->size()));  // of what it was given and has made, anything may be left
    ask_to_run_again(state, facts);
  }
  stack->insert(stack->end(), arguments.begin(), arguments.end());
  handle.redispatchBoxed(keys, stack);
}

inline std::vector<at::Tensor> results_on(const Stack& stack, const c10::OperatorHandle& handle) {
  std::vector<at::Tensor> found;
  each_result(stack, handle, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

inline Reference list_of(const std::vector<at::Tensor>& tensors) {
  Reference list = checked(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t index = 0; index < tensors.size(); ++index)
    PyList_SET_ITEM(list.get(), index, THPVariable_Wrap(tensors[index]));
  return list;
}

// Passes an op to Python after it ran, and learns what it looks like if that is where the path went on.
inline void tell_after(State& state, PyObject* carrier, const Operator& facts, const c10::OperatorHandle& handle,
                       PyObject* storages, const std::vector<at::Tensor>& outputs) {
  static PyObject* const name = interned("after");
  const int64_t position = state.position;
  Reference listed = list_of(outputs);
  call(carrier, name, facts.function, storages, listed.get());
  if (state.on_path && state.position == position + 1 && std::all_of(outputs.begin(), outputs.end(), is_plain))
    state.path->learn(position, &handle.schema(), outputs);
}

// Whether a call reads no other values than those that are at hand where it runs again.
inline bool has_at_hand(const Expected& expected, const Recipe& recipe) {
  const auto is_there = [&](const TensorArgument& each) {
    return each.origin != Origin::STEP ||
        std::find(expected.reads->begin(), expected.reads->end(), each.value) != expected.reads->end();
  };
  return !expected.reads || std::all_of(recipe.tensors.begin(), recipe.tensors.end(), is_there);
}

// Records the next call on the path, if it is to run again.
inline std::shared_ptr<Recipe> to_replay(State& state, const Operator& facts, const c10::OperatorHandle& handle,
                                         const Arguments& arguments) {
  const size_t position = state.position;
  if (!state.on_path || position >= state.path->size() || !state.path->at(position).is_replayed) return nullptr;
  const Recognised* recognised = state.path->at(position).recognised.load(std::memory_order_acquire);
  if (recognised == nullptr || recognised->schema != &handle.schema() || !is_recordable(facts, arguments)) return nullptr;
  auto recipe = recorded(*state.values, facts, handle, arguments);
  if (!has_at_hand(state.path->at(position), *recipe)) return nullptr;
  state.readers.add(recipe);
  return recipe;
}

// Passes an op to Python before and after it runs.
inline void run_told(State& state, const Operator& facts, const c10::OperatorHandle& handle, c10::DispatchKeySet keys,
                     const Arguments& arguments, Stack* stack, bool is_alone) {
  Reference carrier, args, kwargs, storages;
  {
    Gil gil;
    if (state.carrier != nullptr) {
      carrier = Reference::to(state.carrier);
      auto given = to_python(handle, arguments);
      args = std::move(given.first), kwargs = std::move(given.second);
    }
  }
  if (!carrier) return handle.redispatchBoxed(keys, stack);
  struct End {  // the interpreter's lock is not held where an op throws
    Reference &carrier, &args, &kwargs, &storages;
    ~End() {
      Gil gil;
      static PyObject* const ended = interned("ended");
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Reference none(PyObject_CallMethodNoArgs(carrier.get(), ended));
      PyErr_Restore(type, value, trace);
      carrier = Reference(), args = Reference(), kwargs = Reference(), storages = Reference();
    }
  } end{carrier, args, kwargs, storages};
  const int64_t position = state.position;
  std::shared_ptr<Recipe> recipe = is_alone ? to_replay(state, facts, handle, arguments) : nullptr;
  state.is_recorded = recipe != nullptr;
  if (!recipe) state.recorded.leave_to_python(position);
  {
    Gil gil;
    static PyObject* const before = interned("before");
    Reference alone = Reference::to(is_alone ? Py_True : Py_False);
    storages = call(carrier.get(), before, facts.function, args.get(), kwargs.get(), alone.get());
  }
  state.is_recorded = false;
  run(state, facts, handle, keys, arguments, stack);
  if (recipe) state.recorded.add(position, std::move(recipe));
  if (storages.get() == Py_None) return;  // the step is not to see what it gives
  const auto outputs = results_on(*stack, handle);
  Gil gil;
  tell_after(state, carrier.get(), facts, handle, storages.get(), outputs);
}

// Binds what an expected op has made to its values.
inline bool bind_new(State& state, const c10::SmallVector<const c10::Storage*, 4>& made, const Expected& expected) {
  if (made.size() != expected.writes.size()) return false;
  for (size_t index = 0; index < made.size(); ++index) {
    const int64_t number = expected.writes[index];
    state.values->bind(*made[index], number);
    if (Path::holds(state.path->sources, number)) state.sources->put(number, *made[index]);
    else if (Path::holds(state.path->swapped, number)) state.made->put(number, *made[index]);
  }
  return true;
}

// Copies what an op is about to change and calls that are to run again have read.
inline void preserve(State& state, const Operator& facts, const Arguments& arguments) {
  if (state.readers.is_empty()) return;
  const uint64_t changed = facts.written | changed_statistics(facts, arguments);
  each_marked(changed, arguments, [&](const at::Tensor& tensor) {
    if (is_plain(tensor)) state.readers.preserve(storage_of(tensor).unsafeGetStorageImpl());
  });
}

inline void run_expected(State& state, const Operator& facts, const c10::OperatorHandle& handle,
                         c10::DispatchKeySet keys, const Arguments& arguments, Stack* stack,
                         std::shared_ptr<Recipe> recipe) {
  if (facts.written != 0 || facts.statistics != 0) preserve(state, facts, arguments);
  if (facts.written != 0) note_written(state, facts, arguments);
  run(state, facts, handle, keys, arguments, stack);
  c10::SmallVector<const at::Tensor*, 8> outputs;
  bool are_plain = true;
  each_result(*stack, handle, [&](const at::Tensor& tensor) {
    outputs.push_back(&tensor);
    are_plain = are_plain && is_plain(tensor);
  });
  if (outputs.empty() && facts.written == 0) return;  // as `.item()`: the plan does not mind it
  c10::SmallVector<const c10::Storage*, 4> made;
  if (are_plain) made = made_by(facts, arguments, outputs.data(), outputs.size());
  if (are_plain && made.empty()) return;  // as `_unsafe_view`
  const size_t position = state.position;
  if (recipe) state.recorded.add(static_cast<int64_t>(position), std::move(recipe));
  Expected* expected = state.on_path && position < state.path->size() ? &state.path->at(position) : nullptr;
  const Recognised* recognised = expected == nullptr ? nullptr : expected->recognised.load(std::memory_order_acquire);
  if (recognised != nullptr && are_plain && !expected->is_awaited &&
      state.path->agrees(*recognised, &handle.schema(), outputs.data(), outputs.size()) &&
      bind_new(state, made, *expected)) {
    state.position = static_cast<int64_t>(position) + 1;
    return;
  }
  Gil gil;
  if (state.carrier == nullptr) return;
  Reference carrier = Reference::to(state.carrier);
  static PyObject* const name = interned("storages_of");
  auto given = to_python(handle, arguments);
  Reference storages = call(carrier.get(), name, facts.function, given.first.get(), given.second.get());
  tell_after(state, carrier.get(), facts, handle, storages.get(), results_on(*stack, handle));
}

// Whether an op may read a storage whose bytes are away.
inline bool reads_away(State& state, const Arguments& arguments) {
  if (state.away.is_empty()) return false;
  bool found = false;
  for (const c10::IValue& argument : arguments)
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      found = found || !is_plain(tensor) || state.away.holds(storage_of(tensor).unsafeGetStorageImpl());
    });
  return found;
}

// Whether an op changes what calls that Python has recorded have read.
inline bool changes_for_python(State& state, const Operator& facts, const Arguments& arguments) {
  if ((facts.written == 0 && facts.statistics == 0) || state.read_in_python.is_empty()) return false;
  bool found = false;
  each_marked(facts.written | changed_statistics(facts, arguments), arguments, [&](const at::Tensor& tensor) {
    found = found || (is_plain(tensor) && state.read_in_python.holds(storage_of(tensor).unsafeGetStorageImpl()));
  });
  return found;
}

// Whether something is to be done before the next op on the path, which is thought to be this one.
inline bool is_due(State& state, const c10::OperatorHandle& handle) {
  const size_t position = state.position;
  if (!state.on_path || position >= state.path->size()) return false;
  const Recognised* recognised = state.path->at(position).recognised.load(std::memory_order_acquire);
  return state.path->at(position).is_due && recognised != nullptr && recognised->schema == &handle.schema();
}

// Has Python do what is due before an op that is expected, of which it hears nothing else. Returns whether it has.
inline bool act(State& state) {
  Gil gil;
  static PyObject* const name = interned("act");
  if (state.carrier == nullptr) return false;
  Reference carrier = Reference::to(state.carrier);
  if (state.moves != nullptr) {
    const Reference owned = Reference::to(reinterpret_cast<PyObject*>(state.moves));
    Moves& moves = *moves_of(owned.get());
    const int64_t slot = state.path->first_slot + state.position;
    const Outcome outcome = under_lock(moves, [&] { return act_at(moves, slot); });
    if (outcome == Outcome::FAILED) raise();
    if (outcome == Outcome::DONE) return true;
  }
  return call(carrier.get(), name).get() == Py_True;
}

// Whether all that has to be known before an op is known here, once what is due is done.
inline bool is_expected(State& state, const Operator& facts, const c10::OperatorHandle& handle,
                        const Arguments& arguments) {
  if (!state.on_path || state.needs_attention || facts.is_special || !state.is_at_home()) return false;
  if (reads_away(state, arguments)) return false;
  if (changes_for_python(state, facts, arguments) || state.awaited.is_any_released()) return false;
  const size_t position = state.position;
  if (position >= state.path->size()) return false;
  const Expected& expected = state.path->at(position);
  const Recognised* recognised = expected.recognised.load(std::memory_order_acquire);
  if (recognised == nullptr) return false;
  if (expected.is_due && recognised->schema != &handle.schema() && !facts.makes_views) return false;
  bool are_plain = true;
  if (facts.written != 0)
    each_marked(facts.written, arguments, [&](const at::Tensor& tensor) { are_plain = are_plain && is_plain(tensor); });
  return are_plain;
}

inline void tell(State& state, const char* method, const Operator& facts, const c10::OperatorHandle& handle,
                 const Arguments& arguments) {
  Gil gil;
  if (state.carrier == nullptr) return;
  Reference carrier = Reference::to(state.carrier), name(interned(method));
  auto given = to_python(handle, arguments);
  call(carrier.get(), name.get(), facts.function, given.first.get(), given.second.get());
}

// Whether an op works on what has a home: its bytes have to be there, unless it makes a mere view of them.
inline bool is_on_home(const Stack& stack, const c10::OperatorHandle& handle) {
  bool found = false;
  const auto count = static_cast<std::ptrdiff_t>(handle.schema().arguments().size());
  for (auto value = stack.end() - count; value != stack.end() && !found; ++value)
    each_tensor(*value, [&](const at::Tensor& tensor) { found = found || is_marked(tensor); });
  return found;
}

inline void seen(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack);

// Takes an op into what tells those of a step from others.
inline void note_op(State& state, const Operator& facts) {
  if (std::this_thread::get_id() == state.thread) state.ops = combined(state.ops, facts.number);
  else state.is_ordered = false;
}

// Runs an op on what has homes, while their bytes are there.
inline void on_homes(const c10::OperatorHandle& handle, const Operator& facts, c10::DispatchKeySet keys, Stack* stack) {
  const Arguments arguments = arguments_on(*stack, handle);
  const uint64_t written = facts.may_write_any ? ~uint64_t{0} : facts.written | changed_statistics(facts, arguments);
  const Use use(arguments, written, facts.is_special);
  seen(handle, keys, stack);
  each_result(*stack, handle, stay_in);
}

// Has a dispatch mode or a tensor's class see an op first, as Python's own kernel does. That one excludes all keys above
// itself meanwhile, so what they call would not be seen.
inline void to_modes(const c10::OperatorHandle& handle, Stack* stack) {
  using Keys = c10::DispatchKeySet;
  constexpr Keys up_to_python = Keys(Keys::FULL_AFTER, c10::DispatchKey::Python) | Keys(c10::DispatchKey::Python);
  constexpr Keys above = (Keys(Keys::FULL) ^ up_to_python).remove(KEY);
  const c10::impl::ExcludeDispatchKeyGuard off(above);
  (*getPyInterpreter())->dispatch(handle, stack);
}

inline void kernel(const c10::OperatorHandle& handle, c10::DispatchKeySet all_keys, Stack* stack) {
  if (IS_ABOVE_PYTHON && all_keys.has(c10::DispatchKey::Python)) return to_modes(handle, stack);
  const c10::impl::ExcludeDispatchKeyGuard off(KEY);  // a guard, since ops throw
  const c10::DispatchKeySet keys = all_keys & BELOW;
  if (!homes().has_any() || !is_on_home(*stack, handle)) return seen(handle, keys, stack);
  const Operator& facts = operator_of(handle);
  if (facts.is_view && !facts.may_write_any) {
    // Below autograd, as in inference mode, `contiguous` comes as a whole, which may copy: what it is made of is seen.
    if (handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      const KernelOn on;
      return handle.redispatchBoxed(keys, stack);
    }
    seen(handle, keys, stack);
    each_result(*stack, handle, [](const at::Tensor& tensor) { mark(tensor); });
    return;
  }
  const Arguments arguments = arguments_on(*stack, handle);
  if (part_bytes() != 0 && is_by_items(handle)) {
    const Parts parts(arguments);
    if (parts.are_several()) return run_in_parts(handle, parts, stack, [&](Stack* part) { on_homes(handle, facts, keys, part); });
  }
  on_homes(handle, facts, keys, stack);
}

// Has an op run, and the step of the calling thread, if there is one, see it.
inline void seen(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
  // Where dispatch modes are switched off, Pooch is at work, or code that no mode would see.
  const bool is_unwatched = c10::impl::tls_local_dispatch_key_set().excluded_.has(c10::DispatchKey::Python);
  const auto owned = is_unwatched ? nullptr : state_here();
  if (!owned || (owned->carrier == nullptr && !owned->only_notes)) return handle.redispatchBoxed(keys, stack);
  State& state = *owned;
  const Operator& facts = operator_of(handle);
  if (state.only_notes) {
    if (!facts.is_view && facts.gives_tensors && !state.is_silent) note_op(state, facts);
    return handle.redispatchBoxed(keys, stack);
  }
  if (facts.is_view) {
    if (state.is_watchful && !state.away.is_empty() && !facts.reads_nothing) {
      const Arguments arguments = arguments_on(*stack, handle);
      if (reads_away(state, arguments)) tell(state, "look", facts, handle, arguments);
    }
    return handle.redispatchBoxed(keys, stack);
  }
  const Arguments arguments = arguments_on(*stack, handle);
  if (state.is_silent) {
    tell(state, "unseen", facts, handle, arguments);
    return handle.redispatchBoxed(keys, stack);
  }
  if (facts.gives_tensors) note_op(state, facts);
  const Running running(state);
  bool is_known = running.is_alone && is_expected(state, facts, handle, arguments);
  if (is_known && is_due(state, handle)) is_known = act(state) && is_expected(state, facts, handle, arguments);
  if (is_known) {
    auto recipe = to_replay(state, facts, handle, arguments);
    if (recipe || facts.makes_views || !state.path->at(state.position).is_replayed)
      return run_expected(state, facts, handle, keys, arguments, stack, std::move(recipe));
  }
  if (running.is_alone && is_ordinary_op(state, facts, arguments))
    return run_unplanned(state, facts, handle, arguments, stack,
                         [&] { run(state, facts, handle, keys, arguments, stack); });
  run_told(state, facts, handle, keys, arguments, stack, running.is_alone);
}

}  // namespace watch

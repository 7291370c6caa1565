# ruff: noqa: E501  (a text to change is one line, so that it can be searched for)
"""Break the native watch in every way that is known, one at a time, and see that its tests notice.

python -m tests.executor.native_mutations [--tests FILE,...] [NAME ...]

Each mutation goes into a copy of the sources of `pooch/torchtools/watch`, in a temporary folder, where it is built. Exit
codes: 0 all were noticed; 1 one was not, or cannot be built; 2 the tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pooch.ground import native
from pooch.ground.native import BuildError
from pooch.torchtools import watch

SOURCES_VARIABLE = "POOCH_TESTS_WATCH_SOURCES"  # a folder: the tests build the native watch from it
ROOT = Path(__file__).parents[2]
LIMIT_S = 400  # of one mutation; what hangs is noticed too
TESTS = (
    "native_calls",
    "native_replays",
    "native_watch_parts",
    "native_watch",
    "in_place",
    "path",
    "saved_again",
    "native_moves",
    "native_reads",
    "native_noted_ops",
    "bitwise",
    "homes",
)
CHOSEN = "(native or homes) and not building and not without_a_compiler"  # those two build the library in processes of their own


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: What is wrong then.
        file: The file in `pooch/torchtools/watch` that it changes.
        old: The text that is replaced.
        new: What replaces it.
    """

    name: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Outcome:
    """What the tests said to a mutation; `test` is empty where all of them passed."""

    test: str = ""
    how: str = ""


FOLLOWING = (
    Mutation("the op before the expected one is expected", "kernel.h", "&state.path->at(position) : nullptr", "&state.path->at(position == 0 ? 0 : position - 1) : nullptr"),
    Mutation("another operator is accepted", "path.h", "expected.schema != schema || expected.shapes", "expected.shapes"),
    Mutation("other shapes are accepted", "path.h", " || !agrees(outputs[index]->sizes(), shape.sizes))", ")"),
    Mutation("other dtypes are accepted", "path.h", "outputs[index]->scalar_type() != shape.dtype || ", ""),
    Mutation("the number of new values is not compared", "kernel.h", "  if (made.size() != expected.writes.size()) return false;\n", "  made.resize(std::min(made.size(), expected.writes.size()));\n"),
    Mutation("the position is not advanced", "kernel.h", "state.position = static_cast<int64_t>(position) + 1;", ""),
    Mutation("an op that the plan does not mind is learnt in place of the expected one", "kernel.h", "state.on_path && state.position == position + 1 && std::all_of", "state.on_path && std::all_of"),
    Mutation("an op off the path is expected", "kernel.h", "if (!state.on_path || state.needs_attention", "if (state.needs_attention"),
    Mutation("results are bound to the plan's values off the path", "kernel.h", "state.on_path && position < state.path->size()", "position < state.path->size()"),
    Mutation("nothing is ever looked at before each op", "kernel.h", "!state.on_path || state.needs_attention ||", "!state.on_path ||"),
    Mutation("every op is looked at for ever", "region.h", "set_flag<&State::needs_attention>", "set_flag<&State::is_silent>"),
    Mutation("what is due before an op is not done", "kernel.h", "is_known = act(state) && is_expected(", "is_known = is_expected("),
    Mutation("what the plan moves is not passed on when it is made", "kernel.h", "are_plain && !expected->is_awaited &&", "are_plain &&"),
)  # fmt: skip

STORAGES = (
    Mutation("what a storage holds is not replaced", "storages.h", "      found->second.number = number;\n      return;", "      return;"),
    Mutation("a storage that is gone is still known", "storages.h", "found == entries_.end() || found->second.storage.expired()", "found == entries_.end()"),
    Mutation("storages that are gone are never forgotten", "storages.h", "    if (entries_.size() >= sweep_at_) gone = sweep();\n", ""),
    Mutation("values that are written over are not told", "kernel.h", "  if (facts.written != 0) note_written(state, facts, arguments);\n", ""),
    Mutation("what is written without being a result is not bound", "recipe.h", "    if (!is_among(made, storage->unsafeGetStorageImpl())) made.push_back(storage);", "    static_cast<void>(storage);"),
    Mutation("a result that is an argument is taken for a new value", "recipe.h", "if (is_among(made, address) || (!is_among(written, address) && is_read)) continue;", "if (is_among(made, address)) continue;"),
    Mutation("arguments that are no ordinary tensors are written unseen", "kernel.h", "  return are_plain;\n}", "  return true;\n}"),
    Mutation("what changes under replays is written over", "kernel.h", "if (changes_for_python(state, facts, arguments) || state.awaited.is_any_released()) return false;", "if (state.awaited.is_any_released()) return false;"),
    Mutation("running statistics change under replays", "kernel.h", "each_marked(facts.written | changed_statistics(facts, arguments), arguments,", "each_marked(facts.written, arguments,"),
    Mutation("ops read storages that are away", "kernel.h", "  if (reads_away(state, arguments)) return false;\n", ""),
    Mutation("views look at storages that are away", "kernel.h", 'if (reads_away(state, arguments)) tell(state, "look", facts, handle, arguments);', ""),
    Mutation("views are not looked at in a step that empties", "region.h", "state.is_watchful = is_watchful != 0;", "state.is_watchful = false;"),
    Mutation("views that read nothing bring values back", "kernel.h", "!state.away.is_empty() && !facts.reads_nothing", "!state.away.is_empty()"),
    Mutation("only what is no ordinary tensor is looked at", "kernel.h", "found = found || !is_plain(tensor) || state.away.holds(storage_of(tensor).unsafeGetStorageImpl());", "found = found || !is_plain(tensor);"),
    Mutation("what is no ordinary tensor is not looked at", "kernel.h", "found = found || !is_plain(tensor) || state.away.holds(storage_of(tensor).unsafeGetStorageImpl());", "found = found || (is_plain(tensor) && state.away.holds(storage_of(tensor).unsafeGetStorageImpl()));"),
)  # fmt: skip

WATCHING = (
    Mutation("ops within ops are watched", "kernel.h", "  const c10::impl::ExcludeDispatchKeyGuard off(KEY);  // a guard, since ops throw\n", ""),
    Mutation("Pooch's own ops are watched", "kernel.h", "is_unwatched ? nullptr : state_here()", "state_here()"),
    Mutation("an op that failed is still running", "kernel.h", "if (is_alone) state_.is_busy = false;", "if (is_alone && std::uncaught_exceptions() == 0) state_.is_busy = false;"),
    Mutation("ops that overlap are taken for one after the other", "kernel.h", "is_alone(!state.is_busy.exchange(true))", "is_alone(true || state.is_busy.exchange(true))"),
    Mutation("the end of an op is not told", "kernel.h", "Reference none(PyObject_CallMethodNoArgs(carrier.get(), ended));", "Reference none;"),
    Mutation("ops of compiled functions are followed", "kernel.h", "if (state.is_silent) {", "if (false) {"),
    Mutation("the key is included after a region", "region.h", "tls_set_dispatch_key_included(KEY, !regions.empty())", "tls_set_dispatch_key_included(KEY, true)"),
    Mutation("a region within another one ends both", "region.h", "tls_set_dispatch_key_included(KEY, !regions.empty())", "tls_set_dispatch_key_included(KEY, false)"),
    Mutation("a region that has ended holds what it called", "region.h", "  Reference carrier(state.carrier.exchange(nullptr));\n", ""),
    Mutation("an op is run again after any error", "kernel.h", "if (can_run.get() == Py_True) {", "if (can_run.get() != nullptr) {"),
    Mutation("an op is never run again", "kernel.h", "if (can_run.get() == Py_True) {", "if (false) {"),
    Mutation("an op is run again without its arguments", "kernel.h", "  stack->insert(stack->end(), arguments.begin(), arguments.end());\n", ""),
    Mutation("an op is run again on top of what is left", "kernel.h", "    stack->resize(std::min(beneath, stack->size()));  // of what it was given and has made, anything may be left\n", ""),
    Mutation("dtypes are passed as numbers", "operators.h", "if (is_of_kind(argument, c10::ScalarTypeType::Kind))", "if (false)"),
    Mutation("layouts are passed as numbers", "operators.h", "if (is_of_kind(argument, c10::LayoutType::Kind))", "if (false)"),
    Mutation("memory formats are passed as numbers", "operators.h", "if (is_of_kind(argument, c10::MemoryFormatType::Kind))", "if (false)"),
    Mutation("keyword arguments are not passed", "operators.h", "    if (is_default(index)) continue;\n", "    continue;\n"),
    Mutation("an argument that is not given ends the list", "operators.h", "standard.has_value() && *standard == arguments[index]", "standard.has_value()"),
)  # fmt: skip

SAVING = (
    Mutation("what moves is kept", "saved.h", "if (state->on_path && number && Path::holds(state->path->moved, *number)) {", "if (false) {"),
    Mutation("what is saved off the path is kept", "saved.h", "  if (!(state->on_path || keeps)) return in_python();\n", ""),
    Mutation("tensors of subclasses are kept", "saved.h", "if (!(state->on_path || state->keeps) || !THPVariable_CheckExact(object)) return", "if (!(state->on_path || state->keeps)) return"),
    Mutation("what is no ordinary tensor is kept", "saved.h", "if (!is_ordinary(tensor) || tensor.is_inference()) return", "if (!tensor.has_storage() || tensor.is_inference()) return"),
    Mutation("a tensor is kept with its history", "saved.h", "detached(tensor, tensor.grad_fn() != nullptr)", "tensor"),
    Mutation("a kept tensor has a version of its own", "storages.h", "shallow_copy_and_detach(implementation->version_counter(), false)", "shallow_copy_and_detach(c10::VariableVersion(tensor._version()), false)"),
    Mutation("the version of a kept tensor is not compared", "saved.h", " || static_cast<int64_t>(kept->tensor._version()) != kept->version) return in_python();", ") return in_python();"),
    Mutation("kept tensors are not listed", "saved.h", "    state->kept.push_back(kept);\n", "    kept->place = NOWHERE;\n"),
    Mutation("kept tensors are listed after their end", "saved.h", "  unlist(kept);\n  kept->state.~shared_ptr();", "  kept->state.~shared_ptr();"),
    Mutation("kept tensors leave in any order", "saved.h", "  std::sort(first, listed.end(), [](const Kept* a, const Kept* b) { return a->serial < b->serial; });\n", ""),
    Mutation("a kept tensor stays beside its handle", "saved.h", "  const at::Tensor given_up = std::exchange(kept_of(self)->tensor, at::Tensor());\n", ""),
    Mutation("which tensor was saved is not known", "handle.h", "if (!node || node->sequence_nr() + 1 == at::sequence_number::peek()) return {};", "return {};"),
    Mutation("an op's own result is taken for any tensor", "handle.h", "if (!node || node->sequence_nr() + 1 == at::sequence_number::peek()) return {};", "if (!node) return {};"),
    Mutation("data that was assigned is not looked at", "saved.h", "  if (state->is_reassigned) return in_python();\n", ""),
    Mutation("what is due at a read is not done", "saved.h", "(state->on_path && Path::holds(state->path->anchored, kept->number))", "false"),
    Mutation("the first read is not told", "saved.h", "  if (asked_for != state->serial) {\n", "  if (false) {\n"),
    Mutation("a step is taken for another one", "region.h", "state->serial = ++serials;", "state->serial = 1;"),
    Mutation("how long a step takes is not told", "saved.h", "return elapsed_ms && PyObject_SetAttr(hooks->stats, step_ms, elapsed_ms.get()) == 0;", "return elapsed_ms && step_ms != nullptr;"),
)  # fmt: skip

SETTINGS = (
    Mutation("calls do not know the default dtype", "settings.h", "static_cast<int>(c10::get_default_dtype_as_scalartype()),", "0,"),
    Mutation("calls do not know the number of threads", "settings.h", "threads_now(),", "0,"),
    Mutation("calls do not know flushing of denormals", "settings.h", "flushes_denormals(),", "0,"),
    Mutation("calls do not know deterministic mode", "settings.h", "context.deterministicAlgorithms(),", "0,"),
    Mutation("calls do not know whether determinism only warns", "settings.h", "context.deterministicAlgorithmsWarnOnly(),", "0,"),
    Mutation("calls do not know how new memory is filled", "settings.h", "context.deterministicFillUninitializedMemory(),", "0,"),
    Mutation("calls do not know whether oneDNN is used", "settings.h", "context.userEnabledMkldnn(),", "0,"),
    Mutation("calls do not know whether oneDNN is deterministic", "settings.h", "context.deterministicMkldnn(),", "0,"),
    Mutation("calls do not know whether NNPACK is used", "settings.h", "context.userEnabledNNPACK(),", "0,"),
    Mutation("calls do not know the precision of oneDNN's products", "settings.h", "precision(Backend::MKLDNN, Op::MATMUL),", "0,"),
    Mutation("calls do not know the precision of oneDNN's convolutions", "settings.h", "precision(Backend::MKLDNN, Op::CONV),", "0,"),
    Mutation("calls do not know the precision of oneDNN's recurrent layers", "settings.h", "precision(Backend::MKLDNN, Op::RNN),", "0,"),
    Mutation("calls do not know autocast of the CPU", "settings.h", "cast_to(at::kCPU),", "0,"),
    Mutation("a thread has the settings that it had first", "settings.h", "if (last != nullptr && last->stamp == stamp) return last;", "if (last != nullptr) return last;"),
    Mutation("all settings are those that were known first", "settings.h", "      if (each->stamp == stamp) return last = each;", "      return last = each;"),
    Mutation("a replay runs under the settings of now", "recipe.h", "  return recipe.settings->stamp == stamp_now();\n", "  return true;\n"),
    Mutation("a replay runs under the gradient mode of now", "recipe.h", "  const at::AutoGradMode gradients(recipe.has_gradients);\n", ""),
)  # fmt: skip

REPLAYS = (
    Mutation("arguments begin where their storage does", "recipe.h", "set_sizes_and_strides(sizes, strides, offset);", "set_sizes_and_strides(sizes, strides, 0);"),
    Mutation("arguments are contiguous", "recipe.h", "    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);", "    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);\n    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);"),
    Mutation("a replay writes into what is kept", "recipe.h", "argument.is_written ? Py_True : Py_False", "Py_False"),
    Mutation("what a call writes is not known", "recipe.h", "made.is_written = std::find(written.begin(), written.end(), storage) != written.end();", "made.is_written = false;"),
    Mutation("arguments that share a storage get one each", "recipe.h", "      if (value == argument.value) return storage;", "      static_cast<void>(value), static_cast<void>(storage);"),
    Mutation("a replay reads the program's tensor as it is now", "recipe.h", "made.alias = detached(tensor, true);", "made.alias = tensor;"),
    Mutation("a replay reads what has changed since", "recipe.h", "if (has_moved(argument) || has_no_memory(argument.alias)) {", "if (has_no_memory(argument.alias)) {"),
    Mutation("a replay reads an empty storage", "recipe.h", "if (has_moved(argument) || has_no_memory(argument.alias)) {", "if (has_moved(argument)) {"),
    Mutation("other data that has changed is refused", "recipe.h", "  return !is_plain(tensor) || storage_of(tensor).unsafeGetStorageImpl() == storage_of(argument.alias).unsafeGetStorageImpl();", "  return true;"),
    Mutation("what is large is copied before it changes", "recipe.h", " || storage->nbytes() > MOST_PRESERVED_BYTES) return;", ") return;"),
    Mutation("what was copied before it changed is refused", "recipe.h", "      argument.is_preserved = true;\n", ""),
    Mutation("a replay reads the original of what was copied", "recipe.h", "      argument.alias = Geometry::of(argument.alias).on(copy);\n", ""),
    Mutation("nothing is copied before it changes", "kernel.h", "  if (facts.written != 0 || facts.statistics != 0) preserve(state, facts, arguments);\n", ""),
    Mutation("running statistics are not copied before they change", "kernel.h", "if (facts.written != 0 || facts.statistics != 0) preserve(", "if (facts.written != 0) preserve("),
    Mutation("who reads what is outside is not known under a plan", "kernel.h", "  state.readers.add(recipe);\n", ""),
    Mutation("a replay in evaluation mode reads no statistics", "recipe.h", "return is_training ? facts.statistics : 0;", "return facts.statistics;"),
    Mutation("a replay in training updates statistics again", "recipe.h", "return is_training ? facts.statistics : 0;", "return 0;"),
    Mutation("conjugates are recorded as what they are of", "recipe.h", "!tensor.is_conj() && ", ""),
    Mutation("negatives are recorded as what they are of", "recipe.h", " && !tensor.is_neg()", ""),
    Mutation("tensors in lists are not recorded", "recipe.h", "argument.isList() && !is_simple(argument)) {\n      c10::impl::GenericList", "false && argument.isList()) {\n      c10::impl::GenericList"),
    Mutation("a call that was recorded is not kept", "kernel.h", "  if (recipe) state.recorded.add(static_cast<int64_t>(position), std::move(recipe));\n", ""),
    Mutation("a call is that of the next op", "kernel.h", "state.recorded.add(static_cast<int64_t>(position), std::move(recipe))", "state.recorded.add(static_cast<int64_t>(position) + 1, std::move(recipe))"),
    Mutation("storages that are awaited are not looked at", "kernel.h", "changes_for_python(state, facts, arguments) || state.awaited.is_any_released()", "changes_for_python(state, facts, arguments)"),
    Mutation("what is held is what was held first", "holding.h", "std::swap(storages_[number], storage);", "storages_.emplace(number, std::move(storage));"),
    Mutation("what is taken stays", "holding.h", "    storages_.erase(found);\n    return storage;", "    return storage;"),
    Mutation("what replays read is not held", "kernel.h", "state.sources->put(number, *made[index]);", "static_cast<void>(number);"),
    Mutation("what is to be copied out is not held", "kernel.h", "state.made->put(number, *made[index]);", "static_cast<void>(number);"),
)  # fmt: skip

UNPLANNED = (
    Mutation("a call that overlapped with another is kept", "unplanned.h", "recipe && are_ordinary && !state.has_overlapped;", "recipe && are_ordinary;"),
    Mutation("no call is kept once any have overlapped", "kernel.h", "    state.has_overlapped = !is_alone;", "    if (!is_alone) state.has_overlapped = true;"),
    Mutation("what the step has made unseen is from outside", "unplanned.h", "is_from_before(tensor, state.first_node) && ", ""),
    Mutation("a view of what was there before is of the step", "unplanned.h", "(tensor.is_view() ? tensor._base() : at::TensorBase(tensor)).grad_fn()", "tensor.grad_fn()"),
    Mutation("memory whose address the program has is read", "unplanned.h", " && !state.handed_out.holds(storage)", ""),
    Mutation("addresses that are handed out are not noted", "region.h", "  state_of(self).handed_out.note(storage, true);\n", ""),
    Mutation("values that were written over are not noted", "region.h", "is_minded)) return state.written_over.add(*number);", "is_minded)) return;"),
    Mutation("Python does not hear of writes to what it holds", "region.h", "if (!(state.has_taken || state.holds_in_python || is_minded)) return", "return"),
    Mutation("all values have one number", "unplanned.h", "writes.push_back(state.next_number++);", "writes.push_back(state.next_number);"),
    Mutation("what an op makes is not bound", "unplanned.h", "    state.values->bind(*storage, writes.back());\n", ""),
    Mutation("a recipe does not tell which result it reads", "unplanned.h", "combined(combined(number, source->recipe), source->place)", "combined(number, source->recipe)"),
    Mutation("a recipe does not tell what leads to it", "unplanned.h", "combined(combined(number, source->recipe), source->place)", "combined(number, source->place)"),
    Mutation("a recipe does not tell its operator", "unplanned.h", "uint64_t number = facts.number;", "uint64_t number = 0;"),
    Mutation("the order of ops does not tell them", "kernel.h", "state.ops = combined(state.ops, facts.number);", "state.ops += facts.number;"),
    Mutation("ops of other threads are taken for the step's", "kernel.h", "  else state.is_ordered = false;\n", ""),
    Mutation("views tell a step that copies from others", "kernel.h", "if (!facts.is_view && facts.gives_tensors && !state.is_silent) note_op", "if (facts.gives_tensors && !state.is_silent) note_op"),
    Mutation("numbers that are read tell a step", "kernel.h", "  if (facts.gives_tensors) note_op(state, facts);\n", "  note_op(state, facts);\n"),
    Mutation("what writes to what is outside runs again", "unplanned.h", "const auto number = can_repeat ?", "const auto number = true ?"),
    Mutation("what cannot be made again is read", "unplanned.h", "      is_replayable = source.has_value();\n", ""),
    Mutation("an op that changes what calls have read is not passed on", "unplanned.h", "!state.readers.has(storage) && ", ""),
    Mutation("an op that changes what Python's calls have read is not passed on", "unplanned.h", " && !state.read_in_python.holds(storage)", ""),
    Mutation("running statistics change unseen", "unplanned.h", "each_marked(facts.written | changed_statistics(facts, arguments), arguments,", "each_marked(facts.written, arguments,"),
    Mutation("calls that have read what changes are kept", "region.h", "  const auto made = state_of(self).readers.take(storage);", "  const std::vector<int64_t> made;\n  static_cast<void>(storage);"),
    Mutation("calls that have read what changes cannot be found", "unplanned.h", "  recipe->made = writes.front();\n", ""),
    Mutation("who reads what is outside is not known without a plan", "unplanned.h", "  state.readers.add(recipe);\n", ""),
    Mutation("what was given up is built upon", "region.h", "state_of(self).made_here.forget(number);", "static_cast<void>(number);"),
    Mutation("what Python has recorded is not built upon", "region.h", "    state_of(self).made_here.add(numbers[place], {static_cast<uint64_t>(number), place});", "    static_cast<void>(place);"),
    Mutation("statistics that the step has made stay the value that they were", "unplanned.h", "      state.values->bind(storage_of(tensor), state.next_number++);", "      static_cast<void>(tensor);"),
    Mutation("ops are followed although they have to be looked at", "unplanned.h", "!state.records || state.needs_attention || facts.is_special", "!state.records || facts.is_special"),
    Mutation("small values are taken with the others", "saved.h", "return is_smaller(kept->tensor, least_bytes);", "return false;"),
    Mutation("small values go to Python once others have", "saved.h", "(!state->has_taken || is_smaller(tensor, state->least_taken_bytes))", "!state->has_taken"),
    Mutation("what stays is taken off the list by its old place", "saved.h", "listed[place]->place = place;", "static_cast<void>(place);"),
    Mutation("saves in Python are not counted", "region.h", "PyLong_FromUnsignedLongLong(++state_of(self).saves)", "PyLong_FromUnsignedLongLong(state_of(self).saves + 1)"),
    Mutation("values are kept although Python holds the others", "saved.h", "state->keeps && (!state->has_taken || is_smaller(tensor, state->least_taken_bytes));", "state->keeps;"),
    Mutation("whether room runs out is never looked at", "saved.h", "if (keeps && !state->has_taken && ++state->packs % SAVES_BETWEEN_LOOKS == 0) {", "if (false) {"),
    Mutation("what is only copied has no number", "saved.h", "if (keeps && !number && state->binds && !is_marked(tensor) && can_be_dropped(tensor)) {", "if (false) {"),
    Mutation("parameters leave", "saved.h", " && can_be_dropped(tensor)) {", ") {"),
)  # fmt: skip

HANDLES = (
    Mutation("changes of what a handle is on are not told", "handle.h", "return counter.enabled() && counter.current_version() != version;", "return false;"),
    Mutation("a handle has a version counter of its own", "handle.h", "c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());", "c10::VariableVersion(version_of(tensor));"),
    Mutation("handles are not counted", "handle.h", "  if (!count_handle(value)) return nullptr;\n", ""),
    Mutation("the end of a handle is not told", "handle.h", "none = Reference(PyObject_CallOneArg(handle->ended, handle->value));", "none = Reference::to(Py_None);"),
    Mutation("a cycle through a handle is never collected", "handle.h", "  Py_VISIT(handle_of(self)->value);\n", ""),
    Mutation("a handle does not tell which tensor was saved", "handle.h", "  self->identity = Identity::of(object, tensor);\n", ""),
    Mutation("a handle tells its result from others by nothing", "handle.h", "return {object, node->sequence_nr()};", "return {object, 0};"),
)  # fmt: skip

MOVES = (
    Mutation("values move though another thread has the lock", "moves.h", "  if (taken.get() != Py_True) return Outcome::IN_PYTHON;\n", ""),
    Mutation("the lock is never given back", "moves.h", "  Reference none(PyObject_CallNoArgs(work.part(RELEASE)));\n  if (none && queued", "  Reference none = Reference::to(Py_None);\n  if (none && queued"),
    Mutation("actions of a slot are not known to have begun", "acting.h", "  if (PySet_Add(moves.part(ACTED), slot) < 0) return false;\n", ""),
    Mutation("what is due at the read of what moves is not done", "acting.h", "  if (found == moves.path().anchor_of.end()) return Outcome::DONE;", "  return Outcome::DONE;"),
    Mutation("what is larger than its room moves", "acting.h", "  if (storage && static_cast<int64_t>(storage.nbytes()) > room.size_bytes) return 0;\n", ""),
    Mutation("what is to be looked at moves unseen", "acting.h", "  return is_looked < 0 ? -1 : is_looked == 0;", "  return is_looked < 0 ? -1 : 1;"),
    Mutation("what the program has the address of moves unseen", "acting.h", "  if (moves.fields.is_true(value, Fields::HANDED_OUT)) return 1;\n", ""),
    Mutation("a value is not taken over where it is copied", "moves.h", "  if (!has_taken_made(moves, value, number)) return Outcome::FAILED;\n  if (fields.is_none(value, Fields::STORAGE)) return", "  if (fields.is_none(value, Fields::STORAGE)) return"),
    Mutation("a copy that has failed counts as made", "moves.h", "  has_failed = error.get() != Py_None;", "  has_failed = false;"),
    Mutation("bytes that were copied stay", "moves.h", "  if (can_go) fields.set_none(value, Fields::STORAGE);\n", "  static_cast<void>(can_go);\n"),
    Mutation("what replays will read ends with autograd's last handle", "acting.h", "(*moves.state)->on_path ? has_number(moves.part(TO_DROP), number) : 0;", "0;"),
    Mutation("values come back from other room", "moves.h", 'wrapped.get(), moves.path().rooms.at(number).offset_bytes);', 'wrapped.get(), 0);'),
    Mutation("what comes back is not counted", "moves.h", "return has_counted(moves, SWAPPED_IN, Reference::to(fields.get(value, Fields::SIZE_BYTES))) ?", "return method != nullptr ?"),
    Mutation("copies that have ended are never forgotten", "moves.h", 'if (is_to_look && !has_called(arena, "forget_ended")) return Reference();', "static_cast<void>(is_to_look);"),
    Mutation("what packing spares is not counted", "moves.h", "return has_counted(moves, SPARED, Reference(PyLong_FromLongLong(spared_bytes)));", "return true;"),
    Mutation("nothing is learned of copies", "moves.h", "  if (!timed.is_due()) return true;\n", "  if (!timed.is_due() || true) return true;\n"),
    Mutation("times of copies are learned of twice", "moves.h", "std::exchange(timed, Timed{0, timed.learned + timed.copies, 0, 0});", "Timed(timed);"),
    Mutation("copies back are taken for copies out", "moves.h", "Timed& timed = moves.timed[is_outwards];", "Timed& timed = moves.timed[1];"),
    Mutation("values move while memory does", "acting.h", "  if (is_attribute_true(moves.part(MOVING), depth)) return PyErr_Occurred() ? -1 : 0;\n", "  static_cast<void>(depth);\n"),
    Mutation("moves have no names for a profiler", "acting.h", "  if (is_attribute_true(moves.part(PROFILER), is_profiled)) return PyErr_Occurred() ? -1 : 0;\n", "  static_cast<void>(is_profiled);\n"),
    Mutation("a value that has not come back is read", "replays.h", "if (fields.is_none(value, Fields::STORAGE) || !fields.is_none(value, Fields::TICKET)) return Outcome::IN_PYTHON;", "if (fields.is_none(value, Fields::STORAGE)) return Outcome::IN_PYTHON;"),
    Mutation("what the program still holds is read as it was copied", "replays.h", "    fields.set(value, Fields::STORAGE, Reference::to(in_program.get()));\n", "    static_cast<void>(value);\n"),
    Mutation("the end of a handle on what moves is not counted", "acting.h", "  fields.set(value, Fields::HANDLES, std::move(left));\n", ""),
    Mutation("the last handle does not let go of bytes", "acting.h", "  if (goes) let_go(moves, value, number);\n", "  static_cast<void>(goes);\n"),
    Mutation("what is emptied is read in Python", "saved.h", "const bool is_known = state->on_path && (handle->moves == nullptr || handle", "const bool is_known = state->on_path && (handle"),
    Mutation("changes of what moves are not told", "saved.h", "handle->is_changed() || !has_told_thread(moves)", "!has_told_thread(moves)"),
    Mutation("what views hold is passed to Python", "kernel.h", "  if (are_plain && made.empty()) return;  // as `_unsafe_view`\n", ""),
)  # fmt: skip

READS = (
    Mutation("what has left nearby is not brought back ahead of need", "reads.h", "    if (is_near != 0) return is_near < 0 ? Outcome::FAILED : Outcome::IN_PYTHON;\n", "    static_cast<void>(is_near);\n"),
    Mutation("native reads do not tell where the backward pass is", "reads.h", "    if (PyObject_SetAttr(reads.part(PRESSURE), position, fields.get(value, Fields::SAVED_AT)) < 0) return Outcome::FAILED;\n", "    static_cast<void>(position);\n"),
    Mutation("what is not there is read natively", "reads.h", "!fields.is_known(value) || fields.is_none(value, Fields::STORAGE) || !fields", "!fields.is_known(value) || !fields"),
    Mutation("what has ended is saved for ever", "reads.h", "is_saved < 0 || (is_saved == 1 && PyDict_DelItem(reads.part(SAVED), key.get()) < 0)", "is_saved < 0"),
    Mutation("what has ended may still leave", "reads.h", "  Reference none(PyObject_CallOneArg(reads.part(FORGET), value));\n", "  Reference none = Reference::to(Py_None);\n"),
    Mutation("handles that are not the last one end their values", "reads.h", "  if (handles != 0) return Outcome::DONE;\n", ""),
    Mutation("handles that were given later are read in Python", "saved.h", "packed = kept_of(packed)->handle;", "packed = nullptr;"),
    Mutation("changes of what no plan moves are not told", "saved.h", "  if (handle->is_changed() || !has_told_thread(reads)) return nullptr;\n", "  if (!has_told_thread(reads)) return nullptr;\n"),
)  # fmt: skip

MADE_AGAIN = (
    Mutation("what a replay gave is not compared", "replays.h", "PyLong_AsUnsignedLongLong(moves.witnesses.get(witness, DIGEST)) == sample_of(storage);", "true;"),
    Mutation("nothing is remembered of what is made again", "replays.h", "  if (is_sampled != Py_True || storage.nbytes() == 0) return Outcome::DONE;\n", "  return Outcome::DONE;\n"),
    Mutation("a sample of a large storage is its beginning", "replays.h", "word < words; word += stride", "word < std::min(words, SAMPLED_WORDS); ++word"),
    Mutation("the end of a small storage is not compared", "checksum.h", "start < size; start += STRIDE", "start + STRIDE <= size; start += STRIDE"),
    Mutation("what the program has the address of is made again natively", "replays.h", "  const bool is_trusted = !fields", "  const bool is_trusted = true || !fields"),
    Mutation("a replay writes into what others read", "replays.h", "      else each.storage = copied(each.storage);\n", ""),
    Mutation("a native replay runs under the settings of now", "replays.h", "!recipe || !is_as_then(*recipe) ||", "!recipe ||"),
    Mutation("what a replay reads need not be at hand", "kernel.h", "  if (!has_at_hand(state.path->at(position), *recipe)) return nullptr;\n", ""),
    Mutation("replays are not counted", "replays.h", "  if (!has_counted(moves, RECOMPUTED, Reference(PyLong_FromLong(1)))) return Outcome::FAILED;\n", ""),
    Mutation("comparisons are not counted", "replays.h", "    if (!moves.checks.has_added(moves.part(CHECKED), 0, Reference(PyLong_FromLong(1)))) return Outcome::FAILED;\n", ""),
    Mutation("the last result of a replay is lost", "replays.h", "index < made.size(); ++index) {\n    const bool stays", "index + 1 < std::max<size_t>(made.size(), 2); ++index) {\n    const bool stays"),
    Mutation("each result of a replay is taken for the first", "replays.h", "put(moves, writes[index], made[index])", "put(moves, writes[index], made[0])"),
    Mutation("what replays have read stays", "replays.h", "  const c10::Storage held = (*moves.state)->sources->take(number);\n", ""),
    Mutation("what a plan has dropped counts as read later", "replays.h", "  if (!index || PySet_Discard(moves.part(TO_DROP), index.get()) < 0) return Outcome::FAILED;\n", "  if (!index) return Outcome::FAILED;\n"),
    Mutation("a slot goes on after its path was left", "acting.h", "    if (is_on_path.get() != Py_True) return Outcome::DONE;\n", ""),
    Mutation("actions that only Python can run are left out", "acting.h", "    if (outcome == Outcome::DONE) continue;\n", "    if (outcome != Outcome::FAILED) continue;\n"),
)  # fmt: skip

# Noticed by `--tests homes`.
HOMES = (
    Mutation("what an op works on is not kept there", "home.h", "    ++home->uses;  // before", "    // before"),
    Mutation("what an op worked on stays for ever", "home.h", "      --each.home->uses;\n", ""),
    Mutation("what an op that found no bytes worked on stays for ever", "home.h", "    } catch (...) {\n      end();\n      throw;\n    }\n  }\n\n  std::vector<Used> used_;", "    } catch (...) {\n      used_.clear();\n      throw;\n    }\n  }\n\n  std::vector<Used> used_;"),
    Mutation("an op that finds no bytes goes on", "home.h", "    } catch (...) {\n      end();\n      throw;\n    }\n  }\n\n  std::vector<Used> used_;", "    } catch (...) {\n    }\n  }\n\n  std::vector<Used> used_;"),
    Mutation("bytes that are away are not brought back", "home.h", "used_.end(), must_come_first)) bring_all_back();", "used_.end(), [](const Used&) { return false; })) bring_all_back();"),
    Mutation("what writes does not wait for a copy that reads", "home.h", "is_written && home->is_read.exchange(false);", "false;"),
    Mutation("what reads waits for a copy that reads", "home.h", "is_written && home->is_read.exchange(false);", "home->is_read.exchange(false);"),
    Mutation("bytes of the first argument alone are brought back", "home.h", "    if (std::any_of(used_.begin(), used_.end(), must_come_first)", "    if (std::any_of(used_.begin(), used_.begin() + !used_.empty(), must_come_first)"),
    Mutation("what is there is brought back too", "home.h", "        if (!must_come_first(each)) continue;\n", ""),
    Mutation("writes are not counted", "home.h", "    if (is_written) ++home->writes;\n    homes().used(*home);", "    homes().used(*home);"),
    Mutation("writes are counted where they begin alone", "home.h", "      if (each.is_written) ++each.home->writes;\n", ""),
    Mutation("reads count as writes", "home.h", "      if (each.is_written) ++each.home->writes;\n", "      ++each.home->writes;\n"),
    Mutation("the first argument alone counts as written", "home.h", "position < 64 && (written >> position & 1) != 0", "position < 1 && (written >> position & 1) != 0"),
    Mutation("lists of tensors are not looked at", "operators.h", "  } else if (value.isList()) {", "  } else if (false) {"),
    Mutation("uses are not noted", "home.h", "if (log_.empty() || log_.back() != storage) log_.push_back(storage);", ""),
    Mutation("each use is noted, those in a row too", "home.h", "if (log_.empty() || log_.back() != storage) log_.push_back(storage);", "log_.push_back(storage);"),
    Mutation("the last use is not noted", "home.h", "    home.last_use = clock_ + log_.size();\n", ""),
    Mutation("uses are counted from the first one on for ever", "home.h", "    return std::exchange(log_, {});", "    return log_;"),
    Mutation("bytes are taken while an op works on them", "home.h", "return uses > 0 || is_exposed ||", "return is_exposed ||"),
    Mutation("bytes that an op works on are never there again", "home.h", "!is_of_cpu_allocator(*storage))) {\n    home.is_here = true;\n", "!is_of_cpu_allocator(*storage))) {\n"),
    Mutation("bytes are taken that were written to since", "home.h", "home.writes != writes) ||", "false) ||"),
    Mutation("bytes are taken that an op may still work on", "home.h", "return uses > 0 || is_exposed ||", "return uses > 0 ||"),
    Mutation("what was exposed to an op counts as unchanged", "home.h", "is_exposed.exchange(false)) ++home_of(self).writes;", "is_exposed.exchange(false)) Py_RETURN_NONE;"),
    Mutation("bytes are taken twice", "home.h", "!home.is_here.exchange(false)) Py_RETURN_NONE;", "(home.is_here.exchange(false), false)) Py_RETURN_NONE;"),
    Mutation("bytes that are shared with other processes are taken", "home.h", "(storage->allocator() == nullptr && !is_of_cpu_allocator(*storage))", "false"),
    Mutation("who reads what is away without an op is not refused", "home.h", "  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(ABSENT));\n", ""),
    Mutation("who reads what has come back is refused", "home.h", "  stop_refusing(*storage);\n", ""),
    Mutation("what has come back counts as away", "home.h", "  from.unsafeGetStorageImpl()->reset();\n  home.is_here = true;\n", "  from.unsafeGetStorageImpl()->reset();\n"),
    Mutation("bytes are given to what is there", "home.h", "if (!storage || home.is_here) Py_RETURN_NONE;\n  const c10::Storage& from", "if (!storage) Py_RETURN_NONE;\n  const c10::Storage& from"),
    Mutation("what was given counts as still full", "home.h", "  from.unsafeGetStorageImpl()->reset();\n  home.is_here", "  home.is_here"),
    Mutation("a storage has several homes", "home.h", "    if (place) return nullptr;\n", ""),
    Mutation("a tensor with a home is not watched", "home.h", "  mark(tensor);\n  return reinterpret_cast<PyObject*>(self);", "  return reinterpret_cast<PyObject*>(self);"),
    Mutation("what is put on a storage with a home is not watched", "home.h", "  mark(THPVariable_Unpack(object));\n  Py_RETURN_NONE;", "  Py_RETURN_NONE;"),
    Mutation("a tensor counts for two", "home.h", "return PyLong_FromSize_t(storage ? tensors_on(storage.use_count() - 1, storage.get()) : 0);", "return PyLong_FromSize_t(storage ? tensors_on(storage.use_count(), storage.get()) : 0);"),
    Mutation("the object of a storage counts as a tensor", "home.h", "(storage->pyobj_slot()->load_pyobj() != nullptr ? 1 : 0)", "0"),
    Mutation("a storage that the program released is not gone", "home.h", "PyBool_FromLong(home_of(self).storage.expired())", "PyBool_FromLong(false)"),
    Mutation("operators of the program's write what they declare alone", "kernel.h", "facts.may_write_any ? ~uint64_t{0}", "false ? ~uint64_t{0}"),
    Mutation("operators of the program's that give nothing are views", "kernel.h", "if (facts.is_view && !facts.may_write_any) {", "if (facts.is_view) {"),
    Mutation("running statistics do not count as written", "kernel.h", ": facts.written | changed_statistics(facts, arguments);", ": facts.written;"),
    Mutation("views of what has a home are not watched", "kernel.h", "    each_result(*stack, handle, [](const at::Tensor& tensor) { mark(tensor); });\n    return;", "    return;"),
    Mutation("views need the bytes", "kernel.h", "  if (facts.is_view && !facts.may_write_any) {", "  if (false) {"),
    Mutation("the first argument alone may have a home", "kernel.h", "  for (auto value = stack.end() - count; value != stack.end() && !found; ++value)", "  for (auto value = stack.end() - count; value != stack.end() - count + (count > 0) && !found; ++value)"),
)  # fmt: skip

PARTS = (
    Mutation("all ops run in parts", "parts.h", "return name.starts_with(", "return true || name.starts_with("),
    Mutation("no op runs in parts", "parts.h", "return name.starts_with(", "return false && name.starts_with("),
    Mutation("lists with a tensor of scalars run in parts", "parts.h", 'argument.name() == "scalars" &&', "false &&"),
    Mutation("lists of several lengths are cut", "parts.h", "is_even_ && (is_first || size == count_)", "is_even_"),
    Mutation("an item of each part is left out", "parts.h", "item < ends_[index]; ++item)", "item + 1 < ends_[index]; ++item)"),
    Mutation("the last part is left out", "parts.h", "index < parts.size(); ++index)", "index + 1 < parts.size(); ++index)"),
    Mutation("each part begins with the first item", "parts.h", "index == 0 ? 0 : ends_[index - 1]", "0"),
    Mutation("parts are as large as all of it", "parts.h", "bytes != 0 && bytes + more > most_bytes", "false"),
    Mutation("each item is a part", "parts.h", "bytes != 0 && bytes + more > most_bytes", "bytes != 0"),
    Mutation("parts have an item more than fits", "parts.h", "bytes != 0 && bytes + more > most_bytes", "bytes > most_bytes"),
    Mutation("scalars are not cut", "parts.h", "      if (!argument.isList()) continue;\n      const auto whole", "      if (!argument.isTensorList()) continue;\n      const auto whole"),
    Mutation("the bytes of the first list count alone", "parts.h", "      if (is_marked(tensor)) bytes += storage_of(tensor).nbytes();\n", "      if (is_marked(tensor)) return storage_of(tensor).nbytes();\n"),
    Mutation("results of parts are lost", "parts.h", "results[place].push_back(tensor);", "static_cast<void>(tensor);"),
    Mutation("arguments stay on the stack", "parts.h", "  stack->resize(stack->size() - handle.schema().arguments().size());\n  for (auto& list", "  for (auto& list"),
    Mutation("parts are not brought back", "kernel.h", "[&](Stack* part) { on_homes(handle, facts, keys, part); }", "[&](Stack* part) { seen(handle, keys, part); }"),
)  # fmt: skip

MUTATIONS = (
    *FOLLOWING,
    *STORAGES,
    *WATCHING,
    *SAVING,
    *SETTINGS,
    *REPLAYS,
    *UNPLANNED,
    *HANDLES,
    *MOVES,
    *READS,
    *MADE_AGAIN,
    *HOMES,
    *PARTS,
)


def chosen(names: Sequence[str]) -> tuple[Mutation, ...]:
    """Those of these names, or all.

    Raises:
        ValueError: If there is none of a name.
    """
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no mutation {unknown[0]!r}")
    return tuple(known[name] for name in names) or MUTATIONS


def mutated(text: str, mutation: Mutation) -> str:
    """A file's text with a mutation in it.

    Raises:
        ValueError: The text that it replaces is not there, or more than once.
    """
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name!r}: {mutation.file} has its text {count} times, not once")
    return text.replace(mutation.old, mutation.new)


@contextmanager
def copied_sources(mutation: Mutation | None) -> Iterator[Path]:
    """A folder with a copy of the sources, with a mutation in it."""
    with tempfile.TemporaryDirectory(prefix="pooch-native-mutation-") as folder:
        for path in (watch.SOURCE, *watch.HEADERS):
            text = path.read_text()
            is_changed = mutation is not None and mutation.file == path.name
            Path(folder, path.name).write_text(mutated(text, mutation) if is_changed and mutation else text)
        yield Path(folder)


@contextmanager
def built_from(folder: Path) -> Iterator[None]:
    """Have the native watch be built from the sources in a folder, as fast as can be."""
    headers = tuple(folder / header.name for header in watch.HEADERS)
    flags = tuple("-O0" if flag == "-O2" else flag for flag in native.FLAGS)
    source = folder / watch.SOURCE.name
    with mock.patch.object(native, "FLAGS", flags), mock.patch.multiple(watch, SOURCE=source, HEADERS=headers):
        yield


def _compile_flags() -> list[str]:
    with built_from(watch.FOLDER), mock.patch.object(native, "built_library") as built:
        watch.built_library()
        return [*native.FLAGS, *built.call_args.kwargs["compile_flags"]]


@contextmanager
def quick_compiler() -> Iterator[str]:
    """A compiler that has read PyTorch's headers already, which takes most of the time; if it cannot, an ordinary one."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++")), "g++")
    sources = [path.read_text() for path in (*watch.HEADERS, watch.SOURCE)]
    included = dict.fromkeys(re.findall(r"^#include <(?:torch|ATen|c10)/.*>", "\n".join(sources), re.MULTILINE))
    with tempfile.TemporaryDirectory(prefix="pooch-native-headers-") as folder:
        header = Path(folder, "pytorch.h")
        header.write_text("\n".join(included))
        command = [*shlex.split(compiler), *_compile_flags(), "-x", "c++-header", str(header), "-o", f"{header}.gch"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            _tell(f"PyTorch's headers are read each time: {done.stderr[:200]}")
            yield compiler
            return
        yield f"{compiler} -include {shlex.quote(str(header))}"


def tried(mutation: Mutation | None, compiler: str, tests: Sequence[str] = TESTS) -> Outcome:
    """Build a copy of the sources with a mutation, and run tests on it until one of them fails.

    Args:
        mutation: The mutation, or None.
        compiler: From `quick_compiler`.
        tests: Names of files of tests.

    Raises:
        BuildError: If it cannot be built.
    """
    with copied_sources(mutation) as folder, mock.patch.dict(os.environ, {SOURCES_VARIABLE: str(folder)}):
        with mock.patch.dict(os.environ, CXX=compiler), built_from(folder):
            watch.built_library()
        return _tested(tests)


@contextmanager
def own_cache() -> Iterator[None]:
    """A folder for what is built, that goes with the command."""
    with (
        tempfile.TemporaryDirectory(prefix="pooch-native-built-") as folder,
        mock.patch.dict(os.environ, POOCH_CACHE_DIRECTORY=folder),
    ):
        yield


def _tested(tests: Sequence[str]) -> Outcome:
    options = ["-x", "-v", "--tb=line", "-p", "no:cacheprovider", "-k", CHOSEN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/executor/test_{name}.py" for name in tests)]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return Outcome(_last_begun((error.stdout or b"").decode()), f"not done after {LIMIT_S} s")
    if ended.returncode == 0:
        return Outcome()
    failed = re.search(r"^FAILED tests/executor/(\S+)", ended.stdout, re.MULTILINE)
    if failed is None:
        return Outcome(_last_begun(ended.stdout), f"the process ended with {ended.returncode}")
    reason = re.search(r"^E +(.*)$", ended.stdout, re.MULTILINE)
    return Outcome(failed[1].replace(".py::", "::"), reason[1][:80] if reason else "it failed")


def _last_begun(output: str) -> str:
    begun = re.findall(r"^tests/executor/(\S+::\S+)", output, re.MULTILINE)
    return begun[-1].replace(".py::", "::") if begun else "before the first test"


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def row(mutation: Mutation, outcome: Outcome) -> str:
    """The line of the table for a mutation."""
    by = f"`{outcome.test}`" if outcome.test else "**nothing**"
    how = re.sub(r" object at 0x\w+", "", outcome.how).replace("|", "\\|").replace("<", "&lt;")
    return f"| {mutation.name} (`{mutation.file}`) | {by} | {how} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutations, and print what noticed each of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.executor.native_mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations; without one, all")
    parser.add_argument("--tests", default=",".join(TESTS), metavar="FILE,...", help="what is run (%(default)s)")
    options = parser.parse_args(arguments)
    mutations, tests = chosen(options.names), options.tests.split(",")
    missed = []
    with own_cache(), quick_compiler() as compiler:
        found = tried(None, compiler, tests)
        if found.test:
            _tell(f"{found.test} fails without any mutation: {found.how}")
            return 2
        _tell("| mutation | noticed by | how |\n|---|---|---|")
        for mutation in mutations:
            try:
                outcome = tried(mutation, compiler, tests)
            except BuildError as error:
                outcome = Outcome("", f"it cannot be built: {error}")
            if not outcome.test:
                missed.append(mutation)
            _tell(row(mutation, outcome))
    _tell(f"\n{len(mutations) - len(missed)} of {len(mutations)} were noticed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

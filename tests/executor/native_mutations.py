# ruff: noqa: E501  (a text to change is one line, so that it can be searched for)
"""Break the native watch in every way that is known, one at a time, and see that its tests notice.

python -m tests.executor.native_mutations [NAME ...]

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
TESTS = tuple(
    f"tests/executor/test_{name}.py"
    for name in ("native_watch_parts", "native_watch", "in_place", "path", "saved_again", "bitwise")
)
CHOSEN = "native and not building and not without_a_compiler"  # those two build the library in processes of their own


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
    Mutation("other shapes are accepted", "path.h", " || outputs[index]->sizes() != c10::IntArrayRef(shape.sizes))", ")"),
    Mutation("other dtypes are accepted", "path.h", "outputs[index]->scalar_type() != shape.dtype || ", ""),
    Mutation("the number of new values is not compared", "kernel.h", "  if (made.size() != expected.writes.size()) return false;\n", "  made.resize(std::min(made.size(), expected.writes.size()));\n"),
    Mutation("the position is not advanced", "kernel.h", "state.position = static_cast<int64_t>(position) + 1;", ""),
    Mutation("an op that the plan does not mind is learnt in place of the expected one", "kernel.h", "state.on_path && state.position == position + 1 && std::all_of", "state.on_path && std::all_of"),
    Mutation("an op off the path is expected", "kernel.h", "if (!state.on_path || state.needs_attention", "if (state.needs_attention"),
    Mutation("results are bound to the plan's values off the path", "kernel.h", "state.on_path && position < state.path->size()", "position < state.path->size()"),
    Mutation("nothing is ever looked at before each op", "kernel.h", "!state.on_path || state.needs_attention ||", "!state.on_path ||"),
    Mutation("every op is looked at for ever", "region.h", "set_flag<&State::needs_attention>", "set_flag<&State::is_silent>"),
    Mutation("what is due before an op is not done", "kernel.h", "if (recognised == nullptr || expected.is_due) return false;", "if (recognised == nullptr) return false;"),
    Mutation("what the plan moves is not passed on when it is made", "kernel.h", "are_plain && !expected->is_awaited &&", "are_plain &&"),
)  # fmt: skip

STORAGES = (
    Mutation("what a storage holds is not replaced", "storages.h", "      found->second.number = number;\n      return;", "      return;"),
    Mutation("a storage that is gone is still known", "storages.h", "found == entries_.end() || found->second.storage.expired()", "found == entries_.end()"),
    Mutation("storages that are gone are never forgotten", "storages.h", "    if (entries_.size() >= sweep_at_) gone = sweep();\n", ""),
    Mutation("values that are written over are not told", "kernel.h", "  if (facts.written != 0) tell_written(state, facts, arguments);\n", ""),
    Mutation("what is written without being a result is not bound", "kernel.h", "    if (!is_in(made, storage->unsafeGetStorageImpl())) made.push_back(storage);", "    static_cast<void>(storage);"),
    Mutation("a result that is an argument is taken for a new value", "kernel.h", "if (is_in(made, address) || (!is_in(written, address) && is_in(read, address))) continue;", "if (is_in(made, address)) continue;"),
    Mutation("arguments that are no ordinary tensors are written unseen", "kernel.h", "  return are_plain;\n}", "  return true;\n}"),
    Mutation("what changes under replays is written over", "kernel.h", "if ((facts.written != 0 || facts.has_statistics) && state.preserves) return false;", "if (facts.has_statistics && state.preserves) return false;"),
    Mutation("running statistics change under replays", "kernel.h", "if ((facts.written != 0 || facts.has_statistics) && state.preserves) return false;", "if (facts.written != 0 && state.preserves) return false;"),
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
    Mutation("what moves is kept", "saved.h", "  if (number && Path::holds(state->path->moved, *number)) return in_python();\n", ""),
    Mutation("what is saved off the path is kept", "saved.h", "if (!state->on_path || !THPVariable_CheckExact(object)) return", "if (!THPVariable_CheckExact(object)) return"),
    Mutation("tensors of subclasses are kept", "saved.h", "if (!state->on_path || !THPVariable_CheckExact(object)) return", "if (!state->on_path) return"),
    Mutation("what is no ordinary tensor is kept", "saved.h", "if (!is_plain(tensor) || tensor.is_inference()) return", "if (!tensor.has_storage() || tensor.is_inference()) return"),
    Mutation("a tensor is kept with its history", "saved.h", "  if (!has_history) return tensor;\n", "  return tensor;\n"),
    Mutation("a kept tensor has a version of its own", "saved.h", "shallow_copy_and_detach(implementation->version_counter(), false)", "shallow_copy_and_detach(c10::VariableVersion(tensor._version()), false)"),
    Mutation("the version of a kept tensor is not compared", "saved.h", "!kept->tensor.defined() || static_cast<int64_t>(kept->tensor._version()) != kept->version ||", "!kept->tensor.defined() ||"),
    Mutation("kept tensors are not listed", "saved.h", "    state->kept.push_back(kept);\n", "    kept->place = NOWHERE;\n"),
    Mutation("kept tensors are listed after their end", "saved.h", "  unlist(kept);\n  kept->state.~shared_ptr();", "  kept->state.~shared_ptr();"),
    Mutation("kept tensors leave in any order", "saved.h", "  std::sort(listed.begin(), listed.end(), [](const Kept* a, const Kept* b) { return a->serial < b->serial; });\n", ""),
    Mutation("a kept tensor stays beside its handle", "saved.h", "  const at::Tensor given_up = std::exchange(kept_of(self)->tensor, at::Tensor());\n", ""),
    Mutation("which tensor was saved is not known", "saved.h", "if (kept->node + 1 != at::sequence_number::peek()) kept->identity = object;", ""),
    Mutation("an op's own result is taken for any tensor", "saved.h", "if (kept->node + 1 != at::sequence_number::peek()) kept->identity", "kept->identity"),
    Mutation("data that was assigned is not looked at", "saved.h", " || asked_for != state->serial || state->is_reassigned)", " || asked_for != state->serial)"),
    Mutation("what is due at a read is not done", "saved.h", "(state->on_path && Path::holds(state->path->anchored, kept->number))", "false"),
    Mutation("the first read is not told", "saved.h", "Py_TYPE(packed) != kept_type() || asked_for != state->serial ||", "Py_TYPE(packed) != kept_type() ||"),
    Mutation("a step is taken for another one", "region.h", "state->serial = ++serials;", "state->serial = 1;"),
    Mutation("how long a step takes is not told", "saved.h", "if (!elapsed_ms || PyObject_SetAttr(hooks->stats, step_ms, elapsed_ms.get()) < 0) return nullptr;", "static_cast<void>(step_ms);"),
)  # fmt: skip

MUTATIONS = (*FOLLOWING, *STORAGES, *WATCHING, *SAVING)


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


def tried(mutation: Mutation | None, compiler: str) -> Outcome:
    """Build a copy of the sources with a mutation, and run tests on it until one of them fails.

    Raises:
        BuildError: If it cannot be built.
    """
    with copied_sources(mutation) as folder, mock.patch.dict(os.environ, {SOURCES_VARIABLE: str(folder)}):
        with mock.patch.dict(os.environ, CXX=compiler), built_from(folder):
            watch.built_library()
        return _tested()


@contextmanager
def own_cache() -> Iterator[None]:
    """A folder for what is built, that goes with the command."""
    with (
        tempfile.TemporaryDirectory(prefix="pooch-native-built-") as folder,
        mock.patch.dict(os.environ, POOCH_CACHE_DIRECTORY=folder),
    ):
        yield


def _tested() -> Outcome:
    options = ["-x", "-v", "--tb=line", "-p", "no:cacheprovider", "-k", CHOSEN]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
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
    mutations = chosen(parser.parse_args(arguments).names)
    missed = []
    with own_cache(), quick_compiler() as compiler:
        found = tried(None, compiler)
        if found.test:
            _tell(f"{found.test} fails without any mutation: {found.how}")
            return 2
        _tell("| mutation | noticed by | how |\n|---|---|---|")
        for mutation in mutations:
            try:
                outcome = tried(mutation, compiler)
            except BuildError as error:
                outcome = Outcome("", f"it cannot be built: {error}")
            if not outcome.test:
                missed.append(mutation)
            _tell(row(mutation, outcome))
    _tell(f"\n{len(mutations) - len(missed)} of {len(mutations)} were noticed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

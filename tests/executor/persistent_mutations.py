# ruff: noqa: E501  (a text to change is one line, so that it can be searched for)
"""Break what moves parameters, gradients and states in every way that is known, and see that its tests notice.

python -m tests.executor.persistent_mutations [NAME ...]

Each mutation goes into a copy of the package in a temporary folder. Those of the machine alone are in
`tests.machine.mutations`, those of the native part in `tests.executor.native_mutations`. Exit codes: 0 all were noticed;
1 one was not; 2 the tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.executor.native_mutations import Mutation, Outcome, mutated, row

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
TESTS = (
    "tests/executor/test_persistent_memory.py",
    "tests/executor/test_homes.py",
    "tests/autopilot/test_persistence.py",
    "tests/autopilot/test_program_data.py",
)
_MEMORY, _SLICES, _ROOMS = "executor/persistent.py", "executor/slices.py", "executor/rooms.py"
_VALUES, _TRIAL = "machine/persistent.py", "autopilot/persistence.py"
_READS = "executor/program_reads.py"
_LOOKS, _STORAGES = "torchtools/raw_looks.py", "torchtools/raw_storages.py"
_ASKERS = "torchtools/address_askers.py"
_DATA, _WHEN = "executor/program_data.py", "autopilot/program_data.py"

DATA = (
    Mutation("the memory of arrays leaves", _DATA, "storage_of(on_storage[0]).resizable() and ", ""),
    Mutation("what another library was given leaves", _DATA, "library.references_to(tensor) == 1 + views[id(tensor)]", "True"),
    Mutation("views keep their base", _DATA, "for each in (tensor, tensor._base):", "for each in (tensor,):"),
    Mutation("what is trained leaves as data", _DATA, "_is_no_result(tensor) and ", ""),
    Mutation("tensors of inference leave", _DATA, " and not tensor.is_inference()", ""),
    Mutation("a further view of data is not watched", _MEMORY, "        for each in others:\n            home.mark(each)\n", ""),
    Mutation("a forked process finds no data", _MEMORY, "        memory.bring_data_back()\n", "        pass\n"),
    Mutation("what an op works on leaves as data", _WHEN, "return bool(library.is_in_op()) or _is_autograd_running()", "return True"),
    Mutation("what a step follows leaves as data", _WHEN, " if followed.get(storage_key(each[0])) is None]", "]"),
    Mutation("what a step has saved leaves as data", _WHEN, "if storage_key(together[0]) not in saved:", "if True:"),
    Mutation("what a step is given stays", _WHEN, "        if self.has_begun or (may_look and", "        if (may_look and"),
    Mutation("all objects are looked through in each step", "autopilot/seldom.py", "        self._next = 2 * self._times\n", ""),
    Mutation("nothing leaves in a first step", _TRIAL, "elif given_bytes is not None and ", "elif False and "),
    Mutation("a larger step has no trial", "autopilot/persistent_needs.py", "        self._most_given_bytes = given_bytes\n", "        self._most_given_bytes = 2**62\n"),
    Mutation("what is held back never leaves", _TRIAL, "        self.memory.values.held_back = frozenset()\n        return True\n", "        return True\n"),
    Mutation("what is on trial is not held back", _VALUES, "        if self.held_back == KINDS:\n            yield from saved\n            return\n", ""),
    Mutation("data is not held back", _VALUES, "        if self.held_back:\n", "        if False:\n"),
    Mutation("a trial leaves keys on tensors", _TRIAL, "        else:\n            self._end_and_unmark()\n", "        else:\n            self._end_memory()\n"),
    Mutation("a trial is told of that was not needed", _TRIAL, "        if not is_on_trial:\n", "        if True:\n"),
    Mutation("what a step on trial is given stays", _TRIAL, "            self._data.begin_trial(memory, arguments)\n            memory", "            memory"),
    Mutation("a trial counts as moving", _TRIAL, "            self._is_on_trial = is_on_trial\n            if is_on_trial:\n", "            self._is_on_trial = self.times.moves = is_on_trial\n            if is_on_trial:\n"),
    Mutation("data leaves in later steps alone", "autopilot/persistence.py", "may_look and self._data.leaves_now(library, followed, self._memory_now, trained)", "False"),
    Mutation("nothing can be made like data", "torchtools/watch/__init__.py", "in (torch.Tensor, torch.nn.Parameter) and is_marked(tensor):", "in () and is_marked(tensor):"),
)  # fmt: skip
MEMORY = (
    Mutation("what has views is given a home", _MEMORY, "if not why and self.library.tensors_beside(tensor) > 1 + len(others):", "if False:"),
    Mutation("shared memory is given a home", _MEMORY, '    if storage.device.type == "cpu" and storage.is_shared():\n', "    if False:\n"),
    Mutation("memory of others is given a home", _MEMORY, "    if not (storage.resizable() or is_of_allocator()):\n", "    if False:\n"),
    Mutation("a further tensor on a storage is not watched", _MEMORY, "                if not self.library.is_marked(each):\n                    self._homes[key].mark(each)\n", "                pass\n"),
    Mutation("what is put on a storage is not watched", _READS, "        if home is not None:\n            home.mark(tensor)\n", ""),
    Mutation("a value that is made anew has another number", _MEMORY, "self._numbers.setdefault(what, len(self._numbers))", "self._numbers.setdefault((what, key), len(self._numbers))"),
    Mutation("rooms of values that are gone are not used again", _ROOMS, "return free.pop() if free else self._tier.take(size_bytes)", "return self._tier.take(size_bytes)"),
    Mutation("a room is used by two values", _ROOMS, "return free.pop() if free else", "return free[-1] if free else"),
    Mutation("homes of what is gone are kept", _MEMORY, "        self._homes.pop(value.key, None)\n", ""),
    Mutation("a room whose copy failed is lost with its value", _MEMORY, "value.place or value.spare, None, None", "value.place, None, None"),
    Mutation("copies that have ended still hold what is gone", _MEMORY, "                    self._evictor.store.finish_out(value, self._evictor.stats)\n            for value in self.values.begin_step", "                    pass\n            for value in self.values.begin_step"),
    Mutation("what an op reads is not brought back", _MEMORY, "                    if value.storage is None:\n                        store.start_in(value, stats)\n", ""),
    Mutation("what an op reads is not waited for", _MEMORY, "                    try:\n                        store.finish_in(value, stats)\n", "                    try:\n                        pass\n"),
    Mutation("what was brought back never leaves again", _MEMORY, "                finally:\n                    value.is_busy = was_busy\n", "                finally:\n                    pass\n"),
    Mutation("what is used next is never brought back", _MEMORY, "            self._read_ahead()\n", ""),
    Mutation("what cannot be read is not read again", _MEMORY, "                        store.start_in(value, stats)\n                        store.finish_in(value, stats)\n", "                        raise\n"),
    Mutation("what is used next is brought back without room", _MEMORY, "if missing_bytes > 0 and not self._leave_ahead(missing_bytes, self.values.distance(value)):", "if False:"),
    Mutation("nothing leaves for what is used next", _MEMORY, "if missing_bytes > 0 and not self._leave_ahead(missing_bytes, self.values.distance(value)):", "if missing_bytes > 0:"),
    Mutation("what is used soon leaves for what is used next", _MEMORY, "if self.values.distance(value) < _TIMES_AS_FAR * (distance + _USES_AHEAD):", "if False:"),
    Mutation("what was written to leaves ahead as it was", _MEMORY, "                if value.is_copied:\n                    missing_bytes -= store.drop(value)\n", "                if value.place is not None:\n                    value.is_copied = True\n                    missing_bytes -= store.drop(value)\n"),
    Mutation("somebody waits for what leaves ahead", _MEMORY, "if value.ticket is not None and value.ticket.is_done():\n                    store.finish_out", "if value.ticket is not None:\n                    store.finish_out"),
    Mutation("a copy that has ended ahead is not noticed", _MEMORY, "if value.ticket is not None and value.ticket.is_done():\n                    store.finish_out", "if False:\n                    store.finish_out"),
    Mutation("what was written is not copied ahead", _MEMORY, "            if value.leaves and value.place is not None:\n", "            if False:\n"),
    Mutation("what never leaves is copied ahead", _MEMORY, '        if not value.leaves or value.place is None or value.state != "here":', '        if value.place is None or value.state != "here":'),
    Mutation("what is copied ahead counts as having left", _MEMORY, "        value.leaves = False  # until it does\n", ""),
    Mutation("state leaves though a plan has room for it", "autopilot/persistence.py", "            if most_bytes is None:\n", "            if True:\n"),
    Mutation("all state leaves whatever a step needs", _MEMORY, "                if missing_bytes <= 0:\n                    break\n", ""),
    Mutation("state that is used first leaves first", _MEMORY, "for value in reversed(self.values.farthest()):", "for value in self.values.farthest():"),
    Mutation("what a call has read from stays after it", _READS, "                end()\n\n\ndef value_of", "                pass\n\n\ndef value_of"),
    Mutation("what a call reads from may leave meanwhile", _READS, "        if call is None:\n            return end\n", "        if True:\n            return end\n"),
    Mutation("states of optimizers stay", _MEMORY, "        self.adopt_state(optimizer, parameters)\n        with self._evictor.lock:\n            self._write_ahead", "        with self._evictor.lock:\n            self._write_ahead"),
    Mutation("an array's memory leaves", _READS, "                value.lend()\n", "                pass\n"),
    Mutation("what somebody has the address of leaves", _READS, '            if access == "address" and call is None:\n                value.is_pinned = True\n', '            if access == "address" and call is None:\n                pass\n'),
    Mutation("DLPack is taken for an array", _READS, '_LENDING = {"numpy",', '_LENDING = {"__dlpack__", "to_dlpack", "_to_dlpack", "numpy",'),
    Mutation("what is read without an op never leaves again", _READS, "                value.users -= 1\n", "                pass\n"),
    Mutation("what is read without an op is not brought back", _READS, "        try:\n            self._bring_back([value])\n        except BaseException:\n            end()\n            raise\n        if call", "        if call"),
    Mutation("a read that fails counts as under way for ever", _READS, "        except BaseException:\n            end()\n            raise\n", "        except BaseException:\n            raise\n"),
    Mutation("what is away at the end stays away", _MEMORY, "                value.is_pinned = True\n                try:\n                    self.bring_back([value])\n", "                value.is_pinned = True\n                try:\n                    pass\n"),
    Mutation("one that cannot be read keeps the others away", _MEMORY, "                    lost = error\n", "                    raise\n"),
    Mutation("what is back at the end may leave", _MEMORY, "            self._evictor.persistent = None\n", ""),
    Mutation("hooks stay", _MEMORY, "            hook.remove()\n", "            pass\n"),
    Mutation("looks are watched for ever", _READS, "        self._looks.end()\n", ""),
    Mutation("storages are watched for ever", _READS, "        serve_no_longer(self)\n", ""),
)  # fmt: skip

SLICES = (
    Mutation("a slice keeps no copy", _SLICES, "            store.start_out(value, value.place, stats)\n", "            pass\n"),
    Mutation("values of a slice leave while it runs", _SLICES, "            value.is_busy = True\n", ""),
    Mutation("values of a slice stay for ever", _SLICES, '        """Let values leave again, and the copies go."""\n        for value in self._all:\n            value.is_busy = False\n', '        """Let values leave again, and the copies go."""\n'),
    Mutation("values of a slice that fails stay for ever", _SLICES, "        for value in self._all:\n            value.is_busy = False\n        for value, place in self._can_undo:\n            store.finish_out", "        for value, place in self._can_undo:\n            store.finish_out"),
    Mutation("a slice that fails is not undone", _MEMORY, "                is_undone = current.undo()\n", "                is_undone = True\n"),
    Mutation("a slice that fails is undone in part", _SLICES, "            self.end()\n            return False\n", "            pass\n"),
    Mutation("the first value alone is undone", _SLICES, "        for value, place in self._can_undo:\n            store.finish_out", "        for value, place in self._can_undo[:1]:\n            store.finish_out"),
    Mutation("a slice that does not fit stays", _SLICES, "self._fits = room_bytes >= 0", "self._fits = True"),
    Mutation("the copy of a slice that does not fit is written over", _SLICES, "                place.keep(self._rooms.take_spare)\n", "                pass\n"),
    Mutation("a copy that was written over counts as kept", _VALUES, "        if another is None:\n            self._is_keeping = False\n", "        if another is None:\n            pass\n"),
    Mutation("a later copy is what a slice is undone to", _SLICES, "is_reverted=True", "is_reverted=False"),
    Mutation("the room of a later copy is lost", _SLICES, "            self._rooms.give_back(value.size_bytes, place)\n", "            pass\n"),
    Mutation("what may be limited is taken all the same", _ROOMS, " or not self._tier.is_limited else None", " or True else None"),
    Mutation("a step is not told that cannot be undone", _MEMORY, "        if not is_undone and isinstance(sys.exception(), TierError):\n", "        if False:\n"),
    Mutation("state that is not a step's stays", _MEMORY, "            self.adopt_state(optimizer, parameters)  # what something else than a step has made\n", ""),
    Mutation("lists of a state are those after the slice", _SLICES, "    return [_nesting_of(held) for held in state] if isinstance(state, list) else state\n", "    return state\n"),
    Mutation("what is small is not undone", _SLICES, "                    tensor.copy_(copy)\n", "                    pass\n"),
    Mutation("what is small is copied after the step", _SLICES, "torch.stack(tensors)", "tensors"),
    Mutation("what stays here is copied after the step", _SLICES, "tensor.detach().clone()", "tensor.detach()"),
    Mutation("what is clean is taken for what never left", _SLICES, "away_bytes > 0 or not all(map(_IS_ONLY_HERE, changed))", "away_bytes > 0"),
    Mutation("gradients that are away take no room", _SLICES, "away_bytes > 0 or not all", "not all"),
    Mutation("slices take temporary tensors for nothing", _SLICES, "room_bytes = free_bytes - alone * largest_bytes", "room_bytes = free_bytes"),
    Mutation("slices that are copied meanwhile take no room", _SLICES, "room_bytes / _SLICES_AT_ONCE, max", "room_bytes, max"),
    Mutation("small parameters tell where nothing asks for room", _MEMORY, "            if not self._evictor.live.asks:\n                needs = None", "            if False:\n                needs = None"),
    Mutation("the next slice comes when it computes", _MEMORY, "            self._bring_ahead(away, copied_bytes + self._temporary_bytes)\n", "            pass\n"),
    Mutation("the state that a slice made stays", _SLICES, "                self._optimizer.state.pop(parameter, None)\n", "                pass\n"),
    Mutation("the state before a slice is that after it", _SLICES, "self._states[parameter] = _nesting_of(state)", "self._states[parameter] = state"),
    Mutation("an old copy stands for what an array has written to", _SLICES, "        if value.is_pinned:\n            value.is_copied = False  # nothing tells what was written to it\n", ""),
    Mutation("copies of a slice take room that there is not", _SLICES, "if key in here and value.size_bytes <= room_bytes:", "if key in here:"),
    Mutation("no copy of a slice is made on the device", _SLICES, "if key in here and value.size_bytes <= room_bytes:", "if False:"),
    Mutation("a slice that moves nothing is one all the same", _MEMORY, "if changed and len(here) == len(changed):", "if True:"),
)  # fmt: skip

READS = (
    Mutation("arrays are not seen", _LOOKS, '_HANDING_OUT = ("numpy", "__array__", ', "_HANDING_OUT = ("),
    Mutation("addresses are not seen", _LOOKS, '    Place(torch.Tensor, "data_ptr", _tells_address),\n', ""),
    Mutation("addresses that are compared are handed out", _LOOKS, "compared_address(args[0]) if _EVERYWHERE and args else None", "None"),
    Mutation("addresses of storages that are compared are handed out", _STORAGES, "(is_saving() or compares_addresses())", "is_saving()"),
    Mutation("all who ask for addresses compare them", _ASKERS, "return _is_among(_asker(), _COMPARING)", "return True"),
    Mutation("a function of that name reads as safetensors does", _ASKERS, 'known.get(str(asker.f_globals.get("__name__")), ())', "set().union(*known.values())"),
    Mutation("calls that read have ended as they begin", _ASKERS, "    return RunningCall(outermost,", "    return RunningCall(sys._getframe(),"),
    Mutation("calls that read never end", _ASKERS, "        return frame is None or all(each is not self.frame for each, _ in walk_stack(frame))\n", "        return False\n"),
    Mutation("constant addresses are not seen", _LOOKS, '"const_data_ptr", ', ""),
    Mutation("DLPack is not seen", _LOOKS, '"__dlpack__", ', ""),
    Mutation("functions on items are not seen", _LOOKS, ', "apply_", "map_"', ""),
    Mutation("lists are not seen", _LOOKS, '"__format__", "tolist")', '"__format__")'),
    Mutation("an access has ended as it begins", _LOOKS, "            return ends.pop_all()\n", "            return ExitStack()\n"),
    Mutation("reads of storages are not seen", _STORAGES, "    *(Place(torch.UntypedStorage, name, _reading) for name in _READING),\n", ""),
    Mutation("writes to storages are not seen", _STORAGES, "    *(Place(torch.UntypedStorage, name, _writing) for name in _WRITING),\n", ""),
    Mutation("writes to storages are reads", _STORAGES, 'partial(_accessing, access="write")', 'partial(_accessing, access="read")'),
    Mutation("addresses of storages are not seen", _STORAGES, "    *(Place(torch.UntypedStorage, name, _handing_out) for name in _HANDING_OUT),\n", ""),
    Mutation("addresses of storages are reads", _STORAGES, '_served(keys, "address",', '_served(keys, "read",'),
    Mutation("storages are served while they are away alone", _STORAGES, "any(keeper.moves(each._cdata) for keeper in _KEEPERS)]", "any(keeper.is_away(each._cdata) for keeper in _KEEPERS)]"),
    Mutation("typed storages are not looked into", _STORAGES, "each._untyped_storage if isinstance(each, torch.TypedStorage) else each", "each"),
    Mutation("PyTorch is asked whether what is away is shared", _STORAGES, '    Place(torch.UntypedStorage, "is_shared", _asking),\n', ""),
    Mutation("tensors are put on storages unseen", _STORAGES, '    Place(torch.Tensor, "set_", _putting),\n', ""),
    Mutation("files are written from what is away", _STORAGES, '    Place(torch._C.PyTorchFileWriter, "write_record", _reading),\n', ""),
    Mutation("what is saved is not told from what is read", _STORAGES, "        _SAVING.depth += 1\n", ""),
)  # fmt: skip

MUTATIONS = (*DATA, *MEMORY, *SLICES, *READS)


@contextmanager
def copied_package(mutation: Mutation | None) -> Iterator[Path]:
    """A folder with a copy of the package, with a mutation in it, beside the tests."""
    with tempfile.TemporaryDirectory(prefix="pooch-persistent-mutation-") as folder:
        package = Path(folder, "pooch")
        shutil.copytree(ROOT / "pooch", package, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "pyproject.toml", "profiles"):
            Path(folder, name).symlink_to(ROOT / name)
        if mutation is not None:
            path = package / mutation.file
            path.write_text(mutated(path.read_text(), mutation))
        yield Path(folder)


def tried(mutation: Mutation | None) -> Outcome:
    """Run the tests on a copy with a mutation until one of them fails."""
    with copied_package(mutation) as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=line", "-p", "no:cacheprovider", *TESTS]
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Outcome("the tests", f"not done after {LIMIT_S} s")
    if ended.returncode == 0:
        return Outcome()
    failed = re.search(r"^(?:FAILED|ERROR) tests/\w+/(\S+)", ended.stdout, re.MULTILINE)
    reason = re.search(r"^E +(.*)$", ended.stdout, re.MULTILINE)
    test = failed[1].replace(".py::", "::") if failed else "the tests"
    return Outcome(test, reason[1][:80] if reason else f"the process ended with {ended.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutations, and print what noticed each of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.executor.persistent_mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations; without one, all")
    names = parser.parse_args(arguments).names
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    found = tried(None)
    if found.test:
        sys.stdout.write(f"{found.test} fails without any mutation: {found.how}\n")
        return 2
    sys.stdout.write("| mutation | noticed by | how |\n|---|---|---|\n")
    missed = 0
    for mutation in chosen:
        outcome = tried(mutation)
        missed += not outcome.test
        sys.stdout.write(row(mutation, outcome) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{len(chosen) - missed} of {len(chosen)} were noticed.\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

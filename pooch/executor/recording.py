"""Which calls of a step can run again. A step without a plan records each op; a plan says which ones it replays."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from ..machine import Call, Recipes
from ..torchtools.effects import StorageMap, changed_statistics
from ..torchtools.operators import call_refusal, is_foreign
from ..torchtools.tensors import has_plain_storage, storage_key
from .cursor import Cursor
from .evictor import Evictor
from .owner import Effort
from .replay import MadeArgument, OuterArgument, RecordedCall, preserve, record_call, tensor_arguments


@dataclass(slots=True)
class _Running:
    """The op that is running: its call, if it can be replayed, and what it changes without saying so."""

    call: RecordedCall | None
    statistics: list[torch.Tensor]
    begun_s: float
    start_s: float
    stall_ms: float
    is_alone: bool = True


class CallRecorder:
    """Records the calls of one step, and gives up those whose arguments are about to change.

    Args:
        evictor: Holds the budget.
        values: Which value each storage holds.
        recipes: Takes the calls.
        effort: Notes the time that recording takes.

    Attributes:
        op: Held from before an op until its results are known.
        cursor: Where the step is on the path of its plan. A native one has recorded calls too.
    """

    def __init__(self, evictor: Evictor, values: StorageMap, recipes: Recipes, effort: Effort) -> None:
        self._evictor, self._values, self._recipes, self._effort = evictor, values, recipes, effort
        self.op = threading.Lock()
        self._begin_number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._running: _Running | None = None  # of the thread that holds `op`
        self._running_thread = 0
        self._readers: dict[int, list[Call]] = {}  # by the storage of a tensor from outside of the step
        self._preserved: dict[int, list[OuterArgument]] = {}  # the same for calls that a plan replays
        self._unsafe: set[int] = set()  # storages whose address the program has
        self.cursor = Cursor()

    # Without a plan ---------------------------------------------------------------------------------------------------

    def begins(self) -> bool:
        """Whether the op that begins is the only one running. Of ops that overlap, none can be replayed."""
        if self.op.acquire(blocking=False):
            self._running, self._running_thread = None, threading.get_ident()
            return True
        running = self._running
        if running is not None:
            running.is_alone = False
        return False

    def ends(self) -> None:
        """Note that an op has ended, if it was the only one running."""
        if self._is_mine():
            self.op.release()

    def overlapped(self) -> None:
        """Note that the op which runs is not the only one."""
        if self._running is not None:
            self._running.is_alone = False

    def _is_mine(self) -> bool:
        """Whether the calling thread runs the op that holds `op`. Of ops that overlap, only one does."""
        return self.op.locked() and self._running_thread == threading.get_ident()

    def before(self, func: Any, facts: Any, args: Any, kwargs: Any, *, can_repeat: bool) -> None:
        """Record the call of an op that is about to run.

        Args:
            func: The operator.
            facts: What is known about it.
            args: Positional arguments.
            kwargs: Keyword arguments.
            can_repeat: Whether it writes over nothing but values of the step.
        """
        if not self._is_mine():
            return
        begun_s = time.perf_counter()
        refused = not can_repeat or facts.refusal or (facts.depends_on_call and call_refusal(func, args))
        # Nor can one that a mode of the program's around the step may change, as that sees no replay.
        refused = refused or torch._C._len_torch_dispatch_stack() > 0
        call = None if refused else record_call(func, facts, args, kwargs, self._values, self._evictor.device)
        statistics = changed_statistics(facts, func, args)
        self._running = _Running(call, statistics, begun_s, time.perf_counter(), self._evictor.stall_ms)

    def after(self, writes: tuple[int, ...], outputs: list[torch.Tensor], ended_s: float) -> list[torch.Tensor]:
        """Keep the call of the op that ran, if it can be replayed.

        Args:
            writes: Numbers of what it has made.
            outputs: The tensors among its results.
            ended_s: When it ended.

        Returns:
            Running statistics that it has changed.
        """
        running = self._running if self._is_mine() else None
        if running is None:
            return []
        self._running = None
        if running.call is not None and running.is_alone and all(map(has_plain_storage, outputs)):
            elapsed_ms = (ended_s - running.start_s) * 1000 - (self._evictor.stall_ms - running.stall_ms)
            self._keep(running.call, writes, max(elapsed_ms, 0.0))
        self._effort.recording_ms += (time.perf_counter() - ended_s + running.start_s - running.begun_s) * 1000
        return running.statistics

    def _keep(self, call: RecordedCall, writes: tuple[int, ...], time_ms: float) -> None:
        """Keep a call, if all that it reads can be replayed or comes from outside of the step."""
        reads, outer = read_by(call)
        if not all(value in self._recipes for value in reads):
            return
        if not all(self._is_from_outside(each.tensor) for each in outer):
            return
        if not self._unsafe.isdisjoint(storage_key(each.tensor) for each in outer if has_plain_storage(each.tensor)):
            return
        sources = [(value, source) for value in reads if (source := self._recipes.of(value)) is not None]
        places = (source.writes.index(value) for value, source in sources)
        recipe = hash((call.func, *(source.recipe for _, source in sources), *places))
        foreign = is_foreign(call.func) or any(source.is_foreign for _, source in sources)
        self._evictor.verification.note_place(recipe)
        kept = Call(call, reads, writes, time_ms, recipe, foreign)
        self._recipes.add(kept)
        self.cursor.note_call(writes, recipe)
        for each in outer:
            self._readers.setdefault(storage_key(each.tensor), []).append(kept)
            self.cursor.note_read(storage_key(each.tensor))

    def _is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that holds no value of the step was there before it, or is a view of one that was.

        Others may hold this step through their history, and only the collector would free them.
        """
        if not has_plain_storage(tensor):
            return False
        base = tensor._base if tensor._is_view() else tensor
        if base is None or base.grad_fn is None:
            return True
        return base.grad_fn._sequence_nr() < self._begin_number

    def record_on(self, gathered: frozenset[int]) -> None:
        """Have the native watch number and record the ops of a step that has left its plan, as it does without one.

        Args:
            gathered: Parameters that FSDP gathers. Calls that read them are recorded in Python.
        """
        if gathered or not self._evictor.live.asks:
            return  # where allocations do not ask for room, it is made before each op, in Python
        recipes, cursor = self._recipes, self.cursor
        planned = recipes.arriving
        for call in recipes.calls():
            cursor.note_call(call.writes, call.recipe)
        recipes.arriving = lambda: [*planned(), *unplanned_calls(cursor)]
        cursor.record_on(self._begin_number, self._evictor.verification.number)

    # Changes ----------------------------------------------------------------------------------------------------------

    def preserves(self, outer: list[OuterArgument], gathered: frozenset[int]) -> bool:
        """Have what a call of the plan reads from outside of the step copied before an op changes it.

        Args:
            outer: What it reads.
            gathered: What FSDP gathers again is the same again, and its storage holds anything until then.

        Returns:
            Whether all of it is there at any time.
        """
        is_there = True
        for argument in outer:
            if not has_plain_storage(argument.alias):
                continue
            if self._values.get(storage_key(argument.alias)) in gathered:
                is_there = False
            else:
                self._preserved.setdefault(storage_key(argument.alias), []).append(argument)
                self.cursor.note_read(storage_key(argument.alias))
        return is_there

    def preserve(self, func: Any, facts: Any, args: Any, written: dict[int, torch.Tensor]) -> None:
        """Copy what an op is about to change and calls that the plan replays have read, such as running statistics."""
        if not (self._preserved or self.cursor.is_native):
            return
        for key in [*written, *map(storage_key, changed_statistics(facts, func, args))]:
            self.cursor.preserve(key)
            readers = self._preserved.pop(key, None)
            if readers is not None:
                preserve(readers)

    @property
    def reads_outside(self) -> bool:
        """Whether a call that was recorded has read anything from outside of the step."""
        return bool(self._readers) or self.cursor.has_readers

    def outdated(self, keys: list[int]) -> list[Call]:
        """Return the calls that have read storages from outside of the step which are about to change.

        Args:
            keys: Of the storages.
        """
        native = (self._recipes.of(number) for key in keys for number in self.cursor.outdated(key))
        return [call for key in keys for call in self._readers.pop(key, ())] + [call for call in native if call]

    def outdated_by_address(self, keys: list[int], numbers: set[int]) -> list[Call]:
        """Return the calls that read or made what the program has the address of from now on.

        Args:
            keys: Of storages.
            numbers: The values of the step in them.
        """
        self._unsafe.update(keys)
        for key in keys:
            self.cursor.note_handed_out(key)
        return [*self._recipes.readers(numbers), *self.outdated(keys)]


def unplanned_calls(cursor: Cursor) -> list[Call]:
    """Return the calls of a step without a plan that the native watch has recorded since this was last called."""
    found = cursor.take_unplanned()
    return [Call(call, call.reads, writes, time_ms, recipe) for call, writes, time_ms, recipe in found]


def read_by(call: RecordedCall) -> tuple[tuple[int, ...], list[OuterArgument]]:
    """Return the values of the step that a call reads, each once, and what it reads from outside of it."""
    reads: dict[int, None] = {}
    outer: list[OuterArgument] = []
    for argument in tensor_arguments(call):
        if isinstance(argument, MadeArgument):
            reads[argument.value] = None
        else:
            outer.append(argument)
    return tuple(reads), outer

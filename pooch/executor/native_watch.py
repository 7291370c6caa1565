"""The native watch of a planned step: a kernel follows the path, and calls this where something is to be done.

It sees what the dispatch mode in `mode.py` sees, and does the same where it calls Python. Ops that a plan expects, and
at which nothing is due, never come here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from ..machine.own_time import OwnTime
from ..torchtools import function_modes, watch
from ..torchtools.effects import argument_keys, new_tensors, written_tensors
from ..torchtools.operators import operator_facts
from ..torchtools.settings import from_a_kernel, is_within_an_op
from ..torchtools.standing_aside import CompiledCalls, StepHooks, Watch
from ..torchtools.tensors import storage_key
from .cursor import Cursor
from .engines.cpu import CpuEngine
from .native_actions import native_actions
from .native_reads import native_reads
from .own_work import OWN_WORK, SavingHooks
from .step import Step

# The keys of the storages that an op reads, and the tensors that it writes in place, by theirs.
Storages = tuple[set[int], dict[int, torch.Tensor]]


def is_native(step: Step) -> bool:
    """Whether the native watch can see what a step does.

    Dispatch modes of the program around the region see what a dispatch mode of ours calls, and not what a kernel does.
    """
    guide, evictor = step.guide, step.evictor
    if type(step) is not Step or type(step.cursor) is Cursor or torch._C._len_torch_dispatch_stack():
        return False
    if guide is not None and not guide.table.can_be_native:
        return False
    return evictor.device.type != "cpu" or isinstance(evictor.engine, CpuEngine)  # only real streams are looked at


def native_saving(step: Step, calls: CompiledCalls | None = None) -> StepHooks:
    """Pass to the step every tensor that autograd saves and reads, as far as it is not just kept.

    Without a plan all are, until room runs out. `calls` is told of compiled calls.
    """
    module = watch.LIBRARY.get()
    assert module is not None
    if step.guide is None:
        first_node: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        region: Any = step.cursor
        region.go_unplanned(step.replays, not step.replays, first_node, step.evictor.verification.number)
    moves, step.reads = native_actions(step), native_reads(step)
    python = _PythonHooks(step, step.evictor.own_time, are_quiet=step.empties)
    hooks = module.Hooks(python, step, step.cursor, step.stats, step.begin, moves, step.reads)
    return StepHooks(hooks.pack, hooks.unpack, step.fell_silent, calls)


def native_watches(step: Step, *, notes_ops: bool) -> list[Watch]:
    """Return what watches the ops of a step: as far as they are to be known, where it replays nothing, and else all."""
    if step.replays:
        return [NativeWatch(step)]
    return [NotedOps(step.cursor)] if notes_ops else []


class _PythonHooks(SavingHooks):
    """What native hooks leave to Python."""

    def __init__(self, step: Step, own_time: OwnTime, *, are_quiet: bool) -> None:
        super().__init__(step, own_time, are_quiet=are_quiet)
        self._step, self._own_time = step, own_time

    def begin_reads(self) -> None:
        """Note that a thread is about to read a saved tensor for the first time."""
        with self._own_time, OWN_WORK, torch._C.DisableTorchFunction():
            if self._step.on_read is not None:
                self._step.tell_read()
            self._step.evictor.hold()


class _RegionWatch(Watch):
    """Watches the ops of a native region.

    Args:
        region: The region.
    """

    def __init__(self, region: Any) -> None:
        self._region = region

    @property
    def is_silent(self) -> bool:
        """Whether the ops that come are those of a compiled function."""
        return bool(self._region.is_silent)

    @is_silent.setter
    def is_silent(self, is_silent: bool) -> None:
        self._region.is_silent = is_silent


class NotedOps(_RegionWatch):
    """Has the region of a step that copies all that leaves tell which ops it has. Python hears of none."""

    def put(self) -> None:
        """Begin in the calling thread."""
        self._region.note_ops()

    def take_away(self) -> None:
        """Note ops no longer. May be repeated."""
        self._region.leave()


class NativeWatch(_RegionWatch):
    """Watches the ops of a region, and passes them to the step where something is to be done."""

    def __init__(self, step: Step) -> None:
        super().__init__(step.cursor)
        self._step, self._own_time = step, step.evictor.own_time
        self._waits = True  # whether the region may know of storages whose release is waited for

    def put(self) -> None:
        """Begin to watch in the calling thread."""
        device_type = self._step.evictor.device.type
        self._region.needs_attention = True  # the first op finds out
        watch.HIGHER_ORDER.use(self)
        self._step.evictor.stand_ins.use(watch.HIGHER_ORDER)
        self._region.enter(self, self._step.empties, "" if device_type == "cpu" else device_type)

    def take_away(self) -> None:
        """Watch no longer. May be repeated."""
        self._region.leave()
        self._step.owner.effort.recording_ms += self._region.take_recording_ms()
        watch.HIGHER_ORDER.leave(self)

    # What the kernel calls --------------------------------------------------------------------------------------------

    def before(self, func: Any, args: Any, kwargs: Any, is_alone: bool) -> Storages | None:
        """Do what is due before an op. Return its storages, or None if the step is not to see what it gives."""
        step = self._step
        with self._own_time, self._own_work():
            facts = operator_facts(func)
            if step.begin_op() and not is_alone:
                step.overlaps()
            if step.tier.is_beside():
                step.beside(facts, args, kwargs)
                return None
            storages = self.storages_of(func, args, kwargs)
            with from_a_kernel():
                step.before_op(func, facts, args, kwargs, storages[1])
            if not is_alone:
                step.recorder.overlapped()
            self._wait()
        return storages

    def act(self) -> bool:
        """Do what is due before the op that is expected: it is about to run, and nothing else is told of it.

        Returns whether it was done. Calls that read parameters which FSDP gathers are recorded in Python, so ops of
        such a plan are passed there as a whole.
        """
        guide = self._step.guide
        if guide is None or guide.table.gathered:
            return False
        with self._own_time, self._own_work(), from_a_kernel():
            self._step.act_before_expected()
            self._wait()
        return True

    def _wait(self) -> None:
        """Say before which op this is called next, even if it is the one that the plan expects."""
        step = self._step
        self._region.needs_attention = not step.evictor.live.asks
        guide = step.guide
        if guide is not None and (self._waits or guide.values.waits_for_program):
            awaited = guide.values.awaited()
            self._region.wait_for([storage._cdata for storage in awaited])
            self._waits = bool(awaited)

    def storages_of(self, func: Any, args: Any, kwargs: Any) -> Storages:
        """Return the storages that an op reads, and what it writes in place."""
        facts = operator_facts(func)
        written = written_tensors(facts, args, kwargs) if facts.written or facts.written_names else {}
        return argument_keys(args, kwargs), written

    def after(self, func: Any, storages: Storages, outputs: list[torch.Tensor]) -> None:
        """Pass what an op gave to the step.

        Args:
            func: The operator.
            storages: From `before` or `storages_of`.
            outputs: The tensors among its results.
        """
        with self._own_time, self._own_work():
            keys, written = storages
            made = new_tensors(written, outputs, keys)
            if made:
                self._step.is_quiet = self._may_be_of_a_wrapper()
                self._step.after_op(func, operator_facts(func).name, outputs, made)
                self._step.is_quiet = False

    def _may_be_of_a_wrapper(self) -> bool:
        """Whether an op may be one within another on a tensor of a class with `__torch_dispatch__`.

        A mode sees the latter, and the kernel what it does. Where such a step leaves its path, a mode watches the next.
        """
        guide = self._step.guide
        return guide is not None and guide.on_path and not guide.table.native_use.is_proven and is_within_an_op()

    def stall_ms(self) -> float:
        """Return what making room has taken in this step."""
        return self._step.evictor.stall_ms

    def note_place(self, recipe: int) -> None:
        """Remember which module of the program calls the op that is running, for a recipe that is new."""
        self._step.evictor.verification.note_place(recipe)

    def ended(self) -> None:
        """Note that an op which was passed to `before` has ended, in whatever way."""
        guide = self._step.guide
        if guide is not None:
            guide.reads_others = False  # of the next one Python may learn what it gave alone
        self._step.recorder.ends()

    def can_run_again(self, func: Any, error: BaseException) -> bool:
        """Whether an op that has failed can run again."""
        with self._own_time, self._own_work():
            return isinstance(error, Exception) and self._step.can_try_again(error, operator_facts(func))

    def written_over(self, tensor: torch.Tensor) -> None:
        """Note that the op which is expected is about to write over a value."""
        with self._own_time, self._own_work():
            self._step.overwritten_in(storage_key(tensor), tensor)

    def look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Bring back what a view is about to look at."""
        with self._own_time, self._own_work():
            self._step.bring_back((args, kwargs))

    def unseen(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an op of a compiled function."""
        with self._own_time, self._own_work():
            self._step.unseen(operator_facts(func), args, kwargs)

    def _own_work(self) -> AbstractContextManager[object]:
        """Leave out what the program sees of attributes of tensors and of functions."""
        if not function_modes.are_on():
            return OWN_WORK
        stack = ExitStack()
        stack.enter_context(OWN_WORK)
        stack.enter_context(torch._C.DisableTorchFunction())
        return stack

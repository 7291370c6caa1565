"""The dispatch modes of a forward pass, and the contexts that enter them together with the hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..torchtools import function_modes
from ..torchtools.effects import argument_keys, new_tensors, written_tensors
from ..torchtools.mode_stacks import Together
from ..torchtools.operators import operator_facts
from ..torchtools.raw_looks import RawLooks
from ..torchtools.settings import called_as_unwatched
from ..torchtools.standing_aside import CompiledCalls, SilentMode, StepHooks
from ..torchtools.tensors import result_tensors
from .native_watch import is_native, native_saving, native_watches
from .own_work import OWN_WORK, SavingHooks
from .step import Step


class StepMode(SilentMode):
    """Passes every op of the region to the step, below autograd."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step = step

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        # Every op of every step passes here. `python -m benchmarks.hook_cost` measures the cost.
        if not function_modes.are_on():
            return self._dispatch(func, func, args, kwargs or {})
        runs_program = types or operator_facts(func).is_foreign
        call = function_modes.as_now(func) if runs_program else func
        with torch._C.DisableTorchFunction():
            return self._dispatch(func, call, args, kwargs or {})

    def _dispatch(self, func: Any, call: Any, args: Any, kwargs: Any) -> Any:
        facts = operator_facts(func)
        if facts.is_view:
            return call(*args, **kwargs)
        step = self._step
        if self.is_silent:
            step.unseen(facts, args, kwargs)
            return called_as_unwatched(func, facts, args, kwargs, call)
        is_alone = step.begin_op()
        try:
            if step.tier.is_beside():
                step.beside(facts, args, kwargs)
                return called_as_unwatched(func, facts, args, kwargs, call)
            keys = argument_keys(args, kwargs)
            written = written_tensors(facts, args, kwargs) if facts.written or facts.written_names else {}
            with step.evictor.own_time:
                step.before_op(func, facts, args, kwargs, written)
            try:
                result = called_as_unwatched(func, facts, args, kwargs, call)
            except Exception as error:
                if not step.can_try_again(error, facts):
                    raise
                result = called_as_unwatched(func, facts, args, kwargs, call)
            outputs = result_tensors(result)
            made = new_tensors(written, outputs, keys)
            if made:
                with step.evictor.own_time:
                    step.after_op(func, facts.name, outputs, made)
            return result
        finally:
            if is_alone:
                step.op.release()


class WatchfulMode(StepMode):
    """The mode of plans that empty storages which the program holds: views are reads too."""

    def _dispatch(self, func: Any, call: Any, args: Any, kwargs: Any) -> Any:
        step = self._step
        with OWN_WORK:
            facts = operator_facts(func)
            if facts.is_view and not facts.reads_nothing:
                step.bring_back((args, kwargs))
            return super()._dispatch(func, call, args, kwargs)


def following(
    step: Step, calls: CompiledCalls | None = None, *, notes_ops: bool = False
) -> AbstractContextManager[None]:
    """Pass to the step what it needs to see of its forward pass.

    That is every tensor that autograd saves and reads, and those that are given other data; unless all is copied, every
    op, and whose address is handed out; and where its plan empties what the program holds, views as well, since they
    are reads too. The latter needs `looking` around each call. `calls` is told of compiled calls. With `notes_ops`, the
    step's cursor tells which ops it has, even if all is copied.
    """
    # Who has the address of what is only copied holds it, so that it stays.
    looks = RawLooks(step.look if step.replays else None, step.data_assigned, step.evictor.stand_ins)
    if is_native(step):
        return Together(native_saving(step, calls), looks, *native_watches(step, notes_ops=notes_ops))
    watches = [WatchfulMode(step) if step.empties else StepMode(step)] if step.replays else []
    return Together(saving(step, calls), looks, *watches)


def saving(step: Step, calls: CompiledCalls | None = None) -> AbstractContextManager[None]:
    """Pass to the step every tensor that autograd saves and reads."""
    hooks = SavingHooks(step, step.evictor.own_time, are_quiet=step.empties)
    return StepHooks(hooks.pack, hooks.unpack, step.fell_silent, calls)


@contextmanager
def looking(step: Step) -> Iterator[None]:
    """Restore everything on the way out, since what holds a value then may read it in any thread."""
    try:
        yield
    finally:
        step.restore()


@contextmanager
def watching(step: Step, calls: CompiledCalls | None = None) -> Iterator[None]:
    """Like `following`, around a whole region, on the way out of which everything is restored."""
    with following(step, calls), looking(step) if step.empties else nullcontext():
        yield

"""The dispatch modes of a planned forward pass, and the contexts that enter them together with the hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..torchtools.effects import argument_keys, new_tensors, written_tensors
from ..torchtools.operators import operator_facts
from ..torchtools.raw_looks import RawLooks
from ..torchtools.tensors import result_tensors
from .online import OnlineStep
from .step import OWN_WORK, PlannedStep


class StepMode(TorchDispatchMode):
    """Passes every op of the region to the step, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper that hides `__torch_dispatch__` from Dynamo: it costs as much as all of this mode."""
        return False

    def __init__(self, step: PlannedStep | OnlineStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every op of every step passes here. `python -m benchmarks.hook_cost` measures the cost.
        kwargs = kwargs or {}
        facts = operator_facts(func)
        if facts.is_view:
            return func(*args, **kwargs)
        step = self._step
        is_alone = step.begin_op()
        try:
            if step.arena.is_beside():
                step.beside(facts, args, kwargs)
                return func(*args, **kwargs)
            keys = argument_keys(args, kwargs)
            written = written_tensors(facts, args, kwargs) if facts.written or facts.written_names else {}
            step.before_op(func, facts, args, kwargs, written)
            result = func(*args, **kwargs)
            outputs = result_tensors(result)
            made = new_tensors(written, outputs, keys)
            if made:
                step.after_op(func, facts.name, outputs, made)
            return result
        finally:
            if is_alone:
                step.op.release()


class WatchfulMode(StepMode):
    """The mode of plans that empty storages which the program holds: views are reads too."""

    _step: PlannedStep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = self._step
        with OWN_WORK:
            facts = operator_facts(func)
            if step.emptied.away and facts.is_view and not facts.reads_nothing:
                step.bring_back((args, kwargs))
            return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def recognising(step: PlannedStep | OnlineStep) -> Iterator[None]:
    """Pass to the step every op, and every tensor that autograd saves and reads."""
    with saving(step), StepMode(step):
        yield


def saving(step: PlannedStep | OnlineStep) -> AbstractContextManager[None]:
    """Pass to the step every tensor that autograd saves and reads."""
    return torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack)


@contextmanager
def following(step: PlannedStep) -> Iterator[None]:
    """Like `recognising`, and treat views as reads too. Reads that are no ops are only seen inside of `looking`."""
    hooks = torch.autograd.graph.saved_tensors_hooks(step.quietly(step.pack), step.quietly(step.unpack))
    with hooks, WatchfulMode(step):
        yield


@contextmanager
def looking(step: PlannedStep) -> Iterator[None]:
    """Pass every read that is no op to the step. Everything is restored on the way out."""
    with RawLooks(step.look):
        try:
            yield
        finally:
            step.restore()


@contextmanager
def watching(step: PlannedStep) -> Iterator[None]:
    """Like `recognising`, and pass every other read of a tensor too. Everything is restored on the way out."""
    with following(step), looking(step):
        yield

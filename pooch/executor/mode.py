"""The dispatch modes of a planned forward pass: they show every op to the step, below autograd."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pooch.executor.step import PlannedStep
from pooch.torchtools.effects import argument_keys, new_tensors, written_tensors
from pooch.torchtools.operators import operator_facts
from pooch.torchtools.tensors import result_tensors


class StepMode(TorchDispatchMode):
    """Shows every op of the region to the step, below autograd."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No wrapper that keeps a compiler away from `__torch_dispatch__`: it costs as much as all that we do here."""
        return False

    def __init__(self, step: PlannedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every op of every step passes here: `python -m benchmarks.hook_cost` tells what it costs.
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
    """For plans that empty what the program holds: views are looks too, and what we do ourselves is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = self._step
        before, step.is_own = step.is_own, True
        try:
            facts = operator_facts(func)
            if step.emptied.away and facts.is_view and not facts.reads_nothing:
                step.bring_back((args, kwargs))
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            step.is_own = before

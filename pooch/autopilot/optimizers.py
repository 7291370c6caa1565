"""Finds out how many bytes of state optimizers create in their first step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..ground.weakly import weakly
from ..torchtools.optimizer_hooks import not_traced
from ..torchtools.tensors import find_tensors, storage_bytes


class OptimizerWatch:
    """Tells of the state that each optimizer of the process creates in its first step after this was made.

    What takes the place of state that is gone, as where a program makes its optimizer anew, is not told of.

    Args:
        appeared: A method that is called with the bytes, after the step. Its object is not kept alive.
    """

    def __init__(self, appeared: Callable[[int], None]) -> None:
        self._appeared = weakly(appeared)
        self._before_bytes: weakref.WeakKeyDictionary[torch.optim.Optimizer, int | None] = weakref.WeakKeyDictionary()
        self._most_bytes = 0  # of the state of all optimizers, after the first step of any
        before, after = not_traced(weakly(self._before)), not_traced(weakly(self._after))
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in self._before_bytes:
            self._before_bytes[optimizer] = _state_bytes(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        before_bytes = self._before_bytes.get(optimizer)
        if before_bytes is not None:
            self._before_bytes[optimizer] = None  # only its first step
            live_bytes = sum(map(_state_bytes, list(self._before_bytes)))
            created_bytes = min(_state_bytes(optimizer) - before_bytes, live_bytes - self._most_bytes)
            self._most_bytes = max(self._most_bytes, live_bytes)
            self._appeared(created_bytes)

    def stop(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return storage_bytes(tensor for state in optimizer.state.values() for tensor in find_tensors(state))

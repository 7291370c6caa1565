"""A step of an optimizer on some parameters, of which everything happens or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..machine.persistent import PersistentValue
from .evictor import Evictor

_MOMENTS = 2  # times the size of a parameter: what its state is thought to take where that is not known
MOST_MOMENTS = 3  # of those that are known
TEMPORARIES = 2  # times the size of its parameters: what a slice needs beside what it changes
_TWO_MOMENTS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)


def known_moments(optimizer: torch.optim.Optimizer) -> int | None:
    """How many numbers of state PyTorch's own optimizers make for each number of a parameter. None: it is not known."""
    groups, kind = optimizer.param_groups, type(optimizer)
    if kind in _TWO_MOMENTS:
        return 3 if any(group.get("amsgrad") for group in groups) else 2
    if kind is torch.optim.SGD:
        return int(any(group["momentum"] for group in groups))
    if kind is torch.optim.RMSprop:
        return 1 + any(group["momentum"] for group in groups) + any(group["centered"] for group in groups)
    return 2 if kind in (torch.optim.Adadelta, torch.optim.Rprop) else None


def stepping_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> int:
    """How much stepping some parameters takes beside what is there: temporary tensors, and the state to come."""
    parameters = list(parameters)
    new = sum(each.nbytes for each in parameters if not optimizer.state.get(each))
    moments = known_moments(optimizer)
    return TEMPORARIES * sum(each.nbytes for each in parameters) + (_MOMENTS if moments is None else moments) * new


class Slice:
    """Some parameters with their state, while an optimizer steps them.

    The tier has a copy of each of them as it was, and keeps it until the slice ends: they do not leave meanwhile. What
    is too small to leave is copied here, and so is what has not left, where there is room for that.

    Args:
        evictor: Makes the moves.
        optimizer: The optimizer.
        parameters: The parameters.
        values: Those of them, and of their state, that may leave.
        room_bytes: What the slice and such copies may take.
    """

    def __init__(
        self,
        evictor: Evictor,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        values: Sequence[PersistentValue],
        room_bytes: int,
    ) -> None:
        self._evictor, self._optimizer, self._parameters = evictor, optimizer, parameters
        self._all = values
        self._values: list[PersistentValue] = []
        room_bytes -= sum(each.size_bytes for each in values) + TEMPORARIES * sum(each.nbytes for each in parameters)
        for value in values:
            if value.state == "here" and value.size_bytes <= room_bytes:
                room_bytes -= value.size_bytes
            else:
                self._values.append(value)
        known = {value.key for value in self._values}
        self._small = {parameter: _copied(parameter, known) for parameter in parameters}
        self._states: dict[torch.Tensor, dict[str, Any] | None] = {}
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            self._states[parameter] = None if state is None else dict(state)
            for tensor in (state or {}).values():
                if isinstance(tensor, torch.Tensor):
                    self._small[tensor] = _copied(tensor, known)
        self._can_undo: list[PersistentValue] = []

    def begin(self, bring_back: Callable[[Iterable[PersistentValue]], None]) -> None:
        """Have all be there, with a copy in the tier, and stay.

        Args:
            bring_back: Brings values back.
        """
        store, stats = self._evictor.store, self._evictor.stats
        needed_bytes = stepping_bytes(self._optimizer, self._parameters)
        away = [value for value in self._all if value.state == "away"]
        for value in self._all:
            value.is_busy = True
        self._evictor.look(sum(value.size_bytes for value in away) + needed_bytes)
        for value in away:
            store.start_in(value, stats)
        bring_back(self._values)
        for value in self._values:
            store.finish_out(value, stats)
            if value.is_pinned:
                value.is_copied = False  # nothing tells what was written to it
            if not value.is_copied and value.place is not None:
                store.start_out(value, value.place, stats)
        for value in self._values:
            store.finish_out(value, stats)
        self._can_undo = [value for value in self._values if value.is_copied]
        self._evictor.look(needed_bytes)

    def end(self) -> None:
        """Let values leave again."""
        for value in self._all:
            value.is_busy = False

    def undo(self) -> None:
        """Have all be as before, unless there was no room for a copy of everything."""
        self.end()
        if len(self._can_undo) < len(self._values):
            return
        for value in self._can_undo:
            value.revert()
        with torch.no_grad():
            for tensor, copy in self._small.items():
                if copy is not None:
                    tensor.copy_(copy)
        for parameter, state in self._states.items():
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state


def _copied(tensor: torch.Tensor, known: set[int]) -> torch.Tensor | None:
    """Return a copy of a tensor, or None if the tier has one."""
    return None if tensor.untyped_storage()._cdata in known else tensor.detach().clone()

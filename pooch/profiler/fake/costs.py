"""Costs of operators that were not run: time, temporary memory, and results whose size does not follow from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class OpCost:
    """Duration of one operator, and the memory that it allocates at its peak beyond its results."""

    time_ms: float
    workspace_bytes: int


class OpCosts(Protocol):
    """Determines the cost of each operator from its arguments. Called within a fake world."""

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """Returns the cost of `func(*args, **kwargs)`, whose fake result is `result`."""

    def corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Returns the result with the sizes of a real one."""

    def notes(self) -> list[str]:
        """Returns notes for the reader of the profile."""


def signature(func: Any, args: Any, kwargs: Any) -> tuple[object, ...]:
    """Returns the key of a cost: the operator and its arguments, tensors by geometry and dtype."""
    return (func, _described(args), _described(kwargs or {}))


def _described(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        if argument.layout is not torch.strided:
            return (argument.layout, tuple(argument.shape), argument.dtype)
        return (tuple(argument.shape), argument.stride(), argument.dtype, argument.device.type)
    if isinstance(argument, (list, tuple)):
        return tuple(_described(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _described(argument[key])) for key in sorted(argument))
    if isinstance(argument, torch.Generator):
        return "generator"
    return (type(argument), argument)

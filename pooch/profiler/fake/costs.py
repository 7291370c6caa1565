"""What an operator costs that was not run: its time, its temporaries, and results whose size shapes do not tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class OpCost:
    """Cost of one operator.

    Attributes:
        time_ms: how long it lasts.
        workspace_bytes: what it takes at its peak beyond its results.
    """

    time_ms: float
    workspace_bytes: int


class OpCosts(Protocol):
    """Knows the cost of each operator from its arguments. Called inside of a fake world."""

    def cost(self, func: Any, args: Any, kwargs: Any, result: Any) -> OpCost:
        """The cost of `func(*args, **kwargs)`, whose fake result is `result`."""

    def corrected(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """The result, with the sizes that it really has."""

    def notes(self) -> list[str]:
        """What a reader of the profile should know."""


def signature(func: Any, args: Any, kwargs: Any) -> tuple[object, ...]:
    """What tells one cost from another: the operator and its arguments, tensors by geometry and dtype."""
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

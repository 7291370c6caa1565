"""The operators that can be trained: one function each, found by the operator's name in the default ONNX domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Run = TypeVar("Run", bound=Callable[..., Any])
EVERY_INPUT = 16  # more inputs than any operator has that reads its inputs on the host


class UnsupportedVariant(Exception):
    """An operator that is known, in a form that is not. Its text says which form; the caller names the node."""


@dataclass(frozen=True, slots=True)
class Operator:
    """How one operator runs.

    Attributes:
        run: takes the `Operation` (attributes, opset, training mode) and the inputs; an absent input is None.
        host: positions of inputs that it needs as known numbers while the model is built: shapes, axes, pads.
        numbers: positions at which a constant of one element may come as a Python number.
        gives_constants: its outputs follow from its inputs' shapes alone.
    """

    run: Callable[..., Any]
    host: frozenset[int]
    numbers: frozenset[int]
    gives_constants: bool


OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, host: tuple[int, ...] = (), numbers: tuple[int, ...] = (), gives_constants: bool = False
) -> Callable[[Run], Run]:
    """Enter a function into the registry under its ONNX names."""

    def enter(run: Run) -> Run:
        enter_function(names, run, host=host, numbers=numbers, gives_constants=gives_constants)
        return run

    return enter


def enter_function(
    names: tuple[str, ...],
    run: Callable[..., Any],
    *,
    host: tuple[int, ...] = (),
    numbers: tuple[int, ...] = (),
    gives_constants: bool = False,
) -> None:
    """Enter a function into the registry; for tables of small functions."""
    for name in names:
        assert name not in OPERATORS, name
        OPERATORS[name] = Operator(run, frozenset(host), frozenset(numbers), gives_constants)

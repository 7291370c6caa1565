"""The operators that can be trained: a function each, registered by its name in the default ONNX domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Run = TypeVar("Run", bound=Callable[..., Any])


class UnsupportedVariant(Exception):
    """A form of a known operator that is not supported. The text describes the form; the caller names the node."""


@dataclass(frozen=True, slots=True)
class Operator:
    """How one operator runs.

    Attributes:
        run: takes the `Operation` (attributes, opset, training mode) and the inputs; an absent input is None.
        host: positions of inputs that must be known numbers when the model is built: shapes, axes, pads.
        numbers: positions at which a constant of one element may be passed as a Python number.
        gives_constants: whether the outputs depend only on the shapes of the inputs.
    """

    run: Callable[..., Any]
    host: frozenset[int]
    numbers: frozenset[int]
    gives_constants: bool


OPERATORS: dict[str, Operator] = {}


def operator(
    *names: str, host: tuple[int, ...] = (), numbers: tuple[int, ...] = (), gives_constants: bool = False
) -> Callable[[Run], Run]:
    """Register a function under its ONNX names; see `Operator` for the arguments."""

    def enter(run: Run) -> Run:
        for name in names:
            assert name not in OPERATORS, name
            OPERATORS[name] = Operator(run, frozenset(host), frozenset(numbers), gives_constants)
        return run

    return enter

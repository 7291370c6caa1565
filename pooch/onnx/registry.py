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
        contents: positions of the inputs whose contents matter, rather than their shapes and types alone; None: all.
            Where these are known when the model is built, so is the result.
        folds: whether a result of known inputs is computed once, when the model is built: not what is random.
        ignores: attributes that make no difference here. Any other that a node has and nothing reads is refused.
    """

    run: Callable[..., Any]
    host: frozenset[int]
    numbers: frozenset[int]
    contents: frozenset[int] | None
    folds: bool
    ignores: frozenset[str]


OPERATORS: dict[str, Operator] = {}
BRANCH = "If"  # no operator: one of its two graphs takes its place


def operator(
    *names: str,
    host: tuple[int, ...] = (),
    numbers: tuple[int, ...] = (),
    contents: tuple[int, ...] | None = None,
    folds: bool = True,
    ignores: tuple[str, ...] = (),
) -> Callable[[Run], Run]:
    """Register a function under its ONNX names; see `Operator` for the arguments."""

    def enter(run: Run) -> Run:
        for name in names:
            assert name not in OPERATORS, name
            needed = None if contents is None else frozenset(contents)
            OPERATORS[name] = Operator(run, frozenset(host), frozenset(numbers), needed, folds, frozenset(ignores))
        return run

    return enter

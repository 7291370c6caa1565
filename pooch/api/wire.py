"""What processes of this package tell one another: plain data, from which only known data classes are made again.

Reading it executes nothing, and needs no library that a training process would have to load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from ..ground.errors import WireError
from ..ir import (
    Action,
    Decision,
    Device,
    ExpectedOp,
    GatheredUnit,
    HookCosts,
    Link,
    Op,
    PersistentMove,
    PersistentPlan,
    PersistentTensor,
    Plan,
    Profile,
    Schedule,
    Split,
    Value,
)
from ..ir.layout import PlacedBlock, StepLayout
from ..ir.modelled_ranks import ModelledRanks
from ..ir.profile import InFlight
from .options import PlanOptions

_NUMBERS = frozenset((int, float, bool, type(None)))
_SCALARS = _NUMBERS | {str}
PLANNING = (
    Action, Decision, Device, ExpectedOp, GatheredUnit, HookCosts, InFlight, Link, ModelledRanks, Op, PersistentMove,
    PersistentPlan, PersistentTensor, PlacedBlock, Plan, PlanOptions, Profile, Schedule, Split, StepLayout, Value,
)  # fmt: skip


class Wire:
    """Says values in what JSON has, and makes equal ones of it: numbers, texts, None, collections and data classes.

    A tuple is a JSON array. All else that is no scalar is an object with one key: a collection or a class, by name.

    Args:
        classes: The data classes that may pass.
    """

    def __init__(self, *classes: type) -> None:
        self._classes: dict[str, tuple[type, int]] = {}
        self._fields: dict[type, Callable[[Any], tuple[object, ...]]] = {}
        self.add(*classes)

    def add(self, *classes: type) -> None:
        """Let further data classes pass. Whoever has a child process do work adds what the work takes and returns."""
        self._classes.update({kind.__name__: (kind, len(fields(kind))) for kind in classes})
        self._fields.update({kind: _values_of(kind) for kind in classes})

    def plain(self, value: object) -> Any:
        """Return a value as plain data.

        Args:
            value: What is to be told.

        Raises:
            WireError: If it is of another kind, or holds something that is.
        """
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is tuple:
            return self._each(value)
        if kind in self._fields:
            return {kind.__name__: self._each(self._fields[kind](value))}
        if isinstance(value, dict):
            return {"dict": [self._each(value), self._each(value.values())]}
        if kind in (list, frozenset):
            return {kind.__name__: self._each(value)}
        if isinstance(value, float | str):  # such as numpy's numbers, and the version that PyTorch gives
            return float(value) if isinstance(value, float) else str(value)
        raise WireError(f"a value of type {kind.__name__} cannot be told to another process")

    def _each(self, values: Any) -> list[Any]:
        # A profile has some hundred thousand numbers, and the training thread waits for the interpreter meanwhile.
        return [value if type(value) in _SCALARS else self.plain(value) for value in values]

    def made(self, plain: object) -> Any:
        """Make a value of plain data, equal to the one that was told.

        Args:
            plain: What `plain` returned, also after it was written as JSON and read again.

        Raises:
            WireError: If it names anything that may not pass, or has another form.
        """
        try:
            return self._made(plain, {})
        except (TypeError, ValueError, RecursionError) as error:
            raise WireError(f"another process told what cannot be understood: {error}") from None

    def _made(self, plain: Any, known: dict[str, str]) -> Any:
        if isinstance(plain, str):
            return known.setdefault(plain, plain)  # a profile says the same names over and over
        if isinstance(plain, list):
            return tuple([each if type(each) in _NUMBERS else self._made(each, known) for each in plain])
        if not isinstance(plain, dict):
            return plain
        ((name, content),) = plain.items()
        if name == "dict":
            keys, values = content
            return dict(zip(self._made(keys, known), self._made(values, known), strict=True))
        values = self._made(content, known)
        if name == "list":
            return list(values)
        if name == "frozenset":
            return frozenset(values)
        if name not in self._classes:
            raise WireError(f"another process told of {name!r}, which may not pass between processes")
        kind, count = self._classes[name]
        if len(values) != count:
            raise WireError(f"another process told of a {name} with {len(values)} fields instead of {count}")
        return kind(*values)


def _values_of(kind: type) -> Callable[[Any], tuple[object, ...]]:
    """Return what gives the values of all fields of a data class, of which there are two at least or one."""
    names = [field.name for field in fields(kind)]
    values = attrgetter(*names)
    return values if len(names) > 1 else lambda value: (values(value),)


WIRE = Wire(*PLANNING)

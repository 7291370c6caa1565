"""Where the units of a model stand in a step: their ops in the forward pass, and their part of the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..ground.errors import UsageError
from ..ir.profile import Profile
from .sharding import Unit


@dataclass(frozen=True, slots=True)
class UnitSpan:
    """The part of a step that belongs to a unit.

    Attributes:
        unit: whose.
        first: its first forward op.
        begin: slot in which its backward pass begins.
        end: slot in which its backward pass is over.
        parameters: ids of its parameters.
    """

    unit: Unit
    first: int
    begin: int
    end: int
    parameters: tuple[int, ...]


def unit_spans(profile: Profile, units: Iterable[Unit]) -> list[UnitSpan]:
    """The spans of units (the root is none of them) that the step runs, in forward order.

    The backward pass has no module paths. A unit's part of it begins where the first value is read that only the unit
    knows: a parameter, or what its ops make and no op outside reads. It ends where that of the unit before it begins;
    that of the first unit ends where the next gradient is made after all of its own.

    Raises:
        UsageError: a unit runs several times, or the backward pass does not take the units one after the other.
    """
    by_name = {unit.name: unit for unit in units if unit.name}
    owners = [_owner(op.module, by_name) for op in profile.ops[: profile.forward_ops]]
    order = _order(owners)
    known = _values_of_units(profile, owners)
    begins = [_begin(profile, known.get(name, []), name) for name in order]
    if any(following >= begin for begin, following in pairwise(begins)):
        raise UsageError("the backward pass does not take the units one after the other, which is not modelled")
    spans = []
    for number, (name, begin) in enumerate(zip(order, begins, strict=True)):
        parameters = tuple(value for value in known[name] if profile.values[value].role == "parameter")
        end = begins[number - 1] if number else _end_of_first(profile, begin, by_name[name].trained_bytes)
        spans.append(UnitSpan(by_name[name], owners.index(name), begin, end, parameters))
    return spans


def _owner(module: str, units: dict[str, Unit]) -> str:
    """The unit that a module belongs to; "" for the root."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module


def _order(owners: Sequence[str]) -> list[str]:
    """The units in the order in which they run."""
    order: list[str] = []
    for owner in owners:
        if owner and owner in order[:-1]:
            raise UsageError(f"unit {owner} runs several times in a step, which is not modelled: give another --unit")
        if owner and owner not in order:
            order.append(owner)
    return order


def _values_of_units(profile: Profile, owners: Sequence[str]) -> dict[str, list[int]]:
    """By unit: its parameters, and what its ops read or make and no op outside does."""
    users: list[set[str]] = [set() for _ in profile.values]
    for op in profile.ops[: profile.forward_ops]:
        for number in (*op.reads, *op.writes):
            users[number].add(owners[op.index])
    found: dict[str, list[int]] = {}
    for value, of_value in zip(profile.values, users, strict=True):
        if len(of_value) == 1 and value.role != "buffer":
            found.setdefault(next(iter(of_value)), []).append(value.id)
    return found


def _begin(profile: Profile, values: Iterable[int], name: str) -> int:
    reads = [slot for value in values if (slot := profile.values[value].first_unpack) >= 0]
    if not reads:
        raise UsageError(f"the backward pass reads nothing of unit {name}, which is not modelled: give another --unit")
    return min(reads)


def _end_of_first(profile: Profile, begin: int, gradient_bytes: int) -> int:
    """The slot in which the next gradient is made after so many bytes of gradients, or that of the closing op."""
    made = 0
    for op in profile.ops[begin:]:
        if op.gradient_bytes and made >= gradient_bytes:
            return op.index
        made += op.gradient_bytes
    return len(profile.ops) - 1

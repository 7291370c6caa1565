"""The in-core bytes of a step as blocks: storages that the forward pass makes, and what else its memory curve shows.

A profile names the values of the forward pass. Gradients, temporaries and workspaces it only shows as bytes at points,
so their blocks are read off the curve: what rises in a body and is gone by the next entry is a temporary of that op;
what stays is a block that lives until the curve falls again.

In the backward pass, that alone would give ReLU's backward a workspace, where it replaces one gradient by another. So
an op is taken to end one of the latest gradients, if what it then leaves behind is the gradient of a value that it
unpacks (or one of the same size as the gradient that it reads) and those of parameters, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy

from ..ir.profile import Value
from .dataflow import Dataflow

RemainderKind = Literal["before", "program", "gradient", "temporary"]


@dataclass(frozen=True, slots=True)
class Storage:
    """Device bytes that the step makes, with the values that they hold one after the other.

    Attributes:
        value: id of the last one; only that one can be an activation, since the others are overwritten.
        first_point: at which it is allocated. 0: before the step.
        end_point: the first point at which it no longer lives in-core.
        size_bytes: that the allocator takes.
    """

    value: int
    first_point: int
    end_point: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Remainder:
    """Bytes that no value of the profile explains.

    Attributes:
        kind: "before": existed before the step and is freed in it; "program": made by the forward pass; "gradient":
            made by the backward pass; "temporary": of one op.
        slot: of the op that makes it; -1: none.
        first_point: at which it lives first.
        end_point: the first point at which it no longer lives.
        size_bytes: its bytes.
    """

    kind: RemainderKind
    slot: int
    first_point: int
    end_point: int
    size_bytes: int


def storages(dataflow: Dataflow) -> tuple[Storage, ...]:
    """Return the storages that the step allocates or that its schedule can free, in order of their last values."""
    values = dataflow.profile.values
    last = [value for value in values if value.role == "made" and not _has_successor(values, value)]
    found = [each for value in last if (each := _storage(dataflow, value)) is not None]
    return tuple(_gone_on_in_place(dataflow, found))


def _gone_on_in_place(dataflow: Dataflow, found: list[Storage]) -> list[Storage]:
    """End storages one point earlier if the op that reads them last went on in them, which only the curve shows.

    PyTorch computes some results in place, such as a linear layer's output with its bias, but not under the dispatch
    mode that names a profile's values. Live bytes are measured without one: they do not rise where the op's result
    begins. Counted twice, such a storage would look as if something from before the step was freed there and came back.
    """
    points = dataflow.in_core_points
    begun: dict[int, list[Storage]] = {}
    ending: dict[int, list[int]] = {}
    for place, storage in enumerate(found):
        begun.setdefault(storage.first_point, []).append(storage)
        if storage.value not in dataflow.activation_ids:  # no action could move its end
            ending.setdefault(storage.end_point, []).append(place)
    for body in begun.keys() & {point - 1 for point in ending} - {0}:
        made = begun[body]
        missing_bytes = sum(each.size_bytes for each in made) - int(points[body] - points[body - 1])
        for place in ending[body + 1]:
            last = found[place]
            is_read = last.value in dataflow.profile.ops[body // 2].reads
            alike = any(each.size_bytes == last.size_bytes for each in made if each.value != last.value)
            if is_read and alike and last.size_bytes <= missing_bytes and last.first_point < body:
                found[place] = replace(last, end_point=body)
                missing_bytes -= last.size_bytes
    return found


def _has_successor(values: Sequence[Value], value: Value) -> bool:
    at = value.overwritten_at
    return at >= 0 and any(other.overwrites == value.id for other in values[value.id + 1 :])


def _storage(dataflow: Dataflow, value: Value) -> Storage | None:
    values = dataflow.profile.values
    root = value
    while root.overwrites >= 0:
        root = values[root.overwrites]
    made_by_step = root.role == "made"
    if not made_by_step and value.id not in dataflow.activation_ids:
        return None  # an input that was written to: it is part of what existed before
    first, end = 2 * root.producer + 1 if made_by_step else 0, dataflow.life_ends[value.id]
    return Storage(value.id, first, end, value.allocated_bytes) if first < end else None


def remainders(dataflow: Dataflow, known: Iterable[Storage]) -> tuple[tuple[Remainder, ...], int]:
    """Return the blocks that storages leave unexplained, and the bytes that exist before, in and after all of the step.

    Where a profile's storages add up to more than its curve, the curve is taken to be that sum.
    """
    change = numpy.zeros(2 * dataflow.end + 1, dtype=numpy.int64)
    for storage in known:
        change[storage.first_point] += storage.size_bytes
        change[storage.end_point] -= storage.size_bytes
    left = numpy.maximum(dataflow.in_core_points - numpy.cumsum(change[:-1]), 0).tolist()
    return _Decomposition(left, dataflow).run()


_LATEST = 4  # gradients among which one that an op reads is looked for


def _parameter_sums(sizes: Sequence[int]) -> set[int]:
    """Bytes of single parameters and of neighbours, such as a layer's weight and bias."""
    return {*sizes, *(a + b for a, b in pairwise(sizes))}


@dataclass(slots=True)
class _Open:
    """A block that still lives."""

    kind: RemainderKind
    slot: int
    first_point: int
    size_bytes: int


class _Decomposition:
    """Goes through the slots with the blocks that live, the latest last."""

    def __init__(self, left: Sequence[int], dataflow: Dataflow) -> None:
        profile = dataflow.profile
        self._left = left
        self._forward_ops = profile.forward_ops
        self._unpacked = {slot: [profile.values[i].allocated_bytes for i in ids] for slot, ids in profile.anchors}
        self._sizes = {value.allocated_bytes for value in profile.values if value.role == "made"}
        self._parameters = _parameter_sums([v.allocated_bytes for v in profile.values if v.role == "parameter"])
        self._open = [_Open("before", -1, 0, left[0])] if left and left[0] else []
        self._done: list[Remainder] = []

    def run(self) -> tuple[tuple[Remainder, ...], int]:
        for slot in range(len(self._left) // 2):
            self._visit(slot)
        end = len(self._left)
        persistent_bytes = 0
        for block in self._open:
            if block.kind == "before":
                persistent_bytes += block.size_bytes
            else:
                self._close(block, block.size_bytes, end)
        return tuple(sorted(self._done, key=lambda block: (block.first_point, block.end_point))), persistent_bytes

    def _visit(self, slot: int) -> None:
        entry, body = self._left[2 * slot : 2 * slot + 2]
        following = self._left[2 * slot + 2] if 2 * slot + 2 < len(self._left) else body
        rise, fall = body - entry, body - following
        if rise < 0:
            self._end(-rise, 2 * slot + 1)
            rise = 0
        ended, parts = self._handed_on(slot, rise, fall)
        temporary = max(0, fall - ended) if parts else max(0, min(rise, fall))
        if temporary:
            self._done.append(Remainder("temporary", slot, 2 * slot + 1, 2 * slot + 2, temporary))
        if fall > temporary:
            self._end(fall - temporary, 2 * slot + 2)
        for size_bytes in parts or (rise - temporary,):
            self._begin(slot, 2 * slot + 1, size_bytes)
        self._begin(slot, 2 * slot + 2, -fall)

    def _handed_on(self, slot: int, rise: int, fall: int) -> tuple[int, tuple[int, ...]]:
        """Guess the size of the gradient that an op ends (0: none), and those that it leaves; nothing if unknown."""
        if slot < self._forward_ops or rise <= 0 or fall <= 0:
            return 0, ()
        latest = [block.size_bytes for block in self._open[-_LATEST:] if block.kind == "gradient"]
        latest.reverse()
        for likely in ({*self._unpacked.get(slot, ()), *latest[:1]}, self._sizes):
            for ended in dict.fromkeys([*latest, 0]):
                parts = self._parts(rise - (fall - ended), likely) if ended <= fall <= rise + ended else ()
                if parts:
                    return ended, parts
        return 0, ()

    def _parts(self, size_bytes: int, likely: set[int]) -> tuple[int, ...]:
        """Split what an op leaves into gradients of parameters and one of a value of a likely size."""
        for size in sorted(likely, reverse=True):
            if size == size_bytes:
                return (size,)
            if size_bytes - size in self._parameters:
                return size_bytes - size, size
        return (size_bytes,) if size_bytes in self._parameters else ()

    def _begin(self, slot: int, point: int, size_bytes: int) -> None:
        if size_bytes > 0:
            kind: RemainderKind = "gradient" if slot >= self._forward_ops else "program"
            self._open.append(_Open(kind, slot, point, size_bytes))

    def _end(self, size_bytes: int, point: int) -> None:
        """End blocks, or parts of them, that sum up to these bytes; what existed before the step last."""
        made = [block for block in self._open if block.kind != "before"]
        exact = [block for block in made if block.size_bytes == size_bytes]
        enough = [block for block in made if block.size_bytes > size_bytes]
        chosen = exact[-1:] or enough[-1:] or [*reversed(made), *(b for b in self._open if b.kind == "before")]
        for block in chosen:
            taken = min(size_bytes, block.size_bytes)
            self._close(block, taken, point)
            block.size_bytes -= taken
            size_bytes -= taken
            if not size_bytes:
                break
        self._open = [block for block in self._open if block.size_bytes]

    def _close(self, block: _Open, size_bytes: int, point: int) -> None:
        if block.first_point < point:
            self._done.append(Remainder(block.kind, block.slot, block.first_point, point, size_bytes))

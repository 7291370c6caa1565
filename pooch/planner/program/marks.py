"""Marks cut the step into intervals: the slots at whose op the program checks memory, few enough to solve quickly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy

from ..candidates import Candidates


@dataclass(frozen=True, slots=True)
class Marks:
    """Ascending slots that bound the intervals.

    Interval t lasts from the start of op `slots[t - 1]` (0 for the first) to the start of op `slots[t]`; one more
    interval lasts from the last mark to the end of the step.

    Attributes:
        slots: the marked slots.
        compute_ms: compute time of each interval, in-core (one more than there are marks).
    """

    slots: tuple[int, ...]
    compute_ms: tuple[float, ...]

    @property
    def count(self) -> int:
        """Number of intervals."""
        return len(self.slots) + 1

    def interval_of(self, slot: int) -> int:
        """The interval that contains what happens at the entry of `slot`."""
        return bisect_left(self.slots, slot)


def choose_marks(candidates: Candidates, count: int) -> Marks:
    """Cut each phase into about `count` pieces of equal work (time and bytes), and mark the fullest slot of each.

    A phase with fewer slots than that is marked at each of them.
    """
    end, forward_ops = candidates.dataflow.end, candidates.dataflow.profile.forward_ops
    work = _work(candidates)
    slots: set[int] = set()
    for phase in (range(forward_ops), range(forward_ops, end)):
        slots.update(_fullest_of_pieces(candidates, work, phase, count))
    return make_marks(candidates, sorted(slot for slot in slots if 0 < slot < end))


def make_marks(candidates: Candidates, slots: Sequence[int]) -> Marks:
    """The marks at exactly these slots (ascending)."""
    times_ms = [op.time_ms for op in candidates.dataflow.profile.ops]
    edges = [0, *slots, len(times_ms)]
    return Marks(tuple(slots), tuple(sum(times_ms[begin:end]) for begin, end in pairwise(edges)))


def _work(candidates: Candidates) -> numpy.ndarray:
    """Work of each slot: its share of the time, of the bytes born, and of the bytes first unpacked."""
    ops = candidates.dataflow.profile.ops
    times_ms = numpy.array([op.time_ms for op in ops])
    touched = numpy.zeros(len(ops) + 1)
    for item in candidates.items:
        touched[item.born] += item.memory_bytes
        touched[item.need] += item.memory_bytes  # NEVER is -1: the spare last place
    work: numpy.ndarray = times_ms / max(times_ms.sum(), 1e-9) + touched[:-1] / max(touched.sum(), 1.0)
    return work


def _fullest_of_pieces(candidates: Candidates, work: numpy.ndarray, slots: range, count: int) -> list[int]:
    """The slot with the highest in-core memory in each piece of equal work."""
    if len(slots) <= count:
        return list(slots)
    reached = numpy.cumsum(work[slots.start : slots.stop])
    pieces = numpy.minimum((reached / reached[-1] * count).astype(int), count - 1)
    bodies = candidates.dataflow.in_core_points[1::2][slots.start : slots.stop]
    fullest: dict[int, int] = {}
    for place, piece in enumerate(pieces.tolist()):
        if bodies[place] >= bodies[fullest.get(piece, place)]:
            fullest[piece] = place
    return [slots.start + place for place in fullest.values()]

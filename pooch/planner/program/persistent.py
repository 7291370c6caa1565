"""The part of the program about what outlives the step: who of it is away in which gap between two uses.

A step repeats, so there is a gap across its end as well. Tensors of equal size with gaps between the same intervals are one
class, as layers make them, so the program grows with marks and not with parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy

from ...analysis.persistence import Cycle
from ...ir import Link
from .marks import Marks
from .solver import Expression, Problem, Variable, weighted

SLICE_MARKS = 12  # positions of the optimizer's step at which memory is checked, at most


@dataclass(frozen=True, slots=True)
class TensorGap:
    """A stretch between two uses of a tensor, or before the first or after the last.

    Attributes:
        first: mark from which on the tensor can be away, by its place.
        end: mark at which it is there again; beyond `count` where that is in the next step.
        due: interval at whose end it has to be back; -1: it comes back in the next step, or not at all.
        is_copied_back: whether it comes back.
    """

    first: int
    end: int
    due: int
    is_copied_back: bool


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that the program cannot tell apart.

    Attributes:
        number: of the class.
        count: of its members.
        size_bytes: of each, which is what copies move.
        allocated_bytes: of each.
        is_written: whether leaving takes a copy out.
        gaps: of each.
        born: mark from which on its members exist, by its place.
    """

    number: int
    count: int
    size_bytes: int
    allocated_bytes: int
    is_written: bool
    gaps: tuple[TensorGap, ...]
    born: int

    def __str__(self) -> str:
        return f"p{self.number}x{self.count}" if self.count > 1 else f"p{self.number}"


class PersistentFamilies:
    """Variables away_i_g: how many of class i are away in its gap g; out_i: how many are copied out.

    Args:
        problem: what they become part of.
        cycle: the step with the optimizer's.
        marks: where memory is checked in the step. Those of the optimizer's step are chosen here.
        link: what copies cost.
        unit_bytes: of memory.
    """

    def __init__(self, problem: Problem, cycle: Cycle, marks: Marks, link: Link, unit_bytes: float) -> None:
        self._problem, self._cycle, self._unit_bytes = problem, cycle, unit_bytes
        self.marks = [*marks.slots, *_slice_marks(cycle)]
        self.slice_marks = len(self.marks) - len(marks.slots)
        self.classes = self._make_classes()
        self.away = {
            (i.number, g): problem.new(f"away_{i}_{g}", float(i.count)) for i in self.classes for g in range(len(i.gaps))
        }
        intervals = len(marks.slots) + 1 + self.slice_marks + 1
        self._in = [problem.new(f"moved_in_{t}") for t in range(intervals)]
        self._out = [problem.new(f"moved_out_{t}") for t in range(intervals)]
        self._add_copies(link)

    def _make_classes(self) -> list[TensorClass]:
        cycle = self._cycle
        kinds: Counter[tuple[int, int, bool, tuple[TensorGap, ...], int]] = Counter()
        for number, each in enumerate(cycle.tensors):
            gaps = self._gaps(number)
            born = bisect_left(self.marks, cycle.born(number))
            kinds[each.size_bytes, each.allocated_bytes, each.is_written, gaps, born] += 1
        return [TensorClass(number, count, *facts[:3], facts[3], facts[4]) for number, (facts, count) in enumerate(kinds.items())]

    def _gaps(self, tensor: int) -> tuple[TensorGap, ...]:
        """Return the gaps of a tensor that contain a mark."""
        cycle, uses, count = self._cycle, self._cycle.uses[tensor], len(self.marks)
        is_gradient = cycle.tensors[tensor].kind == "gradient"
        if not uses:
            return (TensorGap(0, count, -1, False),)
        gaps = []
        for use, following in zip(uses, uses[1:], strict=False):
            gaps.append(TensorGap(self._mark_after(use), self._mark_at(following), self._interval(following), True))
        across = count if is_gradient else count + self._mark_at(uses[0])
        gaps.append(TensorGap(self._mark_after(uses[-1]), across, -1, not is_gradient))
        return tuple(gap for gap in gaps if gap.first < gap.end)

    def _mark_after(self, position: int) -> int:
        return bisect_left(self.marks, position + 1)

    def _mark_at(self, position: int) -> int:
        return bisect_left(self.marks, position)

    def _interval(self, position: int) -> int:
        """The interval that contains what happens at the entry of a position; the last of the step ends with it."""
        place = bisect_left(self.marks, position)
        step_marks = len(self.marks) - self.slice_marks
        return place + 1 if position >= len(self._cycle.profile.ops) and place >= step_marks else place

    def _add_copies(self, link: Link) -> None:
        """All that leaves in a gap is back at its end; what was written is copied out once in each step."""
        problem = self._problem
        due: dict[int, dict[Variable, float]] = {}
        everything_in: dict[Variable, float] = {}
        everything_out: dict[Variable, float] = {}
        for i in self.classes:
            out = problem.new(f"out_{i}", float(i.count)) if i.is_written and i.gaps else None
            for g, gap in enumerate(i.gaps):
                away = self.away[i.number, g]
                if out is not None:
                    problem += out >= away, f"copied_out_{i}_{g}"
                if gap.is_copied_back:
                    everything_in[away] = link.in_ms(i.size_bytes)
                if gap.due >= 0:
                    due.setdefault(gap.due, {})[away] = link.in_ms(i.size_bytes)
            if out is not None:
                everything_out[out] = link.out_ms(i.size_bytes)
        before: Expression = 0.0
        for t, moved in enumerate(self._in):
            if t > 0:
                problem += moved >= self._in[t - 1], f"moved_in_stays_{t}"
                problem += self._out[t] >= self._out[t - 1], f"moved_out_stays_{t}"
            before = before + weighted(due[t]) if t in due else before
            if t in due:
                problem += moved >= before, f"moved_in_due_{t}"
        problem += self._in[-1] >= weighted(everything_in), "moved_in_all"
        problem += self._out[-1] >= weighted(everything_out), "moved_out_all"

    def in_ms(self, t: int) -> Expression:
        """Time of copying back in interval t."""
        return _grown(self._in, t)

    def out_ms(self, t: int) -> Expression:
        """Time of copying out in interval t."""
        return _grown(self._out, t)

    def present_bytes(self, mark: int) -> int:
        """What the tensors take at a mark if none is away."""
        return sum(i.count * i.allocated_bytes for i in self.classes if i.born <= mark)

    def absent(self, mark: int) -> dict[Variable, float]:
        """Memory that is not taken at a mark by what is away."""
        count = len(self.marks)
        found = {}
        for i in self.classes:
            for g, gap in enumerate(i.gaps):
                if gap.first <= mark < gap.end or mark + count < gap.end:
                    found[self.away[i.number, g]] = i.allocated_bytes / self._unit_bytes
        return found

    def temporary_bytes(self, mark: int) -> int:
        """What the slice at a mark takes besides; 0 in the step itself."""
        return int(self._cycle.temporary_bytes[self.marks[mark]])

    def resident_points(self, values: dict[str, float]) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): what a solution has there of the tensors at each point."""
        end, count = len(self._cycle.profile.ops), len(self.marks)
        at_marks = [
            self.present_bytes(mark)
            - sum(values.get(variable.name, 0.0) * memory for variable, memory in self.absent(mark).items())
            * self._unit_bytes
            for mark in range(count - self.slice_marks)
        ]
        slots = self.marks[: count - self.slice_marks]
        if not slots:
            return numpy.zeros(2 * end, dtype=numpy.int64)
        nearest = numpy.clip(numpy.searchsorted(slots, numpy.arange(end)), 0, len(slots) - 1)
        points: numpy.ndarray = numpy.repeat(numpy.array(at_marks)[nearest], 2).astype(numpy.int64)
        return points


def _slice_marks(cycle: Cycle) -> list[int]:
    """The slices that need most, one in each stretch of the optimizer's step."""
    end = len(cycle.profile.ops)
    need_bytes = (cycle.need_bytes + cycle.temporary_bytes)[end:]
    pieces = numpy.array_split(numpy.arange(len(need_bytes)), min(SLICE_MARKS, max(1, len(need_bytes))))
    return [end + int(piece[need_bytes[piece].argmax()]) for piece in pieces if len(piece)]


def _grown(cumulative: list[Variable], t: int) -> Expression:
    return weighted({cumulative[t]: 1.0} | ({cumulative[t - 1]: -1.0} if t > 0 else {}))

"""The part of the program about what outlives the step: who of it is away in which gap between two uses.

A step repeats, so there is a gap across its end as well. Tensors of equal size with gaps between the same intervals are
one class, as layers make them, so the program grows with marks and not with parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy

from ...analysis.persistence import Cycle
from ...ir import Profile
from .displaced import displaced
from .marks import Marks
from .solver import Expression, Problem, Variable, weighted

Amounts = dict[int, dict[Variable, float]]

SLICE_MARKS = 12  # positions of the optimizer's step at which memory is checked, at most


@dataclass(frozen=True, slots=True)
class TensorGap:
    """A stretch between two uses of a tensor, or before the first or after the last.

    Attributes:
        first: mark from which on the tensor can be away, by its place.
        end: mark at which it is there again; beyond `count` where that is in the next step.
        due: interval at whose end it has to be back; -1: it does not come back.
        follows_write: whether it begins with a write, so that leaving in it takes a copy out in it.
    """

    first: int
    end: int
    due: int
    follows_write: bool

    @property
    def is_copied_back(self) -> bool:
        """Whether the tensor comes back."""
        return self.due >= 0


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
        profile: of the step, which says what copies cost.
        unit_bytes: of memory.
    """

    def __init__(self, problem: Problem, cycle: Cycle, marks: Marks, profile: Profile, unit_bytes: float) -> None:
        self._problem, self._cycle, self._unit_bytes = problem, cycle, unit_bytes
        self.marks = [*marks.slots, *_slice_marks(cycle)]
        self.slice_marks = len(self.marks) - len(marks.slots)
        self.classes = self._make_classes()
        self.away = {
            (i.number, g): problem.new(f"away_{i}_{g}", float(i.count))
            for i in self.classes
            for g in range(len(i.gaps))
        }
        intervals = len(marks.slots) + 1 + self.slice_marks + 1
        self._in = [problem.new(f"moved_in_{t}") for t in range(intervals)]
        self._out = [problem.new(f"moved_out_{t}") for t in range(intervals)]
        self._there: list[dict[Variable, float]] = []
        self._displaced: dict[Variable, float] = {}
        self._add_copies(profile)

    def _make_classes(self) -> list[TensorClass]:
        cycle = self._cycle
        kinds: Counter[tuple[int, int, bool, tuple[TensorGap, ...], int]] = Counter()
        for number, each in enumerate(cycle.tensors):
            gaps = self._gaps(number)
            born = bisect_left(self.marks, cycle.born(number))
            kinds[each.size_bytes, each.allocated_bytes, each.is_written, gaps, born] += 1
        return [
            TensorClass(number, count, *facts[:3], facts[3], facts[4])
            for number, (facts, count) in enumerate(kinds.items())
        ]

    def _gaps(self, tensor: int) -> tuple[TensorGap, ...]:
        """Return the gaps of a tensor that contain a mark."""
        each, uses, count = self._cycle.tensors[tensor], self._cycle.uses[tensor], len(self.marks)
        if not uses:
            return (TensorGap(0, count, -1, False),)
        is_gradient = each.kind == "gradient"
        gaps: list[TensorGap] = []
        for use, following in pairwise(uses):
            first, end = self._mark_after(use), self._mark_at(following)
            gaps.append(TensorGap(first, end, self._interval(following), is_gradient and not gaps))
        across = count if is_gradient else count + self._mark_at(uses[0])
        due = -1 if is_gradient else self._interval(uses[0])
        gaps.append(TensorGap(self._mark_after(uses[-1]), across, due, each.is_written and not is_gradient))
        return tuple(gap for gap in gaps if gap.first < gap.end)

    def _mark_after(self, position: int) -> int:
        return bisect_left(self.marks, position + 1)

    def _mark_at(self, position: int) -> int:
        return bisect_left(self.marks, position)

    def _interval(self, position: int) -> int:
        """The interval that contains what happens at the entry of a position; the last of the step ends with it."""
        place = bisect_left(self.marks, position)
        return place + 1 if position >= len(self._cycle.profile.ops) else place

    def _add_copies(self, profile: Profile) -> None:
        """All that leaves in a gap is back at its end; what was written is copied out once in each step.

        Variables early_t: copies back, in ms, that are made by mark t for uses after it: what they bring is there.
        late_t: copies out that are to be made by mark t, before their tensors can leave. Both go across the end of the
            step.
        """
        ending: Amounts = {}  # by interval: copies back that have to be made by its end
        beginning: Amounts = {}  # by mark: copies out of what was written, and leaves right after that
        everything_out: dict[Variable, float] = {}
        link, (by_out, by_in) = profile.link, displaced(profile)
        for i in self.classes:
            out_ms, in_ms = link.out_ms(i.size_bytes), link.in_ms(i.size_bytes)
            out = self._problem.new(f"out_{i}", float(i.count)) if i.is_written and i.gaps else None
            for g, gap in enumerate(i.gaps):
                away = self.away[i.number, g]
                if out is not None:
                    self._problem += out >= away, f"copied_out_{i}_{g}"
                if gap.is_copied_back:
                    ending.setdefault(gap.due, {})[away] = in_ms
                    self._displaced[away] = by_in.by(in_ms)
                if gap.follows_write:
                    beginning.setdefault(gap.first % len(self.marks), {})[away] = out_ms
            if out is not None:
                everything_out[out] = out_ms
                self._displaced[out] = by_out.by(out_ms)
        early = self._balance("early", self._in, ending, sign=-1.0)
        late = self._balance("late", self._out, beginning, sign=1.0)
        self._problem += self._out[-1] >= weighted(everything_out), "moved_out_all"
        sizes = [(i.size_bytes, i.allocated_bytes / self._unit_bytes) for i in self.classes]
        early_unit = min((memory / link.in_ms(size_bytes) for size_bytes, memory in sizes), default=0.0)
        late_unit = min((memory / link.out_ms(size_bytes) for size_bytes, memory in sizes), default=0.0)
        self._there = [{early[t]: -early_unit, late[t]: -late_unit} for t in range(len(self.marks))]

    def _balance(self, name: str, moved: list[Variable], amounts: Amounts, *, sign: float) -> list[Variable]:
        """Variables for what is made but not due (sign -1), or due but not made (sign 1), by each mark.

        The intervals are those of the marks, and what the step ends with it has begun with. Early copies are at least
        what
        is made less what is due: all copies back are for some gap. Late ones are at least what is due less what is
        made, which may be for something else.
        """
        first = self._problem.new(f"{name}_first")
        found = []
        before: Variable = first
        intervals = [*range(len(self.marks) + 2)]
        for t in intervals:
            mark = self._mark_of(t)
            now = self._problem.new(f"{name}_{t}") if t < intervals[-1] else first
            grown = _grown(moved, t) if sign < 0 else -1.0 * _grown(moved, t)
            due = weighted(amounts.get(t if sign < 0 else mark, {})) if (sign < 0 or mark >= 0) else 0.0
            change = grown + sign * due if sign < 0 else grown + due
            if sign < 0:
                self._problem += now == before + change, f"{name}_is_{t}"
            else:
                self._problem += now >= before + change, f"{name}_is_{t}"
            if mark >= 0:
                found.append(now)
            before = now
        return found

    def _mark_of(self, interval: int) -> int:
        """The mark at which an interval ends; -1 for the two that end with the step and with the optimizer's."""
        step_marks = len(self.marks) - self.slice_marks
        if interval == step_marks or interval == len(self.marks) + 1:
            return -1
        return interval if interval < step_marks else interval - 1

    def in_ms(self, t: int) -> Expression:
        """Time of copying back in interval t."""
        return _grown(self._in, t)

    def out_ms(self, t: int) -> Expression:
        """Time of copying out in interval t."""
        return _grown(self._out, t)

    def displaced_ms(self) -> Expression:
        """Compute that all copies displace."""
        return weighted(self._displaced)

    def present_bytes(self, mark: int) -> int:
        """What the tensors take at a mark if none is away."""
        return sum(i.count * i.allocated_bytes for i in self.classes if i.born <= mark)

    def absent(self, mark: int) -> dict[Variable, float]:
        """Memory that is not taken at a mark by what is away."""
        count = len(self.marks)
        found = dict(self._there[mark])
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

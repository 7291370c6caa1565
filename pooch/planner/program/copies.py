"""The part of the program about transfers: summed up over values of like size, because only their sums matter.

Which value of a class is copied first does not matter to the sums: all that leave after their last use stay away to
the end of the forward pass, and coming back in order of need is never worse. So one variable per interval and class
stands for all values. What leaves in a gap of the forward pass and comes back counts as freed while it is away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from pooch.planner.candidates import NEVER, Candidates
from pooch.planner.program.classes import ActivationClass
from pooch.planner.program.marks import Marks
from pooch.planner.program.residency import Residency
from pooch.planner.program.solver import LinearProgram, Terms, Variable

SHORTEST_MS = 1e-3
CLASSES = 4  # of bytes per ms of copying; one is enough where the latency is small


class _CopyClass:
    """Values that give about the same number of bytes for a ms of copying.

    Variables, cumulative until the end of interval t: `out`, `back`: copying, in `out_unit_ms` and `in_unit_ms`;
    `freed`, `taken`: units of memory (in the forward pass `freed` sinks again where a gap ends).
    """

    def __init__(self, program: LinearProgram, items: Sequence[ActivationClass], count: int, unit_bytes: float) -> None:
        self.items = items
        self.out_unit_ms = _unit_ms(max(item.out_ms for item in items))
        self.in_unit_ms = _unit_ms(max(item.in_ms for item in items))
        per_out = (item.memory_bytes / unit_bytes / max(item.out_ms, 1e-9) for item in items)
        per_in = (item.memory_bytes / unit_bytes / max(item.in_ms, 1e-9) for item in items)
        self.most_freed = self.out_unit_ms * max(per_out)
        self.least_taken = self.in_unit_ms * min(per_in)
        self.out: list[Variable] = [program.variable() for _ in range(count)]
        self.back: list[Variable] = [program.variable() for _ in range(count)]
        self.freed: list[Variable] = [program.variable() for _ in range(count)]
        self.taken: list[Variable] = [program.variable() for _ in range(count)]


class CopyStreams:
    """Copies out and back, their room, and their effect on the duration of intervals.

    Args:
        program: to add to. candidates, items: all activations, and the classes of those in the program.
        marks: the intervals.
        swap: the choice variables. residency: tells which swapped values a replay reads early.
        unit_bytes: of memory in the program.
    """

    def __init__(
        self,
        program: LinearProgram,
        candidates: Candidates,
        items: tuple[ActivationClass, ...],
        marks: Marks,
        swap: Mapping[int, Variable],
        residency: Residency,
        unit_bytes: float,
    ) -> None:
        self.unit_bytes = unit_bytes
        self.program, self.marks, self.swap, self.residency = program, marks, swap, residency
        self.link = candidates.dataflow.profile.link
        self.forward_ops = candidates.dataflow.profile.forward_ops
        swappable = [item for item in items if item.value in swap]
        self.classes = [_CopyClass(program, group, marks.count, unit_bytes) for group in _by_density(swappable)]
        for group in self.classes:
            self._add_monotone(group)
            self._add_out(group)
            self._add_back(group)

    def _add_monotone(self, group: _CopyClass) -> None:
        """Cumulative times never shrink."""
        for cumulative in (group.out, group.back):
            for earlier, later in pairwise(cumulative):
                self.program.at_most({earlier: 1.0, later: -1.0}, 0.0)

    def _add_out(self, group: _CopyClass) -> None:
        """Only what was made is copied; only what was copied and can be away is freed; in the end all is copied."""
        interval_of = self.marks.interval_of
        made = self._running_sum(
            group.items, lambda i: interval_of(i.born + 1), lambda i: i.out_ms / group.out_unit_ms, -1.0
        )
        released = self._running_sum(
            group.items, lambda i: interval_of(i.first_away), lambda i: i.memory_bytes / self.unit_bytes, -1.0
        )
        for t in range(self.marks.count):
            self.program.at_most({group.out[t]: 1.0, made[t]: -1.0}, 0.0)
            self.program.at_most({group.freed[t]: 1.0, released[t]: -1.0}, 0.0)
            self.program.at_most({group.freed[t]: 1.0, group.out[t]: -group.most_freed}, 0.0)
        all_out = {self.swap[item.value]: item.out_ms / group.out_unit_ms for item in group.items}
        self.program.at_most({group.out[-1]: -1.0} | all_out, 0.0)
        if any(item.gaps for item in group.items):
            self._add_gaps(group)

    def _add_gaps(self, group: _CopyClass) -> None:
        """At a mark of the forward pass, only what nothing looks at there is away."""
        interval_of = self.marks.interval_of
        changes: dict[int, Terms] = {}
        for item in group.items:
            bytes_of, swap = item.memory_bytes / self.unit_bytes, self.swap[item.value]
            starts = [interval_of(slot) for slot in (*(gap.first_slot for gap in item.gaps), item.release + 1)]
            for t, sign in [(t, -1.0) for t in starts] + [(interval_of(gap.need_slot), 1.0) for gap in item.gaps]:
                of_interval = changes.setdefault(t, {})
                of_interval[swap] = of_interval.get(swap, 0.0) + sign * bytes_of
        able: Variable | None = None  # bytes of swapped values that can be away at mark t
        for t in range(sum(slot < self.forward_ops for slot in self.marks.slots)):
            before, able = able, self.program.variable()
            chain: Terms = {able: 1.0} | changes.get(t, {})
            if before is not None:
                chain[before] = -1.0
            self.program.at_most(chain, 0.0)
            self.program.at_most({group.freed[t]: 1.0, group.taken[t]: -1.0, able: -1.0}, 0.0)

    def _add_back(self, group: _CopyClass) -> None:
        """What was read by then is back by then and takes room, and so does what was copied ahead of need."""
        unpacked = [item for item in group.items if item.need != NEVER]
        own = self.residency.own
        due = self._running_sum(unpacked, lambda i: own[i.value], lambda i: i.in_ms / group.in_unit_ms, 1.0)
        room = self._running_sum(unpacked, lambda i: own[i.value], lambda i: i.memory_bytes / self.unit_bytes, 1.0)
        for t in range(self.marks.count):
            time_terms: Terms = {group.back[t]: -1.0, due[t]: 1.0}
            room_terms: Terms = {group.taken[t]: -1.0, room[t]: 1.0}
            for item in group.items:
                early = self.residency.fetched.get((item.value, t))
                if early is not None:
                    time_terms[early] = item.in_ms / group.in_unit_ms
                    room_terms[early] = item.memory_bytes / self.unit_bytes
            self.program.at_most(time_terms, 0.0)
            self.program.at_most(room_terms, 0.0)
            self.program.at_most({group.back[t]: group.least_taken, group.taken[t]: -1.0}, 0.0)

    def _running_sum(
        self,
        items: Iterable[ActivationClass],
        interval: Callable[[ActivationClass], int],
        amount: Callable[[ActivationClass], float],
        sign: float,
    ) -> list[Variable]:
        """For each interval a variable for the amount swapped of the items that count from then on.

        The variables are chained, so that rows stay short.

        Args:
            sign: 1.0: the variable is at least the amount; -1.0: at most.
        """
        starting: dict[int, Terms] = {}
        for item in items:
            starting.setdefault(interval(item), {})[self.swap[item.value]] = sign * amount(item)
        sums: list[Variable] = []
        for t in range(self.marks.count):
            sums.append(self.program.variable())
            terms = {sums[t]: -sign} | starting.get(t, {})
            if t > 0:
                terms[sums[t - 1]] = sign
            self.program.at_most(terms, 0.0)
        return sums

    def away(self, t: int) -> Terms:
        """Minus the memory freed so far, plus the room taken again so far."""
        terms: Terms = {}
        for group in self.classes:
            terms[group.freed[t]], terms[group.taken[t]] = -1.0, 1.0
        return terms

    def slowdown(self, t: int) -> Terms:
        """Compute time that copies of interval t displace, at the very least.

        Compute advances at rate 1 / (1 + share) while a copy runs, so a ms of copying displaces share / (1 + share);
        two copies at once displace less than the sum of both alone, so the shares of both streams stand below.
        """
        both = self.link.out_compute_share + self.link.in_compute_share
        return self._sum(t, self.link.out_compute_share / (1 + both), self.link.in_compute_share / (1 + both))

    def busy(self, t: int) -> Iterator[Terms]:
        """Busy time of each copy stream in interval t; of the one that they share, where the link is half duplex."""
        streams = ((1.0, 0.0), (0.0, 1.0)) if self.link.full_duplex else ((1.0, 1.0),)
        for out_factor, in_factor in streams:
            terms = self._sum(t, out_factor, in_factor)
            if terms:
                yield terms

    def _sum(self, t: int, out_factor: float, in_factor: float) -> Terms:
        terms: Terms = {}
        for group in self.classes:
            of_out = (group.out, out_factor * group.out_unit_ms)
            for cumulative, factor in (of_out, (group.back, in_factor * group.in_unit_ms)):
                if factor:
                    terms[cumulative[t]] = factor
                    if t > 0:
                        terms[cumulative[t - 1]] = -factor
        return terms


def _unit_ms(longest_ms: float) -> float:
    """A ms, but for copies so short that a solver would take them for nothing beside its tolerance of 1e-7."""
    return 1.0 if longest_ms >= SHORTEST_MS or longest_ms <= 0 else longest_ms


def _by_density(items: Sequence[ActivationClass]) -> list[list[ActivationClass]]:
    """At most `CLASSES` groups of values that give like numbers of bytes for a ms of copying."""
    if not items:
        return []
    density = {item.value: math.log(item.memory_bytes / max(item.copy_ms, 1e-9) + 1e-9) for item in items}
    low, high = min(density.values()), max(density.values())
    width = max((high - low) / CLASSES, 0.05)
    groups: dict[int, list[ActivationClass]] = {}
    for item in items:
        groups.setdefault(min(int((density[item.value] - low) / width), CLASSES - 1), []).append(item)
    return [groups[key] for key in sorted(groups)]

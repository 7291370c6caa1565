"""The part of the program about transfers: summed up over values of like size, because only their sums matter.

Which value of a class is copied first does not matter to the sums: all that leave stay away to the end of the forward
pass, and coming back in order of need is never worse. So one variable per interval and class stands for all values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pooch.planner.candidates import Candidate, Candidates
from pooch.planner.marks import Marks
from pooch.planner.residency import Residency
from pooch.planner.solver import LinearProgram, Terms, Variable

CLASSES = 4  # of bytes per ms of copying; one is enough where the latency is small


class _CopyClass:
    """Values that give about the same number of bytes for a ms of copying.

    Variables (cumulative until the end of interval t): `out`, `back` in ms of copying; `freed`, `taken` in bytes.
    """

    def __init__(self, program: LinearProgram, items: Sequence[Candidate], count: int) -> None:
        self.items = items
        self.most_freed_per_ms = max(item.memory_bytes / max(item.out_ms, 1e-9) for item in items)
        self.least_taken_per_ms = min(item.memory_bytes / max(item.in_ms, 1e-9) for item in items)
        self.out: list[Variable] = [program.variable() for _ in range(count)]
        self.back: list[Variable] = [program.variable() for _ in range(count)]
        self.freed: list[Variable] = [program.variable() for _ in range(count)]
        self.taken: list[Variable] = [program.variable() for _ in range(count)]


class CopyStreams:
    """Copies out and back, their room, and their effect on the duration of intervals.

    Args:
        program: to add to. candidates, items: all activations, and those in the program. marks: the intervals.
        swap: the choice variables. residency: tells which swapped values a replay reads early.
    """

    def __init__(
        self,
        program: LinearProgram,
        candidates: Candidates,
        items: tuple[Candidate, ...],
        marks: Marks,
        swap: Mapping[int, Variable],
        residency: Residency,
    ) -> None:
        self.program, self.marks, self.swap, self.residency = program, marks, swap, residency
        self.link = candidates.dataflow.profile.link
        swappable = [item for item in items if item.value in swap]
        self.classes = [_CopyClass(program, group, marks.count) for group in _by_density(swappable)]
        for group in self.classes:
            for t in range(marks.count):
                self._add_monotone(group, t)
                self._add_out(group, t)
                self._add_back(group, t)

    def _add_monotone(self, group: _CopyClass, t: int) -> None:
        """Cumulative times never shrink."""
        for cumulative in (group.out, group.back) if t > 0 else ():
            self.program.at_most({cumulative[t - 1]: 1.0, cumulative[t]: -1.0}, 0.0)

    def _add_out(self, group: _CopyClass, t: int) -> None:
        """Only what was made is copied; only what was copied and released is freed; in the end all is copied."""
        made: Terms = {group.out[t]: 1.0}
        released: Terms = {group.freed[t]: 1.0}
        for item in group.items:
            if self.marks.interval_of(item.born + 1) <= t:
                made[self.swap[item.value]] = -item.out_ms
            if self.marks.interval_of(item.release + 1) <= t:
                released[self.swap[item.value]] = -float(item.memory_bytes)
        self.program.at_most(made, 0.0)
        self._at_most_bytes(released)
        self._at_most_bytes({group.freed[t]: 1.0, group.out[t]: -group.most_freed_per_ms})
        if t == self.marks.count - 1:
            self.program.at_most(
                {group.out[t]: -1.0} | {self.swap[item.value]: item.out_ms for item in group.items}, 0.0
            )

    def _add_back(self, group: _CopyClass, t: int) -> None:
        """What was read by then is back by then, takes room, and so does what was copied ahead of need."""
        time_terms: Terms = {group.back[t]: -1.0}
        room_terms: Terms = {group.taken[t]: -1.0}
        for item in group.items:
            variable = self.residency.fetched_by(item, t)
            if variable is not None:
                time_terms[variable] = item.in_ms
                room_terms[variable] = float(item.memory_bytes)
        if len(time_terms) > 1:
            self.program.at_most(time_terms, 0.0)
            self._at_most_bytes(room_terms)
        self._at_most_bytes({group.back[t]: group.least_taken_per_ms, group.taken[t]: -1.0})

    def _at_most_bytes(self, terms: Terms) -> None:
        """Bytes on the left are at most zero; scaled for the solver."""
        scale = max(abs(factor) for factor in terms.values())
        self.program.at_most({variable: factor / scale for variable, factor in terms.items()}, 0.0)

    def away(self, t: int) -> Terms:
        """Minus the bytes freed so far, plus the room taken again so far."""
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
            for cumulative, factor in ((group.out, out_factor), (group.back, in_factor)):
                if factor:
                    terms[cumulative[t]] = factor
                    if t > 0:
                        terms[cumulative[t - 1]] = -factor
        return terms


def _by_density(items: Sequence[Candidate]) -> list[list[Candidate]]:
    """At most `CLASSES` groups of values that give like numbers of bytes for a ms of copying."""
    if not items:
        return []
    density = {item.value: math.log(item.memory_bytes / max(item.copy_ms, 1e-9) + 1e-9) for item in items}
    low, high = min(density.values()), max(density.values())
    width = max((high - low) / CLASSES, 0.05)
    groups: dict[int, list[Candidate]] = {}
    for item in items:
        groups.setdefault(min(int((density[item.value] - low) / width), CLASSES - 1), []).append(item)
    return [groups[key] for key in sorted(groups)]

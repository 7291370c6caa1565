"""The part of the program about transfers: summed up over values of like size, because only their sums matter.

Which value is copied first does not matter to the sums: all that leave after their last use stay away to the end of the
forward pass, and coming back in order of need is never worse. So one variable per interval stands for all values of a
*rate class*: those that give about the same number of bytes for a ms of copying. What leaves in a gap of the forward
pass and comes back counts as freed while it is away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ..candidates import NEVER, Candidates
from .classes import ActivationClass
from .displaced import displaced
from .marks import Marks
from .residency import Residency
from .solver import Expression, Problem, Variable, weighted

SHORTEST_MS = 1e-3
RATE_CLASSES = 4  # one is enough where the latency is small
Amounts = dict[int, dict[Variable, float]]  # by interval: choice variables and what each adds there


class RateClass:
    """Copies of the values of one rate class: how much by the end of each interval.

    Variables, cumulative until the end of interval t: copied_out_c_t and copied_in_c_t in `out_unit_ms` and
    `in_unit_ms`; freed_c_t and taken_c_t in units of memory (in the forward pass, freed falls again where a gap ends).
    """

    def __init__(
        self,
        problem: Problem,
        name: str,
        members: Sequence[ActivationClass],
        swap: Mapping[int, Variable],
        residency: Residency,
        forward_marks: int,
        unit_bytes: float,
    ) -> None:
        self.problem, self.name, self.members, self.swap, self.residency = problem, name, members, swap, residency
        self.marks: Marks = residency.marks
        self.forward_marks = forward_marks
        self.out_unit_ms = _unit_ms(max(i.first.out_ms for i in members))
        self.in_unit_ms = _unit_ms(max(i.first.in_ms for i in members))
        self.out = {i.id: i.first.out_ms / self.out_unit_ms for i in members}  # what one copy adds
        self.into = {i.id: i.first.in_ms / self.in_unit_ms for i in members}
        self.memory = {i.id: i.first.memory_bytes / unit_bytes for i in members}
        self.copied_out, self.copied_in = self._family("copied_out"), self._family("copied_in")
        self.freed, self.taken = self._family("freed"), self._family("taken")
        for cumulative in (self.copied_out, self.copied_in):
            for before, after in pairwise(cumulative):
                problem += after >= before, f"{after.name}_stays"
        self._add_out()
        if any(i.first.gaps for i in members):
            self._add_gaps()
        self._add_in()

    def _add_out(self) -> None:
        """Only what was made is copied; only what was copied and can be away is freed; in the end all is copied."""
        interval_of = self.marks.interval_of
        made = self._sums("made", self._amounts((i, interval_of(i.first.born + 1), self.out) for i in self.members))
        released = self._sums(
            "released", self._amounts((i, interval_of(i.first.first_away), self.memory) for i in self.members)
        )
        most_freed = self.out_unit_ms * max(self.memory[i.id] / max(i.first.out_ms, 1e-9) for i in self.members)
        for t, (freed, copied_out) in enumerate(zip(self.freed, self.copied_out, strict=True)):
            self.problem += copied_out <= made[t], f"copied_out_made_{self.name}_{t}"
            self.problem += freed <= released[t], f"freed_released_{self.name}_{t}"
            self.problem += freed <= most_freed * copied_out, f"freed_copied_{self.name}_{t}"
        everything = weighted({self.swap[i.id]: self.out[i.id] for i in self.members})
        self.problem += self.copied_out[-1] >= everything, f"copied_out_all_{self.name}"

    def _add_gaps(self) -> None:
        """At a mark of the forward pass, only what nothing looks at there is away."""
        interval_of = self.marks.interval_of
        changes: Amounts = {}
        for i in self.members:
            starts = [*(gap.first_slot for gap in i.first.gaps), i.first.release + 1]
            ends = [gap.need_slot for gap in i.first.gaps]
            for slots, change in ((starts, self.memory[i.id]), (ends, -self.memory[i.id])):
                for slot in slots:
                    amounts = changes.setdefault(interval_of(slot), {})
                    amounts[self.swap[i.id]] = amounts.get(self.swap[i.id], 0.0) + change
        for t, idle in enumerate(self._sums("idle", changes, count=self.forward_marks)):
            self.problem += self.freed[t] - self.taken[t] <= idle, f"away_idle_{self.name}_{t}"

    def _add_in(self) -> None:
        """What was read by then is back by then and takes room, and so does what was copied ahead of need."""
        unpacked = [(i, self.residency.due[i.id]) for i in self.members if i.first.need != NEVER]
        due_ms = self._sums("due_ms", self._amounts((i, t, self.into) for i, t in unpacked), at_least=True)
        due = self._sums("due", self._amounts((i, t, self.memory) for i, t in unpacked), at_least=True)
        least_taken = self.in_unit_ms * min(self.memory[i.id] / max(i.first.in_ms, 1e-9) for i in self.members)
        for t, (taken, copied_in) in enumerate(zip(self.taken, self.copied_in, strict=True)):
            fetched = [(i.id, self.residency.fetched.get((i.id, t))) for i in self.members]
            early_ms = weighted({variable: self.into[i] for i, variable in fetched if variable is not None})
            early = weighted({variable: self.memory[i] for i, variable in fetched if variable is not None})
            self.problem += copied_in >= early_ms + due_ms[t], f"copied_in_due_{self.name}_{t}"
            self.problem += taken >= early + due[t], f"taken_due_{self.name}_{t}"
            self.problem += taken >= least_taken * copied_in, f"taken_copied_{self.name}_{t}"

    def _family(self, name: str, count: int | None = None) -> list[Variable]:
        """One variable per interval."""
        intervals = range(self.marks.count if count is None else count)
        return [self.problem.new(f"{name}_{self.name}_{t}") for t in intervals]

    def _amounts(self, parts: Iterable[tuple[ActivationClass, int, Mapping[int, float]]]) -> Amounts:
        """What swapping each class adds in its interval."""
        amounts: Amounts = {}
        for i, t, amount in parts:
            amounts.setdefault(t, {})[self.swap[i.id]] = amount[i.id]
        return amounts

    def _sums(self, name: str, amounts: Amounts, *, at_least: bool = False, count: int | None = None) -> list[Variable]:
        """For each interval a variable for the amounts up to it, chained so that rows stay short.

        Each is at most that sum, or `at_least` that sum: whichever the rows that use it need.
        """
        sums = self._family(name, count)
        for t, variable in enumerate(sums):
            total = weighted(amounts.get(t, {}))
            total += sums[t - 1] if t > 0 else 0.0
            self.problem += variable >= total if at_least else variable <= total, f"{variable.name}_sum"
        return sums


class CopyStreams:
    """Copies out and back of all rate classes: their room, and what they do to the duration of intervals."""

    def __init__(
        self,
        problem: Problem,
        candidates: Candidates,
        swap: Mapping[int, Variable],
        residency: Residency,
        unit_bytes: float,
    ) -> None:
        forward_ops = candidates.dataflow.profile.forward_ops
        forward_marks = sum(slot < forward_ops for slot in residency.marks.slots)
        self._swap = swap
        self._by_out, self._by_in = displaced(candidates.dataflow.profile)
        groups = _by_rate([i for i in residency.classes if i.id in swap])
        self.rate_classes = [
            RateClass(problem, f"c{number}", members, swap, residency, forward_marks, unit_bytes)
            for number, members in enumerate(groups)
        ]
        out = [self._by_out.least_share(i.first.out_ms for i in c.members) for c in self.rate_classes]
        back = [self._by_in.least_share(i.first.in_ms for i in c.members) for c in self.rate_classes]
        self._displacing = [
            *((c.copied_out, c.out_unit_ms * share) for c, share in zip(self.rate_classes, out, strict=True)),
            *((c.copied_in, c.in_unit_ms * share) for c, share in zip(self.rate_classes, back, strict=True)),
        ]
        self._latest_ms = self._by_out.latency_ms * max(out, default=0.0)
        self._latest_ms += self._by_in.latency_ms * max(back, default=0.0)

    def away(self, t: int) -> dict[Variable, float]:
        """Memory that swaps have freed by mark t and not taken again."""
        return {c.freed[t]: 1.0 for c in self.rate_classes} | {c.taken[t]: -1.0 for c in self.rate_classes}

    def out_ms(self, t: int) -> Expression:
        """Time of copying out in interval t."""
        return _within(t, [(c.copied_out, c.out_unit_ms) for c in self.rate_classes])

    def in_ms(self, t: int) -> Expression:
        """Time of copying in in interval t."""
        return _within(t, [(c.copied_in, c.in_unit_ms) for c in self.rate_classes])

    def displaced_ms(self) -> Expression:
        """Compute that all copies displace."""
        members = [i for c in self.rate_classes for i in c.members]
        by_in = {i.id: self._by_in.by(i.first.in_ms) if i.first.need != NEVER else 0.0 for i in members}
        return weighted({self._swap[i.id]: self._by_out.by(i.first.out_ms) + by_in[i.id] for i in members})

    def displaced_within_ms(self, t: int) -> Expression:
        """Compute that the copies of interval t displace there."""
        return _within(t, self._displacing) - self._latest_ms


def _within(t: int, streams: Iterable[tuple[list[Variable], float]]) -> Expression:
    """What cumulative sums grow by in interval t."""
    terms: dict[Variable, float] = {}
    for cumulative, unit_ms in streams:
        terms[cumulative[t]] = unit_ms
        if t > 0:
            terms[cumulative[t - 1]] = -unit_ms
    return weighted(terms)


def _unit_ms(longest_ms: float) -> float:
    """A ms, but for copies so short that a solver would take them for nothing beside its tolerance of 1e-7."""
    return 1.0 if longest_ms >= SHORTEST_MS or longest_ms <= 0 else longest_ms


def _by_rate(classes: Sequence[ActivationClass]) -> list[list[ActivationClass]]:
    """At most `RATE_CLASSES` groups of values that give like numbers of bytes for a ms of copying."""
    if not classes:
        return []
    rate = {i.id: math.log(i.first.memory_bytes / max(i.first.copy_ms, 1e-9) + 1e-9) for i in classes}
    low, high = min(rate.values()), max(rate.values())
    width = max((high - low) / RATE_CLASSES, 0.05)
    groups: dict[int, list[ActivationClass]] = {}
    for i in classes:
        groups.setdefault(min(int((rate[i.id] - low) / width), RATE_CLASSES - 1), []).append(i)
    return [groups[key] for key in sorted(groups)]

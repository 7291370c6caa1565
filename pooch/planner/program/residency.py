"""The part of the program about the backward pass: when recomputed values, and what replays read, are back."""

from __future__ import annotations

from collections.abc import Mapping

from ..candidates import NEVER
from .classes import ActivationClass
from .marks import Marks
from .solver import Problem, Variable, weighted

WINDOW = 16  # intervals before its first unpack in which a value is followed as a source of earlier replays


class Residency:
    """Variables restored_i_t: recomputed value i was replayed by mark t; fetched_i_t: a replay read swapped i by then.

    Both exist in the window in which they are not known: from the first interval in which a replay could read the value
    to the interval of its first unpack. More than `WINDOW` intervals before that they are left out, and their rows with
    them, which can only lower the optimum.
    """

    def __init__(
        self,
        problem: Problem,
        classes: tuple[ActivationClass, ...],
        marks: Marks,
        swap: Mapping[int, Variable],
        recompute: Mapping[int, Variable],
    ) -> None:
        self.classes, self.marks, self.swap, self.recompute = classes, marks, swap, recompute
        self.class_of = {member.value: group for group in classes for member in group.members}
        # The interval of the first unpack (of the death, for values that are not unpacked).
        self.due = {i.id: marks.interval_of(i.first.need if i.first.need != NEVER else i.first.death) for i in classes}
        self.first = self._first_wanted()
        self.restored = self._family(problem, "restored", recompute)
        self.fetched = self._family(problem, "fetched", swap)
        self._add_sources(problem)

    def restored_at_least(self, group: ActivationClass, t: int) -> Variable | None:
        """How many of a class were replayed by mark t, from below; None for zero."""
        if t < self.due[group.id]:
            return self.restored.get((group.id, t))
        return self.recompute.get(group.id) if group.first.need != NEVER else None

    def restored_at_most(self, group: ActivationClass, t: int) -> Variable | None:
        """How many of a class were replayed by mark t, from above; None for zero."""
        return self.restored.get((group.id, t), self.recompute.get(group.id))

    def _first_wanted(self) -> dict[int, int]:
        """The first interval in which a replay may want a value: a source is wanted as soon as what it serves."""
        wanted: dict[int, int] = {}
        firsts = dict(self.due)
        for member in sorted((m for group in self.classes for m in group.members), key=lambda m: -m.value):
            group = self.class_of[member.value]
            due = self.due[group.id]
            first = max(min(wanted.get(member.value, due), due), due - WINDOW)
            firsts[group.id] = min(first, firsts[group.id])
            if group.id in self.recompute:
                for source in member.sources:
                    wanted[source] = min(wanted.get(source, self.marks.count), first)
        return firsts

    def _family(self, problem: Problem, name: str, choice: Mapping[int, Variable]) -> dict[tuple[int, int], Variable]:
        """Rows name_stays: v_i_t <= v_i_(t + 1) <= choice_i, in the window of each class that has the choice."""
        family: dict[tuple[int, int], Variable] = {}
        for i in self.classes:
            if i.id not in choice:
                continue
            following = choice[i.id]
            for t in reversed(range(self.first[i.id], self.due[i.id])):
                family[i.id, t] = problem.new(f"{name}_{i}_{t}", float(i.count))
                problem += family[i.id, t] <= following, f"{name}_stays_{i}_{t}"
                following = family[i.id, t]
        return family

    def _add_sources(self, problem: Problem) -> None:
        """Rows sources: restored_j_t <= keep_i + restored_i_t + fetched_i_t for each source i of j.

        When j had been replayed its source was there, for one of these reasons, and it stays. Of classes, these are
        the sums over their members; a source of several members counts for each of them.
        """
        for j in self.classes:
            if j.id in self.recompute:
                for place, sources in enumerate(zip(*(member.sources for member in j.members), strict=True)):
                    if all(source in self.class_of for source in sources):
                        self._add_source(problem, j, place, self._serving(sources))

    def _serving(self, sources: tuple[int, ...]) -> dict[int, int]:
        """By class of these sources: how many replays one member of it serves at most."""
        serving: dict[int, int] = {}
        for source in dict.fromkeys(sources):
            i = self.class_of[source].id
            serving[i] = max(serving.get(i, 0), sources.count(source))
        return serving

    def _add_source(self, problem: Problem, j: ActivationClass, place: int, serving: Mapping[int, int]) -> None:
        last = self.due[j.id] if j.first.need != NEVER else self.due[j.id] - 1
        last = min(last, *(self.due[i] - 1 for i in serving))
        first = max(self.first[j.id], *(self.first[i] for i in serving))
        most = sum(times * self.class_of[i].count for i, times in serving.items())
        for t in range(first, last + 1):
            terms: dict[Variable, float] = {self.restored.get((j.id, t), self.recompute[j.id]): 1.0}
            for i, times in serving.items():
                for choice, back in ((self.swap, self.fetched), (self.recompute, self.restored)):
                    if i in choice:  # keep_i is what is neither swapped nor recomputed
                        terms[choice[i]] = terms.get(choice[i], 0.0) + times
                        terms[back[i, t]] = terms.get(back[i, t], 0.0) - times
            if len(terms) > 1:
                problem += weighted(terms) <= most, f"sources_{j}_{place}_{t}"

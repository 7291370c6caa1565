"""The part of the program about the backward pass: when recomputed values, and what replays read, are back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pooch.planner.candidates import NEVER, Candidates
from pooch.planner.program.classes import ActivationClass
from pooch.planner.program.marks import Marks
from pooch.planner.program.solver import LinearProgram, Terms, Variable

WINDOW = 16  # intervals before its first unpack in which a value is followed as a source of earlier replays


@dataclass(frozen=True, slots=True)
class Back:
    """Bounds on "was replayed by then" as variables; None stands for zero."""

    at_least: Variable | None
    at_most: Variable | None


class Residency:
    """Variables r[i, t]: recomputed value i was replayed by mark t; n[i, t]: a replay read swapped value i by then.

    Both are monotone in t and only exist in the window in which they are not known: from the first interval in which a
    replay could read the value to the interval of its first unpack. Outside of `WINDOW` intervals they are left out,
    which leaves rows out and so only lowers the optimum.

    Args:
        program: to add to. candidates, items: all activations, and the classes of those in the program.
        marks: the intervals.
        swap, recompute: the choice variables.
    """

    def __init__(
        self,
        program: LinearProgram,
        candidates: Candidates,
        items: tuple[ActivationClass, ...],
        marks: Marks,
        swap: Mapping[int, Variable],
        recompute: Mapping[int, Variable],
    ) -> None:
        self.program, self.candidates, self.items, self.marks = program, candidates, items, marks
        self.swap, self.recompute = swap, recompute
        self.first: dict[int, int] = {}  # first interval in which the value may be wanted by a replay
        self.own: dict[int, int] = {item.value: self._own_interval(item) for item in items}
        self.replayed: dict[tuple[int, int], Variable] = {}  # r[i, t]
        self.fetched: dict[tuple[int, int], Variable] = {}  # n[i, t]
        self.class_of = {member.value: item for item in items for member in item.members}
        self._find_windows()
        self._add_monotone(self.replayed, recompute)
        self._add_monotone(self.fetched, swap)
        self._add_sources()

    def _own_interval(self, item: ActivationClass) -> int:
        """The interval of the first unpack; of the death, where nobody unpacks it."""
        return self.marks.interval_of(item.need if item.need != NEVER else item.death)

    def _find_windows(self) -> None:
        """From the last activation to the first: a source may be wanted as soon as what it serves."""
        wanted: dict[int, int] = {}
        self.first = dict(self.own)
        for member in sorted((member for item in self.items for member in item.members), key=lambda m: -m.value):
            item = self.class_of[member.value]
            own = self.own[item.value]
            first = max(min(wanted.get(member.value, own), own), own - WINDOW)
            self.first[item.value] = min(first, self.first[item.value])
            if item.value in self.recompute:
                for source in member.sources:
                    wanted[source] = min(wanted.get(source, self.marks.count), first)

    def _add_monotone(self, table: dict[tuple[int, int], Variable], choice: Mapping[int, Variable]) -> None:
        """v[i, t] <= v[i, t + 1] <= choice_i, for each interval of the window."""
        for value, chosen in choice.items():
            following = chosen
            for t in reversed(range(self.first[value], self.own[value])):
                table[value, t] = self.program.variable(float(self.class_of[value].count))
                self.program.at_most({table[value, t]: 1.0, following: -1.0}, 0.0)
                following = table[value, t]

    def _add_sources(self) -> None:
        """keep_i + r[i, t] + n[i, t] >= r[j, t]: when j has been replayed, its source i was there, and it stays.

        Of classes, these are the sums over j; a source of several members counts for each of them.
        """
        for item in self.items:
            if item.value in self.recompute:
                for sources in zip(*(member.sources for member in item.members), strict=True):
                    self._add_source(item, sources)

    def _add_source(self, item: ActivationClass, sources: tuple[int, ...]) -> None:
        if any(source not in self.class_of for source in sources):
            return
        serving: dict[int, int] = {}  # by class: how many members of `item` one of it serves at most
        for source in dict.fromkeys(sources):
            of_class = self.class_of[source].value
            serving[of_class] = max(serving.get(of_class, 0), sources.count(source))
        last = self.own[item.value] if item.need != NEVER else self.own[item.value] - 1
        first = max(self.first[item.value], *(self.first[value] for value in serving))
        for t in range(first, min(last, *(self.own[value] - 1 for value in serving)) + 1):
            self._add_source_row(item, serving, t)

    def _add_source_row(self, item: ActivationClass, serving: Mapping[int, int], t: int) -> None:
        terms: Terms = {self.replayed.get((item.value, t), self.recompute[item.value]): 1.0}
        most = 0
        for value, times in serving.items():
            most += times * self.class_of[value].count
            for choice, back in ((self.swap, self.fetched), (self.recompute, self.replayed)):
                if value in choice:
                    terms[choice[value]] = terms.get(choice[value], 0.0) + times
                    terms[back[value, t]] = terms.get(back[value, t], 0.0) - times
        if len(terms) > 1:
            self.program.at_most(terms, float(most))

    def replayed_by(self, item: ActivationClass, t: int) -> Back:
        """Bounds on whether the value has been replayed by mark t."""
        chosen = self.recompute.get(item.value)
        if chosen is None:
            return Back(None, None)
        if t >= self.own[item.value]:
            return Back(chosen if item.need != NEVER else None, chosen)
        variable = self.replayed.get((item.value, t))
        if variable is not None:
            return Back(variable, variable)
        return Back(None, chosen)

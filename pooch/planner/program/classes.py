"""Activations that a program cannot tell apart, taken together: it decides how many of a class leave, not which.

Repeated blocks make activations of equal size and recipe. Those that are also made, released, read and dropped in the
same intervals appear in the same rows with the same factors, so one whole-numbered variable can stand for all of them.
The sum of valid rows is valid, so the program stays a relaxation; it grows with intervals times the length of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.plan import Choice, Decisions
from ..candidates import NEVER, Candidate, Candidates
from .marks import Marks

ORDER: tuple[Choice, ...] = ("swap", "recompute", "keep")  # in which members get their choices, the first made first


@dataclass(frozen=True, slots=True)
class ActivationClass:
    """Interchangeable activations, in forward order.

    All agree in what the program reads from the first one: bytes, copy times, possible choices, and the intervals of
    its slots. Times of replays differ a little in measured profiles.
    """

    members: tuple[Candidate, ...]

    @property
    def first(self) -> Candidate:
        """The member that stands for all."""
        return self.members[0]

    @property
    def id(self) -> int:
        """Id of the first member: the key of the class."""
        return self.members[0].value

    @property
    def count(self) -> int:
        """How many activations it stands for."""
        return len(self.members)

    @property
    def replay_ms(self) -> float:
        """Time of the most expensive member's recipe (nan where it cannot be replayed)."""
        return max(item.replay_ms for item in self.members)

    def __str__(self) -> str:
        """In names of variables and rows: "12", or "12x20" for twenty activations like number 12."""
        return f"{self.id}x{self.count}" if self.count > 1 else f"{self.id}"

    def expand(self, counts: dict[Choice, int]) -> dict[int, Choice]:
        """Give the members, in forward order, the choices in `ORDER`, each as often as counted."""
        chosen = [choice for choice in ORDER for _ in range(counts[choice])]
        return {item.value: choice for item, choice in zip(self.members, chosen, strict=True)}

    def count_of(self, choice: Choice, decisions: Decisions) -> int:
        """How many members have this choice."""
        return sum(decisions.get(item.value, "keep") == choice for item in self.members)


def make_classes(
    candidates: Candidates, marks: Marks, items: Sequence[Candidate], *, merge: bool
) -> tuple[ActivationClass, ...]:
    """The classes of `items`, in order of their first members; each item alone where nothing is to be merged."""
    groups: dict[object, list[Candidate]] = {}
    for item in items:
        groups.setdefault(_signature(candidates, marks, item) if merge else item.value, []).append(item)
    return tuple(ActivationClass(tuple(members)) for members in groups.values())


def _signature(candidates: Candidates, marks: Marks, item: Candidate) -> object:
    """Equal for activations that appear in the same rows of the program with the same factors."""
    ops, interval_of = candidates.dataflow.profile.ops, marks.interval_of
    need = interval_of(item.need) if item.need != NEVER else NEVER
    intervals = tuple(interval_of(slot) for slot in (item.born, item.born + 1, item.release + 1, item.death + 1))
    death = interval_of(item.death) if item.need == NEVER else NEVER
    recipe = tuple(ops[op].name for op in item.ops) if item.can_recompute else ()
    spans = ((interval_of(gap.first_slot), interval_of(gap.need_slot)) for gap in item.gaps)
    gaps = (interval_of(item.first_away), *(span for span in spans if span[0] < span[1]))
    able = (item.can_swap, item.can_recompute, len(item.sources))
    return (item.memory_bytes, item.size_bytes, ops[item.born].name, able, recipe, intervals, need, gaps, death)


@dataclass(frozen=True, slots=True)
class SharedReplays:
    """Ops that recipes have in common, by kind; ops of a kind are run again by members of the same classes.

    Attributes:
        own_ms: by class: time of the ops that no other recipe needs, of the cheapest member.
        kinds: by kind: how many ops, and the time of the shortest.
        users: (class, how often each kind serves it at most): every replay of a member needs one of these.
    """

    own_ms: dict[int, float]
    kinds: tuple[tuple[int, float], ...]
    users: tuple[tuple[ActivationClass, dict[int, int]], ...]


def share_replays(candidates: Candidates, classes: Sequence[ActivationClass]) -> SharedReplays:
    """Find out which ops several recipes need; the k-th ops of the recipes of a class belong together."""
    ops, times_ms = candidates.dataflow.profile.ops, candidates.dataflow.replay_times_ms
    replayed = [group for group in classes if group.first.can_recompute and group.first.need != NEVER]
    used_by: dict[int, list[int]] = {}
    for group in replayed:
        for item in group.members:
            for op in item.ops:
                used_by.setdefault(op, []).append(group.id)
    kind_of: dict[tuple[object, ...], int] = {}
    kinds: list[list[int]] = []
    place_of: dict[int, int] = {}
    own_ms: dict[int, float] = {}
    users: list[tuple[ActivationClass, dict[int, int]]] = []
    for group in replayed:
        for column in zip(*(item.ops for item in group.members), strict=True):
            if all(len(used_by[op]) == 1 for op in column):
                own_ms[group.id] = own_ms.get(group.id, 0.0) + min(times_ms[op] for op in column)
                continue
            for op in column:
                if op not in place_of:
                    key = (ops[op].name, *sorted(used_by[op]))
                    place_of[op] = kind_of.setdefault(key if len(column) > 1 else (op,), len(kinds))
                    if place_of[op] == len(kinds):
                        kinds.append([])
                    kinds[place_of[op]].append(op)
            serving: dict[int, int] = {}
            for op in dict.fromkeys(column):
                serving[place_of[op]] = max(serving.get(place_of[op], 0), column.count(op))
            users.append((group, serving))
    sized = tuple((len(members), min(times_ms[op] for op in members)) for members in kinds)
    return SharedReplays(own_ms, sized, tuple(users))

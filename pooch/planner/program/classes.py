"""Activations that a program cannot tell apart, taken together: it decides how many of a class leave, not which.

Repeated blocks make activations of equal size and recipe. Those that are also made, released, read and dropped in the
same intervals stand in the same rows with the same factors, so one whole-numbered variable can stand for all of them.
The sum of valid rows is valid, so the program stays a relaxation; it grows with intervals times the length of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pooch.analysis.dataflow import Gap
from pooch.ir.plan import Choice, Decisions
from pooch.planner.candidates import NEVER, Candidate, Candidates
from pooch.planner.program.marks import Marks

Signature = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ActivationClass:
    """Interchangeable activations; times of replays differ a little in measured profiles, so both ends are kept.

    Attributes:
        members: in forward order. value: id of the first one: the name of the class.
        memory_bytes, size_bytes, out_ms, in_ms, copy_ms, can_swap, can_recompute: of each member.
        replay_ms: of the dearest member's recipe (nan where it cannot be replayed).
        born, release, need, death, first_away, gaps: of the first member; those of the others lie in the same
            intervals, but for gaps between two marks.
    """

    members: tuple[Candidate, ...]
    value: int
    memory_bytes: int
    size_bytes: int
    out_ms: float
    in_ms: float
    copy_ms: float
    can_swap: bool
    can_recompute: bool
    replay_ms: float
    born: int
    release: int
    need: int
    death: int
    first_away: int
    gaps: tuple[Gap, ...]

    @property
    def count(self) -> int:
        """How many activations it stands for."""
        return len(self.members)

    def expand(self, counts: dict[Choice, int], order: Sequence[Choice]) -> dict[int, Choice]:
        """Give the members, in forward order, the choices in this order, each as often as counted."""
        chosen = [choice for choice in order for _ in range(counts[choice])]
        return {item.value: choice for item, choice in zip(self.members, chosen, strict=True)}

    def counts(self, decisions: Decisions) -> dict[Choice, int]:
        """How many members each choice has."""
        chosen = [decisions.get(item.value, "keep") for item in self.members]
        return {"keep": chosen.count("keep"), "swap": chosen.count("swap"), "recompute": chosen.count("recompute")}


def make_classes(
    candidates: Candidates, marks: Marks, items: Sequence[Candidate], *, merge: bool
) -> tuple[ActivationClass, ...]:
    """The classes of `items`, in order of their first members; each item alone where nothing is to be merged."""
    groups: dict[Signature, list[Candidate]] = {}
    for item in items:
        groups.setdefault(_signature(candidates, marks, item) if merge else (item.value,), []).append(item)
    return tuple(_class_of(tuple(members)) for members in groups.values())


def _signature(candidates: Candidates, marks: Marks, item: Candidate) -> Signature:
    """Equal for activations that stand in the same rows of the program with the same factors."""
    ops, until = candidates.dataflow.profile.ops, marks.interval_of
    need = until(item.need) if item.need != NEVER else NEVER
    intervals = (until(item.born), until(item.born + 1), until(item.release + 1), need, until(item.death + 1))
    death = until(item.death) if item.need == NEVER else NEVER
    recipe = tuple(ops[op].name for op in item.ops) if item.can_recompute else ()
    spans = ((until(gap.first_slot), until(gap.need_slot)) for gap in item.gaps)
    gaps = (until(item.first_away), *(span for span in spans if span[0] < span[1]))
    able = (item.can_swap, item.can_recompute, len(item.sources))
    return (item.memory_bytes, item.size_bytes, ops[item.born].name, able, recipe, intervals, gaps, death)


def _class_of(members: tuple[Candidate, ...]) -> ActivationClass:
    first = members[0]
    return ActivationClass(
        members=members,
        value=first.value,
        memory_bytes=first.memory_bytes,
        size_bytes=first.size_bytes,
        out_ms=first.out_ms,
        in_ms=first.in_ms,
        copy_ms=first.copy_ms,
        can_swap=first.can_swap,
        can_recompute=first.can_recompute,
        replay_ms=max(item.replay_ms for item in members),
        born=first.born,
        release=first.release,
        need=first.need,
        death=first.death,
        first_away=first.first_away,
        gaps=first.gaps,
    )


@dataclass(frozen=True, slots=True)
class SharedReplays:
    """Ops that recipes have in common, by kind; ops of a kind are run again by members of the same classes.

    Attributes:
        own_ms: by class: time of the ops that nobody else needs, of the cheapest member.
        kinds: by kind: how many ops, and the time of the shortest.
        users: (class, how often each kind serves it at most): every replay of a member needs one of these.
    """

    own_ms: dict[int, float]
    kinds: tuple[tuple[int, float], ...]
    users: tuple[tuple[int, dict[int, int]], ...]


def share_replays(candidates: Candidates, classes: Sequence[ActivationClass]) -> SharedReplays:
    """Find out which ops several recipes need; the k-th ops of the recipes of a class belong together."""
    ops, times_ms = candidates.dataflow.profile.ops, candidates.dataflow.replay_times_ms
    replayed = [group for group in classes if group.can_recompute and group.need != NEVER]
    used_by: dict[int, list[int]] = {}
    for group in replayed:
        for item in group.members:
            for op in item.ops:
                used_by.setdefault(op, []).append(group.value)
    kind_of: dict[tuple[object, ...], int] = {}
    kinds: list[list[int]] = []
    place_of: dict[int, int] = {}
    own_ms: dict[int, float] = {}
    users: list[tuple[int, dict[int, int]]] = []
    for group in replayed:
        for column in zip(*(item.ops for item in group.members), strict=True):
            if all(len(used_by[op]) == 1 for op in column):
                own_ms[group.value] = own_ms.get(group.value, 0.0) + min(times_ms[op] for op in column)
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
            users.append((group.value, serving))
    sized = tuple((len(members), min(times_ms[op] for op in members)) for members in kinds)
    return SharedReplays(own_ms, sized, tuple(users))

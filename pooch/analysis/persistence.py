"""What outlives a step, in the room that the rest of it leaves: what stays, and when the others leave and come back.

A step repeats, so each tensor's next use is known at any time. Where there is no room, the tensor leaves that is used
last from then on (Belady 1966, "A study of replacement algorithms for a virtual-storage computer", section 3, MIN).
Training does the same at run time (`machine/persistent.py`), with the uses that it has seen.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy

from ..ground.units import round_up
from ..ir import PersistentMove, PersistentTensor, Profile
from ..ir.persistent import Kind
from ..ir.schedule import TIER_ALIGNMENT_BYTES

# An optimizer's step of one parameter takes so many times its bytes besides what outlives it: PyTorch's, which work on
# lists, make the denominator and the update.
SLICE_TEMPORARIES = 2
_MOST_CYCLES = 4  # until the end of a step is like its beginning
_MOST_AHEAD = 512  # positions by which a copy back starts ahead of need

Order = Literal["used last", "gradients stay", "fits best"]
MoveKind = Literal["copy_out", "free", "copy_in", "wait"]


def can_move(profile: Profile) -> bool:
    """Whether a plan may let anything of what outlives a step leave.

    Not where gradients outlive the step as well, where FSDP moves parameters or microbatches are in flight, nor where
    the device shares the host's memory.
    """
    return (
        bool(profile.persistent)
        and not profile.device.shares_memory
        and not profile.accumulates
        and not profile.gathered
        and profile.in_flight.microbatches == 1
    )


def with_resident(profile: Profile, resident_points: numpy.ndarray | None = None) -> Profile:
    """The same step with other bytes of what outlives it and could leave: what plans for activations are made for.

    Args:
        profile: the step.
        resident_points: int64 array of shape (2 * ops,): what of these is there at each point. None: nothing.
    """
    change = -present_points(profile)
    if resident_points is not None:
        change += resident_points
    ops = tuple(
        replace(op, entry_bytes=op.entry_bytes + entry, peak_bytes=op.peak_bytes + body)
        for op, entry, body in zip(profile.ops, change[0::2].tolist(), change[1::2].tolist(), strict=True)
    )
    least_bytes = 0 if resident_points is None else int(resident_points.min())
    always_bytes = sum(each.allocated_bytes for each in profile.persistent if each.kind != "gradient")
    return replace(
        profile,
        ops=ops,
        persistent_bytes=profile.persistent_bytes - always_bytes + least_bytes,
        peak_bytes=max(op.peak_bytes for op in ops),
        split=None,
        persistent=(),
    )


def present_points(profile: Profile) -> numpy.ndarray:
    """int64 array of shape (2 * ops,): what the tensors that could leave take at each point if none does."""
    change = numpy.zeros(2 * len(profile.ops) + 1, dtype=numpy.int64)
    for each in profile.persistent:
        change[2 * each.uses[0] + 1 if each.kind == "gradient" else 0] += each.allocated_bytes
    taken: numpy.ndarray = numpy.cumsum(change[:-1])
    return taken


@dataclass(frozen=True, slots=True)
class Absence:
    """A stretch of a step in which a tensor is away. It may go across the end of the step.

    Attributes:
        tensor: its place among those of the cycle.
        leaves: position at whose entry its bytes are freed.
        returns: position at whose entry the copy back starts; -1 for a gradient that nothing uses again.
        need: position that uses it, or -1.
    """

    tensor: int
    leaves: int
    returns: int
    need: int


@dataclass(frozen=True, slots=True)
class MoveAction:
    """One thing to do at the entry of a position.

    Attributes:
        position: of the step.
        kind: as of `Action`; "free" waits for the copy out, if there is one.
        tensor: its place among those of the cycle.
        size_bytes: that a copy moves.
    """

    position: int
    kind: MoveKind
    tensor: int
    size_bytes: int


class Cycle:
    """The positions of a step that repeats, and who is used at each of them.

    Args:
        profile: the step.

    Attributes:
        profile: the step.
        tensors: those that could leave.
        slices: the parameter of each slice of the optimizer's step.
        count: of positions: the slots, and then the slices.
        used: the tensors that each position uses, by their places.
        uses: the positions that use each tensor, ascending.
        need_bytes: int64 array: what must be there at each position.
        temporary_bytes: int64 array: what slices take besides, at their positions.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tensors: tuple[PersistentTensor, ...] = profile.persistent
        self.slices = tuple(dict.fromkeys(each.name for each in self.tensors if each.is_stepped))
        slot_count = len(profile.ops)
        self.count = slot_count + len(self.slices)
        place = {name: slot_count + number for number, name in enumerate(self.slices)}
        self.uses = [(*each.uses, place[each.name]) if each.is_stepped else each.uses for each in self.tensors]
        self.used: list[list[int]] = [[] for _ in range(self.count)]
        self.need_bytes = numpy.zeros(self.count, dtype=numpy.int64)
        self.temporary_bytes = numpy.zeros(self.count, dtype=numpy.int64)
        for number, (each, uses) in enumerate(zip(self.tensors, self.uses, strict=True)):
            for position in uses:
                self.used[position].append(number)
                self.need_bytes[position] += each.allocated_bytes
            if each.kind == "parameter" and each.is_stepped:
                self.temporary_bytes[place[each.name]] = SLICE_TEMPORARIES * each.allocated_bytes

    @property
    def in_core_bytes(self) -> int:
        """What all tensors take when all of them are there."""
        return sum(each.allocated_bytes for each in self.tensors)

    def allowed_points(self, allowance_bytes: int) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): what the tensors may take at each point.

        Args:
            allowance_bytes: at all points, but for those at which the step uses more, or at which there are not as
                many.
        """
        points = present_points(self.profile)
        needed = numpy.repeat(self.need_bytes[: len(self.profile.ops)], 2)
        allowed: numpy.ndarray = numpy.maximum(needed, numpy.minimum(points, allowance_bytes))
        return allowed

    def room_bytes(self, budget_bytes: int, others: numpy.ndarray) -> numpy.ndarray:
        """int64 array: what the tensors, and the temporaries of slices, may take at each position.

        Args:
            budget_bytes: of all.
            others: int64 array of shape (2 * ops,): what everything else takes at each point.
        """
        slots = numpy.maximum(others[0::2], others[1::2])
        after = numpy.full(len(self.slices), others[-2], dtype=numpy.int64)  # at the entry of the closing op
        room: numpy.ndarray = budget_bytes - numpy.concatenate([slots, after])
        return room

    def born(self, tensor: int) -> int:
        """The position that makes a gradient, before which there is none; 0 for what was there before."""
        return self.uses[tensor][0] if self.tensors[tensor].kind == "gradient" else 0

    def next_use(self, tensor: int, position: int) -> int:
        """The first position after one that uses a tensor, in this step or (beyond `count`) in the next.

        A gradient is not used again after the optimizer's step, at whose end it ceases to be.
        """
        uses = self.uses[tensor]
        for use in uses:
            if use > position:
                return use
        if self.tensors[tensor].kind == "gradient" or not uses:
            return 2 * self.count
        return self.count + uses[0]


@dataclass(frozen=True, slots=True)
class Residence:
    """Who is away when, in a step like all others.

    Attributes:
        cycle: the step.
        absences: in order of need.
        here_bytes: int64 array: what the tensors take at each position.
        gone: those that are away all the time, as nothing uses them.
    """

    cycle: Cycle
    absences: tuple[Absence, ...]
    here_bytes: numpy.ndarray
    gone: tuple[int, ...] = ()

    def point_bytes(self) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): what the tensors take at each point of the profile."""
        slots = self.here_bytes[: len(self.cycle.profile.ops)]
        points: numpy.ndarray = numpy.repeat(slots, 2)
        for number, each in enumerate(self.cycle.tensors):
            if each.kind == "gradient":  # its slot makes it after its entry
                points[2 * self.cycle.born(number)] -= each.allocated_bytes
        return points

    def kind_points(self) -> dict[Kind, numpy.ndarray]:
        """By kind: int64 array of shape (2 * ops,), what its tensors take at each point of the profile."""
        cycle, end = self.cycle, len(self.cycle.profile.ops)
        found: dict[Kind, numpy.ndarray] = {}
        for number, each in enumerate(cycle.tensors):
            here = found.setdefault(each.kind, numpy.zeros(2 * end, dtype=numpy.int64))
            if number not in self.gone and each.kind == "gradient":
                here[2 * cycle.born(number) + 1 :] += each.allocated_bytes
            elif number not in self.gone:
                here += each.allocated_bytes
        for absence in self.absences:
            each = cycle.tensors[absence.tensor]
            for stretch in stretches(absence, cycle.count):
                found[each.kind][2 * stretch.start : 2 * stretch.stop] -= each.allocated_bytes
        return found

    def moves(self) -> tuple[PersistentMove, ...]:
        """How each tensor that leaves does so."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for absence in self.absences:
            found.setdefault(absence.tensor, []).append((absence.leaves, absence.returns, absence.need))
        return tuple(
            PersistentMove(
                each.name,
                each.kind,
                each.size_bytes,
                tuple(sorted(found.get(number, ()))),
                int(each.is_written and number in found),
            )
            for number, each in enumerate(self.cycle.tensors)
            if number in found or number in self.gone
        )

    def actions(self) -> list[MoveAction]:
        """All that a step does, in order. What is written is copied out right after that, so that it can leave."""
        cycle, leaving = self.cycle, {absence.tensor for absence in self.absences}
        actions = []
        for number in leaving:
            each = cycle.tensors[number]
            if each.is_written:
                written = cycle.uses[number][0] if each.kind == "gradient" else cycle.uses[number][-1]
                actions.append(MoveAction((written + 1) % cycle.count, "copy_out", number, each.size_bytes))
        for absence in self.absences:
            size_bytes = cycle.tensors[absence.tensor].size_bytes
            actions.append(MoveAction(absence.leaves, "free", absence.tensor, size_bytes))
            if absence.returns >= 0:
                actions.append(MoveAction(absence.returns, "copy_in", absence.tensor, size_bytes))
                actions.append(MoveAction(absence.need, "wait", absence.tensor, size_bytes))
        rank = {"copy_out": 0, "free": 1, "copy_in": 2, "wait": 3}
        order = {absence.tensor: place for place, absence in enumerate(self.absences)}
        return sorted(actions, key=lambda each: (each.position, rank[each.kind], order[each.tensor]))

    @property
    def copied_in_bytes(self) -> int:
        """What is copied back in each step."""
        return sum(self.cycle.tensors[each.tensor].size_bytes for each in self.absences if each.returns >= 0)

    @property
    def copied_out_bytes(self) -> int:
        """What is copied out in each step."""
        return sum(move.size_bytes * move.copies_out for move in self.moves())

    @property
    def tier_bytes(self) -> int:
        """Room that the tier needs for all that leaves."""
        return sum(round_up(move.size_bytes, TIER_ALIGNMENT_BYTES) for move in self.moves())


def residence_of(cycle: Cycle, moves: Sequence[PersistentMove]) -> Residence | None:
    """Return who is away when as a plan says, or None if the plan is for another step.

    Args:
        cycle: the step.
        moves: of the plan.
    """
    places = {(each.name, each.kind): number for number, each in enumerate(cycle.tensors)}
    if not all((move.name, move.kind) in places for move in moves):
        return None
    absences = [Absence(places[move.name, move.kind], *stretch) for move in moves for stretch in move.away]
    if any(
        not -1 <= position < cycle.count for each in absences for position in (each.leaves, each.returns, each.need)
    ):
        return None
    absences.sort(key=_by_need)
    gone = tuple(places[move.name, move.kind] for move in moves if not move.away)
    here_bytes = numpy.zeros(cycle.count, dtype=numpy.int64)
    for number, each in enumerate(cycle.tensors):
        here_bytes[cycle.born(number) :] += 0 if number in gone else each.allocated_bytes
    for absence in absences:
        size_bytes = cycle.tensors[absence.tensor].allocated_bytes
        for stretch in stretches(absence, cycle.count):
            here_bytes[stretch] -= size_bytes
    return Residence(cycle, tuple(absences), here_bytes, gone)


def stretches(absence: Absence, count: int) -> tuple[slice, ...]:
    """The positions at which a tensor is away, of so many."""
    if absence.returns < 0:
        return (slice(absence.leaves, count),)
    if absence.leaves < absence.returns:
        return (slice(absence.leaves, absence.returns),)
    return slice(absence.leaves, count), slice(0, absence.returns)


def residence(
    cycle: Cycle, room_bytes: numpy.ndarray, ahead_bytes: int = 0, order: Order = "used last"
) -> Residence | None:
    """Who stays and who leaves in the room that there is, or None if a position has no room for what it uses.

    Args:
        cycle: the step.
        room_bytes: int64 array: what the tensors, and the temporaries of slices, may take at each position.
        ahead_bytes: room in which nothing stays, so that what is used next can come while something leaves.
        order: who leaves first. "used last": the one that is used last; a gradient that has been used, for one copy
            out. "gradients stay": the same, but for such gradients. "fits best": the smallest that makes enough room,
            and among these the one that is used last, for which all tensors are looked at for each that leaves.
    """
    room_bytes = room_bytes - cycle.temporary_bytes
    if (cycle.need_bytes > room_bytes).any():
        return None
    staying_bytes = numpy.maximum(cycle.need_bytes, room_bytes - ahead_bytes)
    walk = _Walk(cycle, staying_bytes, frozenset(), order)
    for _ in range(_MOST_CYCLES):
        walk.run()
        if walk.away_at_end == walk.away_at_start:
            break
        walk = _Walk(cycle, staying_bytes, walk.away_at_end, order)
    else:
        walk.run()
        walk.close()
    return _placed(cycle, room_bytes, _needed(cycle, staying_bytes, walk))


class _Walk:
    """One step: at each position what it uses comes back, and others leave until all of it fits."""

    def __init__(self, cycle: Cycle, room_bytes: numpy.ndarray, away: frozenset[int], order: Order) -> None:
        self._cycle, self._room, self._chosen = cycle, room_bytes.tolist(), order
        self.left_at = dict.fromkeys(away, -1)  # those that are away, and since when in this step
        self.away_at_start = away
        self.here_bytes = numpy.zeros(cycle.count, dtype=numpy.int64)
        self.absences: list[tuple[int, int, int]] = []  # tensor, leaves (-1: before the step), need
        self.away_at_end: frozenset[int] = frozenset()
        self._order: list[tuple[int, int]] = []  # (- next use, tensor), a heap in which outdated entries may be
        self._next: dict[int, int] = {}
        self._bytes = 0

    def run(self) -> None:
        """Go through all positions."""
        cycle = self._cycle
        for number, each in enumerate(cycle.tensors):
            if each.kind != "gradient" and number not in self.left_at:
                self._arrive(number, -1)
        for position in range(cycle.count):
            for number in cycle.used[position]:
                if number in self.left_at:
                    self.absences.append((number, self.left_at.pop(number), position))
                    self._arrive(number, position)
                elif cycle.tensors[number].kind == "gradient" and cycle.born(number) == position:
                    self._arrive(number, position)
                else:
                    self._note(number, position)
            self._make_room(position)
            self.here_bytes[position] = self._bytes
        gradients = [number for number in self.left_at if cycle.tensors[number].kind == "gradient"]
        self.absences += [(number, self.left_at.pop(number), -1) for number in gradients]
        self.away_at_end = frozenset(self.left_at)

    def close(self) -> None:
        """Let the end be like the beginning: what was there comes back by then; what was not leaves at the start."""
        for number in self.away_at_end - self.away_at_start:
            self.absences.append((number, self.left_at[number], self._cycle.count))
        late = self.away_at_start - self.away_at_end
        begun = [(number, 0 if number in late and at < 0 else at, need) for number, at, need in self.absences]
        self.absences = [absence for absence in begun if absence[1:] != (0, 0)]
        self.away_at_end = self.away_at_start

    def _arrive(self, number: int, position: int) -> None:
        self._bytes += self._cycle.tensors[number].allocated_bytes
        self._note(number, position)

    def _note(self, number: int, position: int) -> None:
        following = self._cycle.next_use(number, position)
        if following >= 2 * self._cycle.count and self._chosen == "gradients stay" and self._cycle.uses[number]:
            following = -1
        self._next[number] = following
        heapq.heappush(self._order, (-following, number))

    def _make_room(self, position: int) -> None:
        """Let those leave that come first in the order."""
        used = set(self._cycle.used[position])
        if self._chosen == "fits best":
            while self._bytes > self._room[position]:
                self._leave(self._best_fit(used, self._bytes - self._room[position]), position)
            return
        kept = []
        while self._bytes > self._room[position]:
            following, number = heapq.heappop(self._order)
            if self._next.get(number) != -following:
                continue
            if number in used:
                kept.append((following, number))
                continue
            self._leave(number, position)
        for entry in kept:
            heapq.heappush(self._order, entry)

    def _leave(self, number: int, position: int) -> None:
        del self._next[number]
        self._bytes -= self._cycle.tensors[number].allocated_bytes
        self.left_at[number] = position

    def _best_fit(self, used: set[int], missing_bytes: int) -> int:
        """The smallest tensor that makes enough room, or the largest where none does; of several the one used last."""

        def rank(number: int) -> tuple[bool, int, int]:
            size_bytes = self._cycle.tensors[number].allocated_bytes
            suffices = size_bytes >= missing_bytes
            return not suffices, size_bytes if suffices else -size_bytes, -self._next[number]

        return min((number for number in self._next if number not in used), key=rank)


def _by_need(absence: Absence) -> tuple[int, int]:
    return absence.need, absence.tensor


def _needed(cycle: Cycle, room_bytes: numpy.ndarray, walk: _Walk) -> Residence:
    """The absences without which there would not be enough room; the largest that can be done without stay first.

    All come back when they are needed.
    """
    count, here = cycle.count, walk.here_bytes.copy()
    absences = []
    for number, left_at, need in walk.absences:
        # What was away at the beginning left in the step before, where it leaves in this one.
        leaves = left_at if left_at >= 0 else walk.left_at[number]
        absences.append(
            Absence(number, leaves, need % count, need % count) if need >= 0 else Absence(number, leaves, -1, -1)
        )
    kept = []
    for absence in sorted(absences, key=lambda each: -cycle.tensors[each.tensor].allocated_bytes):
        size_bytes = cycle.tensors[absence.tensor].allocated_bytes
        away = stretches(absence, count)
        if all((here[stretch] + size_bytes <= room_bytes[stretch]).all() for stretch in away):
            for stretch in away:
                here[stretch] += size_bytes
        else:
            kept.append(absence)
    gone = (number for number in walk.left_at if not cycle.uses[number])
    return Residence(cycle, tuple(sorted(kept, key=_by_need)), here, tuple(gone))


def _placed(cycle: Cycle, room_bytes: numpy.ndarray, found: Residence) -> Residence:
    """Start each copy back as early as there is room, in order of need, which may be before the step begins."""
    count, here, latest = cycle.count, found.here_bytes.copy(), -cycle.count
    placed = []
    for absence in found.absences:
        if absence.need < 0:
            placed.append(absence)
            continue
        number, leaves, need = absence.tensor, absence.leaves, absence.need
        size_bytes = cycle.tensors[number].allocated_bytes
        first = max(leaves + 1 if leaves < need else leaves + 1 - count, latest, need - _MOST_AHEAD)
        returns = need
        while returns > first and here[(returns - 1) % count] + size_bytes <= room_bytes[(returns - 1) % count]:
            returns -= 1
        for position in range(returns, need):
            here[position % count] += size_bytes
        latest = returns
        placed.append(Absence(number, leaves, returns % count, need % count))
    return Residence(cycle, tuple(placed), here, found.gone)

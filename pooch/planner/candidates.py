"""Facts about each activation that decisions are made by: bytes, costs, and when it has to be where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy

from ..analysis.dataflow import Dataflow, Gap
from ..analysis.occupancy import others_change
from ..ir.plan import Choice, Decisions
from ..ir.profile import Value

NEVER = -1
Leaving = Literal["swap", "recompute"]
LEAVING: tuple[Leaving, ...] = ("swap", "recompute")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One activation, as the planner sees it.

    Attributes:
        value: its id.
        memory_bytes: what it takes on the device.
        size_bytes: what a copy moves.
        out_ms: duration of a copy out.
        in_ms: duration of a copy in.
        displaced_ms: compute work that both copies displace.
        replay_ms: duration of its own recipe (nan where it cannot be replayed).
        born: slot that makes it.
        release: last slot in which the forward pass needs it to be there.
        need: slot of its first unpack, or NEVER.
        death: last slot in which autograd holds it.
        can_swap: it can be swapped, and that would free memory for some time.
        can_recompute: the same for recomputing it.
        can_join: recomputing it frees nothing by itself, but changes replays that run anyway: they make no second
            copy of it beside a sibling, or run earlier.
        ops: forward ops of its recipe.
        sources: activations that the recipe reads.
        gaps: stretches before its release in which it can be swapped out because nothing looks at it.
        can_wait: it can be swapped out between its last use by the forward pass and its first by the backward pass.
    """

    value: int
    memory_bytes: int
    size_bytes: int
    out_ms: float
    in_ms: float
    displaced_ms: float
    replay_ms: float
    born: int
    release: int
    need: int
    death: int
    can_swap: bool
    can_recompute: bool
    can_join: bool
    ops: tuple[int, ...]
    sources: tuple[int, ...]
    gaps: tuple[Gap, ...] = ()
    can_wait: bool = True

    @property
    def first_away(self) -> int:
        """First slot in which it can be swapped out."""
        return self.gaps[0].first_slot if self.gaps else self.release + 1

    @property
    def copy_ms(self) -> float:
        """Time on the link, out and back."""
        return self.out_ms + (self.in_ms if self.need != NEVER else 0.0)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What can sensibly be chosen for it, keep first."""
        swap: tuple[Choice, ...] = ("swap",) if self.can_swap else ()
        recompute: tuple[Choice, ...] = ("recompute",) if self.can_recompute or self.can_join else ()
        return ("keep", *swap, *recompute)

    @property
    def can_leave(self) -> bool:
        """Whether a choice frees memory."""
        return self.can_swap or self.can_recompute

    @property
    def cost_per_byte(self) -> float:
        """Time that the cheaper way of leaving takes for each byte that it frees."""
        return self.cost_ms(self.leaving()) / max(1, self.memory_bytes)

    def leaving(self, patience: float = 1.0) -> Leaving:
        """How it leaves: recomputed where a replay takes at most `patience` times its copies, else swapped."""
        recomputes = self.can_recompute and (not self.can_swap or self.replay_ms <= patience * self.copy_ms)
        return "recompute" if recomputes else "swap"

    def cost_ms(self, choice: Leaving) -> float:
        """Time of its replay, or of its copies."""
        return self.replay_ms if choice == "recompute" else self.copy_ms


class Candidates:
    """All activations of a dataflow, and the memory and work that decisions cost at the very least.

    With `only`, that is the one choice that is allowed besides keep. What is larger than the tier cannot be swapped.
    Nothing can where the device shares the host's memory: that would free nothing.
    """

    def __init__(self, dataflow: Dataflow, only: Leaving | None = None, host_budget_bytes: int | None = None) -> None:
        self.dataflow = dataflow
        self.only = only
        self._tier_bytes = math.inf if host_budget_bytes is None else host_budget_bytes
        if dataflow.profile.device.shares_memory:
            self._tier_bytes = 0
        self.others = dataflow.profile.in_flight.microbatches - 1  # microbatches in flight besides the one planned
        self.items: tuple[Candidate, ...] = tuple(self._make(value) for value in dataflow.activations)
        # In-core compute time of the step: no plan is faster.
        self.compute_ms: float = sum(op.time_ms for op in dataflow.profile.ops)
        self._own_ready = {item.value: item.need if item.need != NEVER else dataflow.end for item in self.items}

    @property
    def mostly_swappable(self) -> bool:
        """Whether swaps can free at least as many bytes as are left to replays alone."""
        leaving = [item for item in self.items if item.can_leave]
        return 2 * sum(item.memory_bytes for item in leaving if item.can_swap) >= sum(i.memory_bytes for i in leaving)

    def _make(self, value: Value) -> Candidate:
        dataflow, link = self.dataflow, self.dataflow.profile.link
        swappable = self.only != "recompute" and value.size_bytes <= self._tier_bytes
        replayable = self.only != "swap" and dataflow.refusal(value.id) is None
        recipe = dataflow.recipe(value.id) if replayable else None
        has_room, gaps = self._has_room(value, slots=1), dataflow.gaps(value)
        return Candidate(
            value=value.id,
            memory_bytes=value.allocated_bytes,
            size_bytes=value.size_bytes,
            out_ms=link.out_ms(value.size_bytes, packs=value.packs),
            in_ms=link.in_ms(value.size_bytes, packs=value.packs),
            displaced_ms=self._displaced_ms(value),
            replay_ms=dataflow.replay_ms(value.id),
            born=value.producer,
            release=dataflow.last_use(value),
            need=value.first_unpack,
            death=value.death,
            can_swap=swappable and (has_room or bool(gaps)),
            can_recompute=replayable and has_room,
            can_join=replayable and not has_room and self._has_room(value, slots=0),
            ops=recipe.ops if recipe else (),
            sources=tuple(s for s in recipe.sources if s in dataflow.activation_ids) if recipe else (),
            gaps=gaps,
            can_wait=swappable and has_room,
        )

    def _displaced_ms(self, value: Value) -> float:
        """Compute advances at rate 1 / (1 + share) while the bytes of a copy move."""
        link = self.dataflow.profile.link
        out_share = link.out_compute_share / (1 + link.out_compute_share)
        in_share = link.in_compute_share / (1 + link.in_compute_share)
        size_bytes, packs = value.size_bytes, value.packs
        in_ms = link.moving_in_ms(size_bytes, packs=packs) if value.first_unpack != NEVER else 0.0
        return out_share * link.moving_out_ms(size_bytes, packs=packs) + in_share * in_ms

    def _has_room(self, value: Value, slots: int) -> bool:
        """Whether at least so many slots lie between its last use by the forward pass and its first by the backward."""
        if not self.dataflow.is_source(value):  # it is written over, so nothing could bring it back
            return False
        until = value.first_unpack if value.first_unpack != NEVER else value.death + 1  # it lives in that slot as well
        return self.dataflow.last_use(value) + slots < until

    def all_of(self, choice: Choice) -> dict[int, Choice]:
        """The choice for every activation for which it frees memory, keep for the others."""
        return {
            item.value: choice if (item.can_swap if choice == "swap" else item.can_recompute) else "keep"
            for item in self.items
        }

    def ready_slots(self, decisions: Decisions) -> dict[int, int]:
        """For each activation that leaves: the slot at whose entry it has to be resident again.

        That is its first unpack, or the slot at which the first replay reads it; `end` where never.
        """
        ready, end = dict(self._own_ready), self.dataflow.end
        for item in reversed(self.items):  # what reads comes after what is read
            at = ready[item.value]
            is_replayed = item.release < at < end  # what the program still holds is not
            if item.sources and decisions.get(item.value) == "recompute" and is_replayed:
                for source in item.sources:
                    if ready.get(source, end) > at:
                        ready[source] = at
        return ready

    def least_points(self, decisions: Decisions) -> numpy.ndarray:
        """int64 array of shape (2 * ops,): bytes that decisions need at each point at the very least.

        No prefetch, no workspace of replays, every copy out done at once: what no schedule can go below.
        """
        ready, life_ends = self.ready_slots(decisions), self.dataflow.life_ends
        places: list[int] = []
        changes: list[int] = []
        turn = 2 * self.dataflow.profile.forward_ops
        resident_bytes = self.dataflow.profile.in_flight.resident_bytes
        for item in self.items:
            if decisions.get(item.value, "keep") != "keep":
                away, back = 2 * (item.release + 1), min(2 * ready[item.value], life_ends[item.value])
                if away <= turn <= back and self.others_hold(item):
                    resident_bytes -= item.memory_bytes
                if away < back:  # else it cannot leave in time
                    places += (away, back)
                    changes += (-item.memory_bytes, item.memory_bytes)
            if decisions.get(item.value, "keep") == "swap":
                for gap in item.gaps:
                    places += (2 * gap.first_slot, 2 * gap.need_slot)
                    changes += (-item.memory_bytes, item.memory_bytes)
        change = numpy.zeros(2 * self.dataflow.end + 1, dtype=numpy.int64)
        numpy.add.at(change, numpy.array(places, dtype=numpy.intp), numpy.array(changes, dtype=numpy.int64))
        points: numpy.ndarray = self.dataflow.in_core_points + numpy.cumsum(change[:-1])
        if self.others:
            points += others_change(self.dataflow, resident_bytes)
        return points

    def may_free(self, decisions: Decisions, point: int | None) -> list[Candidate]:
        """Activations for which another choice can need fewer bytes at a point than `decisions` do, the largest first.

        One that is there could leave; one that is recomputed could stop keeping its sources there. Without a point, or
        with other microbatches in flight, which are counted apart, these are all of them.
        """
        ready = self.ready_slots(decisions)

        def may(item: Candidate) -> bool:
            choice, life = decisions.get(item.value, "keep"), self.away_points(item)
            if choice == "recompute" or point is None or self.others:
                return True
            if not life.start <= point < life.stop:
                return False
            waits = choice == "swap" and 2 * (item.release + 1) <= point < 2 * ready[item.value]
            hides = choice == "swap" and any(2 * gap.first_slot <= point < 2 * gap.need_slot for gap in item.gaps)
            return not waits and not hides

        return sorted(filter(may, self.items), key=lambda item: (-item.memory_bytes, item.value))

    def others_hold(self, item: Candidate) -> bool:
        """Whether the microbatches between their passes hold the value if it is kept."""
        turn = 2 * self.dataflow.profile.forward_ops
        return 2 * item.born + 1 <= turn < self.dataflow.life_ends[item.value]

    def away_points(self, item: Candidate) -> slice:
        """Points at which the value can be away at the very most, where no replay reads it."""
        return slice(2 * item.first_away, min(2 * self._own_ready[item.value], self.dataflow.life_ends[item.value]))

    def least_ms(self, decisions: Decisions) -> float:
        """Compute time that decisions cost at the very least: each op of a replay counted once, copies free."""
        ready = self.ready_slots(decisions)
        replayed = {
            op
            for item in self.items
            if decisions.get(item.value, "keep") == "recompute" and item.release < ready[item.value] < self.dataflow.end
            for op in item.ops
        }
        return self.compute_ms + sum(self.dataflow.replay_times_ms[op] for op in replayed)

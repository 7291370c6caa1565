"""Walks a profile under a budget: values leave by a rule and come back when they are read.

Before the live bytes of a point would exceed the budget, values leave until they do not. A value can leave if autograd
has saved it, the program no longer holds it, the backward pass has not read it yet, and no replay under way reads it.
When the backward pass reads it, it comes back: copied in, or made again, missing sources first. The sources of a
dropped value are held for it, past the end of their own lives if need be, and can leave themselves.

Copies out are never hidden, because their bytes are needed at once. Copies in are hidden where there is room ahead of
time: during the backward pass the link brings back one swapped value after another, in reverse order of saving.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...ir.plan import Choice
from ...ir.profile import Op
from ..dataflow import Dataflow
from ..streams import Streams
from .rules import Evictable, Leaving, Makings, Rule

GIVES_UP = 20  # times the ops of the step: a run that replays so many gets nowhere, and nothing leaves any more


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """One step as it went.

    Attributes:
        step_ms: its duration.
        peak_bytes: its highest live bytes.
        over_bytes: by how much they passed the budget because nothing more could leave; 0: they never did.
        lost_ms: what it takes longer than in-core.
        decisions: by activation: how it left the last time, "keep" if it never did.
        stall_ms: part of it in which compute waits for copies.
        replay_ms: part of it that replays take.
        evictions: how often a value left.
        copies_out: how often one was copied out (what the tier has from an earlier time is not copied again).
        copies_in: how often one was copied in.
        replays: ops that ran again.
    """

    step_ms: float
    peak_bytes: int
    over_bytes: int
    lost_ms: float
    decisions: dict[int, Choice]
    stall_ms: float
    replay_ms: float
    evictions: int
    copies_out: int
    copies_in: int
    replays: int

    @property
    def feasible(self) -> bool:
        """Whether the budget held throughout."""
        return self.over_bytes == 0


def run_online(
    dataflow: Dataflow, budget_bytes: int, make_rule: Callable[[Makings], Rule], host_budget_bytes: int | None = None
) -> OnlineStep:
    """Simulate one step without a plan.

    Args:
        dataflow: the profile, and the region whose activations can leave.
        budget_bytes: bound on all device bytes.
        make_rule: gives the rule for one step, such as `Cheapest`.
        host_budget_bytes: bound on the bytes in the swap tier; None: unlimited.
    """
    makings = makings_of(dataflow)
    return _Walk(dataflow, budget_bytes, makings, make_rule(makings), host_budget_bytes).run()


def makings_of(dataflow: Dataflow) -> Makings:
    """How the activations of a step are made from one another."""
    recipes, times_ms = dataflow.saved_recipes, dataflow.replay_times_ms
    children: defaultdict[int, list[int]] = defaultdict(list)
    parents = {}
    for value, recipe in recipes.items():
        parents[value] = tuple(source for source in recipe.sources if source in dataflow.activation_ids)
        for parent in parents[value]:
            children[parent].append(value)
    own_ms = {value: sum(times_ms[op] for op in recipe.ops) for value, recipe in recipes.items()}
    return Makings(own_ms, parents, {value: tuple(made) for value, made in children.items()})


class _Walk:
    """The state of the step while it runs."""

    def __init__(
        self, dataflow: Dataflow, budget_bytes: int, makings: Makings, rule: Rule, host_budget_bytes: int | None
    ) -> None:
        self._dataflow = dataflow
        self._profile = dataflow.profile
        self._budget_bytes = budget_bytes
        self._rule = rule
        self._streams = Streams(dataflow.profile.link)
        self._host_left_bytes = math.inf if host_budget_bytes is None else host_budget_bytes
        self._recipes = dataflow.saved_recipes
        self._allocated = dataflow.allocated_bytes
        self._life_ends = dataflow.life_ends
        self._points = dataflow.in_core_points.tolist()
        self._saved = {value.id: place for place, value in enumerate(dataflow.activations)}
        self._ending: defaultdict[int, list[int]] = defaultdict(
            list
        )  # slot at whose entry autograd has let go -> values
        for value in self._profile.values:
            self._ending[self._life_ends[value.id] // 2].append(value.id)
        self._may_leave = [value for value in dataflow.activations if dataflow.is_source(value)]
        self._most_replays = GIVES_UP * dataflow.end

        self._slot = 0
        self._base_bytes = 0  # in-core, at the current point
        self._change_bytes = 0  # against in-core: what is away, and what is held longer
        self._away: dict[int, Choice] = {}
        self._held: Counter[int] = Counter()  # by value: dropped values that are made from it
        self._reading: Counter[int] = Counter()  # by value: replays under way that read it
        self._temporary: set[int] = set()  # made by the replay under way for its own later ops
        self._in_tier: set[int] = set()
        self._ready_ms: dict[int, float] = {}  # by value on its way in: when it is there
        self._fetched: set[int] = set()  # ahead of time, which is tried once: what left again before it was read waits
        self._last_access_ms: dict[int, float] = {}
        self._current = 0
        self._decisions: dict[int, Choice] = {value.id: "keep" for value in dataflow.activations}

        self._now_ms = self._stall_ms = self._replay_ms = 0.0
        self._peak_bytes = self._over_bytes = 0
        self._evictions = self._copies_out = self._copies_in = self._replays = 0

    def run(self) -> OnlineStep:
        unpacked = dict(self._dataflow.anchors)
        for op in self._profile.ops:
            self._slot = op.index
            self._end_lives()
            self._base_bytes = self._points[2 * op.index]
            for value in unpacked.get(op.index, ()):
                if value in self._away:
                    self._bring_back(value)
                self._wait_until(self._ready_ms.pop(value, 0.0))
                self._current = self._saved.get(value, self._current)
            self._base_bytes = self._points[2 * op.index + 1]
            self._make_room(0)
            self._run_op(op)
        lost_ms = self._now_ms - sum(self._dataflow.op_times_ms)
        return OnlineStep(
            self._now_ms, self._peak_bytes, self._over_bytes, lost_ms, self._decisions, self._stall_ms,
            self._replay_ms, self._evictions, self._copies_out, self._copies_in, self._replays,
        )  # fmt: skip

    def _run_op(self, op: Op) -> None:
        if op.phase == "backward":
            self._fetch_ahead()
        self._access((*op.reads, *op.writes))
        self._current = max((self._current, *(self._saved.get(value, 0) for value in op.writes)))
        self._compute(self._dataflow.op_times_ms[op.index])

    # Time

    def _compute(self, work_ms: float) -> None:
        self._now_ms = self._streams.compute(self._now_ms, work_ms)

    def _wait_until(self, end_ms: float) -> None:
        self._stall_ms += max(0.0, end_ms - self._now_ms)
        self._now_ms = max(self._now_ms, end_ms)

    def _access(self, values: Iterable[int]) -> None:
        for value in values:
            self._last_access_ms[value] = self._now_ms

    # Bytes

    def _make_room(self, more_bytes: int) -> None:
        """Values leave until so many more bytes fit; notes the peak that this leads to."""
        over_bytes = self._over_by(more_bytes)
        while over_bytes > 0:
            leaving = self._chosen()
            if leaving is None:
                self._over_bytes = max(self._over_bytes, over_bytes)
                break
            self._evict(leaving)
            over_bytes = self._over_by(more_bytes)
        self._peak_bytes = max(self._peak_bytes, self._budget_bytes + over_bytes)

    def _over_by(self, more_bytes: int) -> int:
        return self._base_bytes + self._change_bytes + more_bytes - self._budget_bytes

    def _lives(self, value: int) -> bool:
        """Whether it exists in-core in this slot."""
        return self._profile.values[value].producer < self._slot and 2 * self._slot < self._life_ends[value]

    def _end_lives(self) -> None:
        """Autograd let go of values: those that dropped ones are made from stay."""
        for value in self._ending.get(self._slot, ()):
            if value in self._away:
                self._change_bytes += self._allocated[value]
                if not self._held[value]:
                    self._forget(value)
            elif self._held[value]:
                self._change_bytes += self._allocated[value]

    def _let_go(self, value: int) -> None:
        """A dropped value needs its sources no longer."""
        pending = list(self._recipes[value].sources)
        while pending:
            source = pending.pop()
            self._held[source] -= 1
            if self._held[source] or self._lives(source):
                continue
            if source not in self._away:
                self._change_bytes -= self._allocated[source]
            elif self._away[source] == "swap":
                self._forget(source)
            else:
                self._rule.made_again(source)
                del self._away[source]
                pending += self._recipes[source].sources

    def _forget(self, value: int) -> None:
        """Nobody wants the value any more."""
        if self._away.pop(value) == "recompute":
            self._rule.made_again(value)
            self._let_go(value)

    # Leaving

    def _chosen(self) -> Leaving | None:
        if self._replays > self._most_replays:
            return None
        chosen = self._rule.choose(self._there(), self._current)
        if chosen is None and self._ready_ms:  # what is on its way can leave again once it is there
            self._wait_until(max(self._ready_ms.values()))
            chosen = self._rule.choose(self._there(), self._current)
        return chosen

    def _there(self) -> list[Evictable]:
        self._ready_ms = {value: end_ms for value, end_ms in self._ready_ms.items() if end_ms > self._now_ms}
        return [self._evictable(value.id) for value in self._may_leave if self._can_leave(value.id)]

    def _can_leave(self, value: int) -> bool:
        if value in self._away or value in self._ready_ms or self._reading[value]:
            return False
        if not self._lives(value):
            return self._held[value] > 0
        facts = self._profile.values[value]
        return facts.release < self._slot and not 0 <= facts.first_unpack <= self._slot

    def _evictable(self, value: int) -> Evictable:
        size_bytes, link = self._profile.values[value].size_bytes, self._profile.link
        out_ms = link.out_ms(size_bytes) + self._profile.hooks.copy_ms
        if value in self._in_tier:
            out_ms = 0.0
        elif size_bytes > self._host_left_bytes:
            out_ms = math.inf
        return Evictable(
            value=value,
            size_bytes=self._allocated[value],
            can_drop=value in self._recipes and all(self._is_at_hand(i) for i in self._recipes[value].sources),
            out_ms=out_ms,
            in_ms=link.in_ms(size_bytes) + self._profile.hooks.copy_ms,
            staleness_ms=self._now_ms - self._last_access_ms[value],
            saved=self._saved[value],
        )

    def _is_at_hand(self, source: int) -> bool:
        """Whether the value is there or can be brought back."""
        return self._lives(source) or self._held[source] > 0

    def _evict(self, leaving: Leaving) -> None:
        value = leaving.value
        self._away[value] = self._decisions[value] = leaving.choice
        self._change_bytes -= self._allocated[value]
        self._evictions += 1
        if leaving.choice == "recompute":
            self._held.update(self._recipes[value].sources)
            self._rule.dropped(value)
        elif value not in self._in_tier:
            self._in_tier.add(value)
            self._host_left_bytes -= self._profile.values[value].size_bytes
            self._copies_out += 1
            self._begin_copy()
            self._wait_until(self._streams.copy_out(self._now_ms, self._profile.values[value].size_bytes)[1])

    # Coming back

    def _bring_back(self, wanted: int) -> None:
        """Copy the value in, or make it again, missing sources first."""
        under_way: list[int] = []
        pending = [wanted]
        while pending:
            value = pending[-1]
            if value not in self._away:
                pending.pop()
            elif self._away[value] == "swap":
                self._wait_until(self._copy_in(value))
            elif under_way and under_way[-1] == value:  # its sources are there
                self._make_again(value)
                self._reading.subtract(self._recipes[value].sources)
                under_way.pop()
            else:
                under_way.append(value)
                self._reading.update(self._recipes[value].sources)
                self._wait_until(max((self._ready_ms.pop(i, 0.0) for i in self._recipes[value].sources), default=0.0))
                pending += [source for source in reversed(self._recipes[value].sources) if source in self._away]

    def _copy_in(self, value: int) -> float:
        """Returns when it is there."""
        self._make_room(self._allocated[value])
        self._arrived(value)
        self._copies_in += 1
        self._begin_copy()
        return self._streams.copy_in(self._now_ms, self._profile.values[value].size_bytes)[1]

    def _begin_copy(self) -> None:
        self._compute(self._profile.hooks.copy_ms)

    def _fetch_ahead(self) -> None:
        """One copy in at a time, of the swapped value that is likely to be read next, where there is room for it."""
        if any(end_ms > self._now_ms for end_ms in self._ready_ms.values()):
            return
        swapped = (value for value, choice in self._away.items() if choice == "swap" and value not in self._fetched)
        ahead = (value for value in swapped if self._saved[value] < self._current)
        following = max(ahead, key=lambda value: self._saved[value], default=None)
        if following is not None and self._over_by(self._allocated[following]) <= 0:
            self._fetched.add(following)
            self._ready_ms[following] = self._copy_in(following)

    def _arrived(self, value: int) -> None:
        self._change_bytes += self._allocated[value]
        choice = self._away.pop(value)
        self._access((value,))
        if choice == "recompute":
            self._rule.made_again(value)
            self._let_go(value)

    def _make_again(self, value: int) -> None:
        """Run the value's recipe; its other outputs that are missing stay as well."""
        ops = [self._profile.ops[index] for index in self._recipes[value].ops]
        last_reader = {read: op.index for op in ops for read in op.reads}
        for op in ops:
            over = {self._profile.values[made].overwrites for made in op.writes} & self._temporary
            reused_bytes = sum(self._allocated[other] for other in over if last_reader[other] == op.index)
            self._make_room(self._dataflow.replay_room_bytes[op.index] - reused_bytes)
            self._access(op.reads)
            began_ms = self._now_ms
            self._compute(self._dataflow.replay_times_ms[op.index])
            self._replay_ms += self._now_ms - began_ms
            self._replays += 1
            for made in op.writes:
                if self._away.get(made) == "recompute":
                    self._arrived(made)
                elif last_reader.get(made, -1) > op.index:
                    self._temporary.add(made)
                    self._change_bytes += self._allocated[made]
            finished = {other for other in self._temporary if last_reader[other] <= op.index}
            self._temporary -= finished
            self._change_bytes -= sum(self._allocated[other] for other in finished)

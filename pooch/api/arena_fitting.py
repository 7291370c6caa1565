"""Plan -> plan whose arena, and not only the sum of its live bytes, is within the budget.

Lowering takes a budget for each point of the step. Where blocks of the packed arena lie above the budget, the points at
which they live get a smaller one, so that the next lowering frees values earlier there, brings them back later, or does
so elsewhere; then the arena is packed again. This is repeated until the arena fits. Plans for smaller budgets take part
as well, each repaired in the same way, and the fastest plan of all is given room again piece by piece, as long as that
makes it faster.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy

from ..ground.errors import InfeasibleBudget
from ..ir.layout import Layout, StepLayout
from ..packing import pack, verify
from ..planner import Evaluation, PolicyOutcome
from ..simulator import BlockMaker, StepBlocks
from .evaluation import StageEvaluator
from .step_layouts import placed

Replan = Callable[[int, bool], PolicyOutcome]
"""Makes a plan for a budget of live bytes; True: as thoroughly as was asked for, False: quickly."""

_LONG_ROUNDS = 30  # of the packer, for a plan that would fit as it is
_FIRST_ROUNDS = 9  # for a plan for fewer live bytes
_ROUNDS = 3  # for each repair of it
_REPAIRS = 16
_SHARES = (0.985, 0.97, 0.955, 0.94, 0.92, 0.90, 0.87, 0.83)  # of what the budget leaves for the arena
_PIECES = (2, 4, 8, 16, 32)  # in which room is given back
_NO_LIMIT_S = 1e6  # rounds end a search, so that the same plan comes out every time


@dataclass(frozen=True, slots=True)
class FittedPlan:
    """A plan whose arena is within the budget.

    Attributes:
        planned: decisions and schedule.
        layout: the arena of the step.
    """

    planned: PolicyOutcome
    layout: StepLayout


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Decisions lowered under budgets by point, and packed."""

    planned: PolicyOutcome
    evaluation: Evaluation
    budgets: numpy.ndarray
    found: StepBlocks
    layout: Layout

    @property
    def total_bytes(self) -> int:
        return self.found.outside_bytes + self.layout.arena_bytes

    @property
    def step_ms(self) -> float:
        return self.evaluation.timeline.step_ms


@dataclass(slots=True)
class ArenaFitting:
    """Looks for the fastest plan whose arena fits.

    Attributes:
        evaluator: lowering and simulation.
        budget_bytes: what the arena and what exists outside of it may take.
        host_budget_bytes: what swapped values may take in the tier; None: no limit.
        deadline_s: when to stop looking for something better, on the monotonic clock; a safety net.
        smallest_bytes: the smallest total that was seen.
    """

    evaluator: StageEvaluator
    budget_bytes: int
    host_budget_bytes: int | None = None
    deadline_s: float = math.inf
    smallest_bytes: int = 1 << 60
    _maker: BlockMaker = field(init=False)

    def __post_init__(self) -> None:
        self._maker = BlockMaker(self.evaluator.dataflow)

    def as_it_is(self, planned: PolicyOutcome) -> FittedPlan | None:
        """Return a plan with its arena if that fits without any change."""
        attempt = self._packed_long(planned)
        return self._told(attempt, planned) if self._fits(attempt) else None

    def total_bytes(self, planned: PolicyOutcome) -> int:
        """Return what a plan takes with its arena."""
        return self._packed_long(planned).total_bytes

    def fit(self, planned: PolicyOutcome, replan: Replan, leanest: Callable[[], PolicyOutcome]) -> FittedPlan:
        """Return the fastest plan found whose arena fits.

        Args:
            planned: the plan whose live bytes keep the budget, and whose arena does not.
            replan: makes plans for fewer live bytes.
            leanest: makes the plan for the fewest of them, the last resort.

        Raises:
            InfeasibleBudget: none was found; it carries the smallest total that was seen.
        """
        first = self._packed_long(planned)
        best, share = None, 1.0
        likely = self._shares(first)
        larger = [each for each in reversed(_SHARES) if each > likely[0]]
        for each in (*likely, *larger):  # repairs cost more time than less room does, so that comes first
            found = self._planned_for(each, replan, math.inf if best is None else best.step_ms)
            best, share = (best, share) if found is None else (found, each)
        found = self._repaired(planned, self.budget_bytes, math.inf if best is None else best.step_ms)
        best, share = (best, share) if found is None else (found, 1.0)
        if best is None:
            best = self._if_fits(self._packed_long(leanest()))
        if best is None:
            raise InfeasibleBudget(self.budget_bytes, self.smallest_bytes)
        if share < 1:
            thorough = self._planned_for(share, replan, best.step_ms, is_thorough=True)
            best = best if thorough is None else thorough
        return self._told(self._given_room(best), planned)

    def _shares(self, first: _Attempt) -> tuple[float, ...]:
        """The shares to begin with: those under which an arena as wasteful as the first one may fit."""
        likely = tuple(share for share in _SHARES if share * first.layout.ratio <= 1)
        return likely or _SHARES[-1:]

    def _planned_for(
        self, share: float, replan: Replan, limit_ms: float, *, is_thorough: bool = False
    ) -> _Attempt | None:
        """Plan for a share of the room for the arena, and repair that; None unless it fits and is faster."""
        if self._is_late():
            return None
        live_bytes = self._live_bytes(share)
        try:
            plan = replan(live_bytes, is_thorough)
        except InfeasibleBudget:
            return None
        return self._repaired(plan, live_bytes, limit_ms)

    def _live_bytes(self, share: float) -> int:
        """A budget for live bytes: what is outside of the arena, and a share of what is left for it."""
        outside_bytes = self._maker.outside_bytes
        return outside_bytes + int((self.budget_bytes - outside_bytes) * share)

    def _repaired(self, planned: PolicyOutcome, live_bytes: int, limit_ms: float) -> _Attempt | None:
        """Take room away where blocks lie too high, until none does; None if they still do in the end, or if the step
        gets as long as `limit_ms` before.
        """
        budgets = self._everywhere(live_bytes)
        rounds = _FIRST_ROUNDS
        least = self.evaluator.evaluate(planned.decisions, 0).timeline.point_bytes
        for _ in range(_REPAIRS):
            lowered = self.evaluator.evaluate(planned.decisions, budgets)
            if lowered.timeline.step_ms >= limit_ms:
                return None
            attempt, rounds = self._attempt(planned, lowered, budgets, rounds), _ROUNDS
            if self._fits(attempt):
                return attempt
            excess = self._excess(attempt)
            reachable = numpy.minimum(budgets, numpy.maximum(attempt.evaluation.timeline.point_bytes, least))
            smaller = numpy.maximum(reachable - excess // 4, least)
            changed = numpy.where(excess > 0, smaller, budgets)
            if self._is_late() or (changed == budgets).all():
                return None
            budgets = changed
        return None

    def _excess(self, attempt: _Attempt) -> numpy.ndarray:
        """By point: how far the highest block that lives there is over the budget."""
        limit_bytes = self.budget_bytes - attempt.found.outside_bytes
        firsts = [first for first, _ in attempt.found.point_ticks]
        excess = numpy.zeros(len(firsts), dtype=numpy.int64)
        for item, offset in zip(attempt.found.items, attempt.layout.offsets, strict=True):
            over = offset + item.block.size_bytes - limit_bytes
            if over > 0:
                begin, end = bisect_right(firsts, item.block.lower) - 1, bisect_right(firsts, item.block.upper - 1)
                excess[begin:end] = numpy.maximum(excess[begin:end], over)
        return excess

    def _given_room(self, best: _Attempt) -> _Attempt:
        """Give room back, piece by piece of the step, where the plan gets faster and still fits."""
        end = len(best.budgets)
        for pieces in _PIECES:
            for piece in range(pieces):
                begin, stop = end * piece // pieces, end * (piece + 1) // pieces
                if self._is_late() or (best.budgets[begin:stop] >= self.budget_bytes).all():
                    continue
                budgets = best.budgets.copy()
                budgets[begin:stop] = self.budget_bytes
                tried = self.evaluator.evaluate(best.planned.decisions, budgets)
                if tried.timeline.step_ms < best.step_ms and tried.timeline.peak_bytes <= self.budget_bytes:
                    attempt = self._attempt(best.planned, tried, budgets, _ROUNDS)
                    best = attempt if self._fits(attempt) else best
        return best

    def _packed_long(self, planned: PolicyOutcome) -> _Attempt:
        """Pack a plan as it is, and look longer than for repairs."""
        budgets = self._everywhere(planned.timeline.peak_bytes)
        return self._attempt(planned, planned.evaluation, budgets, _LONG_ROUNDS)

    def _attempt(self, planned: PolicyOutcome, evaluation: Evaluation, budgets: numpy.ndarray, rounds: int) -> _Attempt:
        found = self._maker.blocks(evaluation.schedule)
        layout = pack(found.blocks, max_rounds=rounds, time_limit_s=_NO_LIMIT_S)
        attempt = _Attempt(planned, evaluation, budgets, found, layout)
        self.smallest_bytes = min(self.smallest_bytes, attempt.total_bytes)
        return attempt

    def _if_fits(self, attempt: _Attempt) -> _Attempt | None:
        return attempt if self._fits(attempt) else None

    def _fits(self, attempt: _Attempt) -> bool:
        host_bytes = attempt.evaluation.schedule.host_bytes
        return attempt.total_bytes <= self.budget_bytes and (
            self.host_budget_bytes is None or host_bytes <= self.host_budget_bytes
        )

    def _everywhere(self, budget_bytes: int) -> numpy.ndarray:
        return numpy.full(2 * self.evaluator.dataflow.end, budget_bytes, dtype=numpy.int64)

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline_s

    def _told(self, attempt: _Attempt, planned: PolicyOutcome) -> FittedPlan:
        """The result, with the bound of the plan for live bytes: no arena is smaller than the bytes that live in it."""
        verify(attempt.found.blocks, attempt.layout)
        notes = attempt.planned.notes
        if attempt.evaluation is not planned.evaluation and planned.step_ms > 0:
            longer = attempt.step_ms / planned.step_ms - 1
            notes = (*notes, f"fitting the arena lengthened the step by {longer:.2%}")
        made = replace(
            attempt.planned, evaluation=attempt.evaluation, lower_bound_ms=planned.lower_bound_ms, notes=notes
        )
        return FittedPlan(made, placed(attempt.found, attempt.layout))

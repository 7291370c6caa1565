"""The integer programs of one request: a relaxation, then programs with what the simulator showed it had left out.

The first program is a relaxation of the simulator's model, so its dual bound holds for every plan. Later ones reserve
bytes where the simulator took more than the program had counted, and mark the slots where that happened; their plans
fit better and their bounds mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...ir.plan import Choice
from ..candidates import Candidates
from ..contract import PlanningRequest, PolicyOutcome, gap_between
from ..program.marks import Marks, choose_marks, make_marks
from ..program.solver import Limits, Solution, SolverUnavailable, solve
from ..program.step_program import StepProgram
from .rules import repair
from .time_limit import SHARES
from .trials import Trial, Trials

SMALL_SHARE = 0.0005  # activations below this share of the budget are left out of the program (of many: none is)
SOLVER_GAP = 0.004
SOLVER_NODES = 50  # of branch and bound
TOLERANCE = 1e-5  # what a solver's sums may be off by, taken from its bounds
CLOSE_ENOUGH = 0.001  # a plan this near the bound is not worth another solve
NO_TIME = "the time limit left no time for the integer program: the plan comes from simple rules"


@dataclass(frozen=True, slots=True)
class Detail:
    """How finely programs describe the step, and how far they are solved.

    Attributes:
        pieces: per phase, that the marks cut it into.
        merge: repeated blocks within a piece become classes, and no activation is too small to be in the program.
        gap: relative distance between solution and bound at which the solver is done.
        nodes: branch-and-bound nodes of the solver at most.
    """

    pieces: int
    merge: bool
    gap: float = SOLVER_GAP
    nodes: int = SOLVER_NODES


FINE = Detail(pieces=48, merge=False)
OF_MANY = Detail(pieces=24, merge=True)  # few enough that several blocks lie in a piece


class Programs:
    """Builds, solves and corrects the programs of one request, and keeps the bound that they prove.

    Args:
        trials: the plans so far, and the request that they are for.
        detail: of the programs; None: as suits the number of activations.
    """

    def __init__(self, trials: Trials, detail: Detail | None = None) -> None:
        self.trials = trials
        self.detail = detail or (OF_MANY if trials.many else FINE)
        self.request: PlanningRequest = trials.request
        self.candidates: Candidates = trials.candidates
        self.bound_ms = self.candidates.compute_ms
        self.is_proven = False
        self.notes: list[str] = []
        self.marks: Marks = choose_marks(self.candidates, self.detail.pieces)
        self.reserve_bytes: dict[int, int] = {}
        self.host_reserve_bytes = 0

    @property
    def gap(self) -> float:
        """Between the best plan and the bound."""
        return gap_between(self.trials.best.step_ms, self.bound_ms) if self.trials.best is not None else 1.0

    def solve(self, number: int) -> dict[int, Choice] | None:
        """Decisions of the program of round `number`; the first one also gives the bound.

        Returns:
            None where the plan is close enough to the bound, the time is over, or the solver has no solution.
        """
        if self.gap <= CLOSE_ENOUGH:
            return None
        if not self.request.has_left(SHARES.another_round):
            if not self.is_proven:
                self.notes.append(NO_TIME)
            return None
        program = self.relaxation() if number == 0 else self._program(self.reserve_bytes, self.host_reserve_bytes)
        try:
            solution = self._solved(program, SHARES.round if number else SHARES.bound)
        except SolverUnavailable as error:
            self.notes.append(f"{error}; the plan comes from simple rules and local search")
            return None
        if number == 0:
            self._take_bound(solution)
        return program.decisions(solution.values) if solution.values else None

    def prove_bound(self, share: float = SHARES.bound) -> None:
        """Solve the relaxation for its bound alone: inf where nothing fits.

        Raises:
            SolverUnavailable: HiGHS is not installed, or it crashed.
        """
        self._take_bound(self._solved(self.relaxation(), share))

    def tighten_bound(self) -> None:
        """Solve the relaxation once more, with marks where the best plan takes nearly the whole budget."""
        if self.trials.best is None or not self.is_proven or not self.request.has_left(SHARES.tightening):
            return
        self._mark(_fullest_slots(self.trials.best, self.marks, 0.98 * self.request.budget_bytes))
        try:
            self.prove_bound(SHARES.round)
        except SolverUnavailable as error:
            self.notes.append(f"the bound could not be tightened: {error}")

    def correct(self, trial: Trial) -> None:
        """Reserve what the simulator takes beyond the program's count where it is over the budget."""
        if self.detail.merge:  # classes are rounded as one
            repair(self.trials, trial.decisions)
        points = trial.evaluation.timeline.point_bytes
        counted = self.candidates.least_points(trial.decisions)
        slots = _fullest_slots(trial, self.marks, self.request.budget_bytes)
        for slot in slots:
            taken = int(max(points[2 * slot], points[2 * slot + 1]))
            beyond = taken - int(counted[2 * slot + 1])
            self.reserve_bytes[slot] = max(self.reserve_bytes.get(slot, 0), beyond)
        self._mark(slots)
        if not self.trials.fits_host(trial.evaluation):
            swapped = sum(i.size_bytes for i in self.candidates.items if trial.decisions[i.value] == "swap")
            self.host_reserve_bytes += max(1, trial.evaluation.schedule.host_bytes - swapped)

    def outcome(self, *notes: str) -> PolicyOutcome:
        """The best plan so far, which there is, and the bound; `notes` come before those on what happened."""
        best = self.trials.best
        assert best is not None, "planning starts from a plan that fits"
        told = tuple(dict.fromkeys([*notes, *self.notes]))
        return PolicyOutcome(best.decisions, best.evaluation, self.bound_ms, self.is_proven, told)

    def relaxation(self) -> StepProgram:
        """The program without reserves: its optimum is a lower bound for every plan."""
        return self._program({}, 0)

    def _program(self, reserve_bytes: dict[int, int], host_reserve_bytes: int) -> StepProgram:
        host_bytes, merge = self.request.host_budget_bytes, self.detail.merge
        return StepProgram(
            self.candidates,
            self.marks,
            self.request.budget_bytes,
            host_budget_bytes=None if host_bytes is None else max(0, host_bytes - host_reserve_bytes),
            reserve_bytes=reserve_bytes,
            least_bytes=0 if merge else int(SMALL_SHARE * self.request.budget_bytes),
            merge=merge,
        )

    def _solved(self, program: StepProgram, share: float) -> Solution:
        """Solve a program from the best plan so far, within counts and a share of the time that is left."""
        best, left_s = self.trials.best, self.request.remaining_s()
        start = program.values_of(best.decisions) if best is not None else None
        limits = Limits(self.detail.gap, self.detail.nodes, max(0.1, share * left_s), max(0.1, SHARES.solver * left_s))
        return solve(program.problem, limits, start)

    def _take_bound(self, solution: Solution) -> None:
        self.is_proven = True
        self.bound_ms = max(self.bound_ms, solution.bound * (1 - TOLERANCE))

    def _mark(self, slots: Iterable[int]) -> None:
        self.marks = make_marks(self.candidates, sorted({*self.marks.slots, *(s for s in slots if s > 0)}))


def _fullest_slots(trial: Trial, marks: Marks, over_bytes: float) -> list[int]:
    """In each interval in which the plan takes more than `over_bytes`: the slot where it takes most."""
    points = trial.evaluation.timeline.point_bytes
    fullest: dict[int, tuple[int, int]] = {}  # by interval: bytes and slot
    for slot in range(len(points) // 2):
        taken = int(max(points[2 * slot], points[2 * slot + 1]))
        if taken > over_bytes:
            t = marks.interval_of(slot)
            fullest[t] = max(fullest.get(t, (0, 0)), (taken, slot))
    return sorted(slot for _, slot in fullest.values())

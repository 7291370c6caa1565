"""The integer program, closed over the simulator: solve, lower, simulate, correct what the program did not see, repeat.

The first program is a relaxation of the simulator's model, so its dual bound holds for every plan. Later ones
reserve bytes where the simulator took more than the program had counted, and mark the slots where that happened;
their plans fit better and their bounds say nothing. A local search on the simulator polishes the best plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from pooch.errors import InfeasibleBudget
from pooch.planner.candidates import Candidates
from pooch.planner.contract import OPTIMAL_GAP, PlanningRequest, PolicyOutcome
from pooch.planner.program.marks import Marks, choose_marks, make_marks
from pooch.planner.program.solver import Limits, Solution, SolverUnavailable
from pooch.planner.program.step_program import StepProgram
from pooch.planner.search.evaluators import OutOfTime, Timed
from pooch.planner.search.leanest import leanest_plan
from pooch.planner.search.local_search import Effort, improve
from pooch.planner.search.repair import repair
from pooch.planner.search.rules import MANY, try_rules
from pooch.planner.search.stall_rule import classify_by_stalls
from pooch.planner.search.trials import Trial, Trials

PIECES = 48  # per phase, that the marks cut it into
PIECES_OF_MANY = 24  # the same for many activations, so that several blocks lie in a piece and become classes
ROUNDS = 4  # programs solved for a plan at most
SMALL_SHARE = 0.0005  # activations below this share of the budget are left out of the program (of many: none is)
SOLVER_GAP = 0.004
RULES_SHARE = 0.25  # of the time limit that the dearest rule may take
FIRST_SHARE = 0.35  # of the time that is left, for the program that gives the bound
SOLVER_NODES = 50
TOLERANCE = 1e-5  # what a solver's sums may be off by, taken from its bounds
CLOSE_ENOUGH = 0.001  # a plan this near the bound is not worth another solve
FIRST_EFFORT = Effort(trials=80, passes=1, starts=1)
LAST_EFFORT = Effort(trials=250, passes=4)
LONG_EFFORT = 150_000  # activations times evaluations of a local search at most


def plan_by_program(request: PlanningRequest, candidates: Candidates, policy: str) -> PolicyOutcome:
    """Plan the candidates with the choices that they allow.

    Args:
        policy: who asks.

    Raises:
        InfeasibleBudget: no plan was found.
    """
    trials = Trials(request, candidates)
    kept = trials.run({})
    if kept.fits:
        return PolicyOutcome(kept.decisions, kept.evaluation, kept.step_ms, True, ("everything fits",))
    for known in request.known:
        trials.offer(trials.complete(known.decisions), known.evaluation)
    planning = _Planning(request, trials)
    try:
        _try_rules(trials)
    except KeyboardInterrupt:
        if trials.best is None:
            raise
        return planning.interrupted()
    if trials.best is None:
        _try_leanest(trials, policy)
    return planning.run()


def program_bound_ms(request: PlanningRequest, candidates: Candidates) -> float:
    """A time that no plan of the candidates under the budget is below: inf where none fits, -inf where nobody knows."""
    program = _build_program(request, candidates, _first_marks(candidates), {}, 0)
    try:
        solution = program.program.solve(_limits(request, FIRST_SHARE))
    except SolverUnavailable:
        return -math.inf
    return max(candidates.compute_ms, solution.bound * (1 - TOLERANCE))


def is_final(outcome: PolicyOutcome) -> bool:
    """Whether nothing faster can be found, or nobody wants to wait for it."""
    return outcome.interrupted or outcome.step_ms <= outcome.lower_bound_ms + 1e-9


def _is_many(candidates: Candidates) -> bool:
    return len(candidates.items) > MANY


def _first_marks(candidates: Candidates) -> Marks:
    return choose_marks(candidates, PIECES_OF_MANY if _is_many(candidates) else PIECES)


def _limits(request: PlanningRequest, share: float) -> Limits:
    """For the solver: counts, and a share of the time that is left."""
    left_s = request.remaining_s()
    return Limits(SOLVER_GAP, SOLVER_NODES, time_s=max(0.1, share * left_s), latest_s=max(0.1, 0.9 * left_s))


def _build_program(
    request: PlanningRequest,
    candidates: Candidates,
    marks: Marks,
    reserve_bytes: dict[int, int],
    host_reserve_bytes: int,
) -> StepProgram:
    host_bytes, many = request.host_budget_bytes, _is_many(candidates)
    return StepProgram(
        candidates,
        marks,
        request.budget_bytes,
        host_budget_bytes=None if host_bytes is None else max(0, host_bytes - host_reserve_bytes),
        reserve_bytes=reserve_bytes,
        least_bytes=0 if many else int(SMALL_SHARE * request.budget_bytes),
        merge=many,
    )


def _try_rules(trials: Trials) -> None:
    """Quick plans to start from; the dearest rule only gets a share of the time."""
    request = trials.request
    request.report("trying simple rules", 0.05)
    try_rules(trials)
    until_s = request.started_s + RULES_SHARE * request.time_limit_s
    timed = Trials(replace(request, progress=None, evaluator=Timed(request.evaluator, until_s)), trials.candidates)
    with suppress(OutOfTime):
        classify_by_stalls(timed)
    for trial in timed.elite:
        trials.offer(trial.decisions, trial.evaluation)


def _try_leanest(trials: Trials, policy: str) -> None:
    """The last resort: the plan that needs the fewest bytes.

    Raises:
        InfeasibleBudget: even that one does not fit.
    """
    leanest = leanest_plan(trials)
    if leanest.budget_bytes > trials.request.budget_bytes:
        raise InfeasibleBudget(trials.request.budget_bytes, leanest.budget_bytes, policy)
    trials.run(leanest.decisions, leanest.budget_bytes)


class _Planning:
    """One request's way from a simple plan to the best that is found.

    Args:
        request: what is asked. trials: hold a plan that fits when it runs.
    """

    def __init__(self, request: PlanningRequest, trials: Trials) -> None:
        self.request = request
        self.trials = trials
        self.candidates = trials.candidates
        self.bound_ms = self.candidates.compute_ms
        self.notes: list[str] = []
        self.is_proven = False
        self.many = _is_many(self.candidates)
        self.marks = _first_marks(self.candidates)
        self.reserve_bytes: dict[int, int] = {}
        self.host_reserve_bytes = 0

    def run(self) -> PolicyOutcome:
        """Solve, correct, improve; whatever interrupts that, the best plan so far is the answer."""
        try:
            self._search()
        except KeyboardInterrupt:
            return self.interrupted()
        return self._outcome()

    def interrupted(self) -> PolicyOutcome:
        """The best plan so far."""
        return self._outcome().stopped()

    def _outcome(self) -> PolicyOutcome:
        best = self._best()
        return PolicyOutcome(best.decisions, best.evaluation, self.bound_ms, self.is_proven, tuple(self.notes))

    def _search(self) -> None:
        most_s = 0.7 * self.request.time_limit_s  # that much is left to the program
        if not self.many:  # a good start makes the solver quick
            improve(self.trials, replace(FIRST_EFFORT, least_s=most_s), self.bound_ms)
        try:
            self._solve_rounds()
        except SolverUnavailable as error:
            self.notes.append(f"{error}; the plan comes from simple rules and local search")
        if not self.is_proven and not self.notes and self._gap() > OPTIMAL_GAP:
            self.notes.append("the time limit left no time for the integer program: the plan comes from simple rules")
        self.request.report("improving the plan", 0.7)
        if not self.many or self._gap() > SOLVER_GAP:
            improve(self.trials, self._last_effort(), self.bound_ms)
        has_time = self.request.remaining_s() > 0.2 * self.request.time_limit_s
        if self.is_proven and self._gap() > OPTIMAL_GAP and has_time:
            self._tighten_bound()

    def _last_effort(self) -> Effort:
        """Fewer evaluations where each takes longer."""
        most = max(4, LONG_EFFORT // max(1, len(self.candidates.items)))
        return replace(LAST_EFFORT, trials=min(LAST_EFFORT.trials, most), starts=2) if self.many else LAST_EFFORT

    def _best(self) -> Trial:
        assert self.trials.best is not None, "planning starts from a plan that fits"
        return self.trials.best

    def _gap(self) -> float:
        step_ms = self._best().step_ms
        return (step_ms - self.bound_ms) / step_ms if step_ms > 0 else 0.0

    def _solve_rounds(self) -> None:
        for number in range(ROUNDS):
            if self._gap() <= CLOSE_ENOUGH or self.request.remaining_s() <= 0.1 * self.request.time_limit_s:
                return
            self.request.report(f"solving the integer program, round {number + 1}", 0.1 + 0.6 * number / ROUNDS)
            program = self._program(self.reserve_bytes, self.host_reserve_bytes)
            solution = self._solve(program, share=FIRST_SHARE if number == 0 else 0.2)
            if number == 0:
                self._take_bound(solution)
            if not solution.values:
                return
            decisions = program.decisions(solution.values)
            trial = self.trials.run(decisions)
            if trial.fits:
                return
            if self.many:
                repair(self.trials, decisions)
            self._correct(trial)

    def _program(self, reserve_bytes: dict[int, int], host_reserve_bytes: int) -> StepProgram:
        return _build_program(self.request, self.candidates, self.marks, reserve_bytes, host_reserve_bytes)

    def _solve(self, program: StepProgram, share: float) -> Solution:
        solution = program.program.solve(_limits(self.request, share), program.start(self._best().decisions))
        if solution.solver == "CBC" and not self.is_proven:
            self.notes.append("HiGHS is missing, CBC was used")
        return solution

    def _take_bound(self, solution: Solution) -> None:
        """The dual bound of a program without reserves holds for every plan."""
        self.is_proven = True
        self.bound_ms = max(self.bound_ms, solution.bound * (1 - TOLERANCE))

    def _tighten_bound(self) -> None:
        """Solve the relaxation once more with the marks that the simulator pointed at."""
        self.request.report("tightening the bound", 0.9)
        self._mark(_fullest_slots(self._best(), self.marks, 0.98 * self.request.budget_bytes))
        try:
            self._take_bound(self._solve(self._program({}, 0), share=0.2))
        except SolverUnavailable as error:
            self.notes.append(f"the bound could not be tightened: {error}")

    def _correct(self, trial: Trial) -> None:
        """Reserve what the simulator takes beyond the program's count where it is over the budget."""
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

    def _mark(self, slots: Iterable[int]) -> None:
        self.marks = make_marks(self.candidates, sorted({*self.marks.slots, *(s for s in slots if s > 0)}))


def _fullest_slots(trial: Trial, marks: Marks, over_bytes: float) -> list[int]:
    """In each interval in which the plan takes more than `over_bytes`: the slot where it takes most."""
    points = trial.evaluation.timeline.point_bytes
    fullest: dict[int, int] = {}
    for slot in range(len(points) // 2):
        taken = max(points[2 * slot], points[2 * slot + 1])
        if taken > over_bytes:
            t = marks.interval_of(slot)
            best = fullest.get(t, slot)
            fullest[t] = slot if taken >= max(points[2 * best], points[2 * best + 1]) else best
    return sorted(fullest.values())

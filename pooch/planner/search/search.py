"""How a plan is found: the whole algorithm, from top to bottom."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from ...ground.errors import InfeasibleBudget
from ...ground.units import format_ms
from ..candidates import LEAVING, Candidates, Leaving
from ..contract import FITS, OPTIMAL_GAP, PlanningRequest, PolicyOutcome
from ..program.solver import SolverUnavailable
from .fast import fast_search
from .leanest import try_few_swaps, try_leanest, try_starts
from .local_search import Effort, improve
from .programs import SOLVER_GAP, Programs
from .rules import fit_rule, idle_first, try_rules, warm_start
from .stall_rule import classify_by_stalls
from .time_limit import SHARES, OutOfTime, Timed, part_of
from .trials import Trials

ROUNDS = 4  # programs solved for a plan at most
FIRST_EFFORT = Effort(trials=80, passes=1, starts=1, leave_share=SHARES.programs)
LAST_EFFORT = Effort(trials=250, passes=4, starts=6)
FAR = 2  # times the in-core step: a plan as slow as this may only be a bad place to start from
RUNG_PERCENT = 5  # of the in-core peak: the ladder of smaller budgets, the same for every request
NO_TIME_FOR_RESTRICTED = "the time limit left no time to try swaps alone and replays alone"
NO_TIME_FOR_SMALLER = "the time limit left no time to look at smaller budgets: one of their plans may be faster"


def search(request: PlanningRequest, only: Leaving | None = None, *, smaller: bool = True) -> PolicyOutcome:
    """Find a short step within the budget, and a lower bound for all plans.

    Args:
        request: what to plan.
        only: the one choice that is allowed besides keep; None: both are.
        smaller: also look at plans for smaller budgets, so that more memory is never slower.

    Raises:
        InfeasibleBudget: no plan was found, neither by rules nor by looking for the leanest one.
        KeyboardInterrupt: Ctrl-C was pressed before any plan fitted; later the best plan so far is the answer.
    """
    trials = Trials(request, Candidates(request.dataflow, only, request.host_budget_bytes))

    # 1. Does everything fit already? Nothing is faster.
    kept = trials.run({})
    if kept.fits:
        return PolicyOutcome(kept.decisions, kept.evaluation, kept.step_ms, True, (FITS,))
    _take_given(trials)
    if request.effort == "fast":
        return fast_search(trials)
    programs = Programs(trials)
    try:
        # 2. Simple rules; where none fits, the leanest plan there is. With many activations that takes long to find.
        request.report("trying simple rules", 0.05)
        try_rules(trials)
        if trials.best is None:
            (try_starts if trials.many else try_leanest)(trials)

        # 3. A short local search: a good start makes the solver quick.
        if not trials.many:
            improve(trials, FIRST_EFFORT, programs.bound_ms)
            if trials.best_ms > FAR * trials.candidates.compute_ms:
                start = try_few_swaps(trials, LAST_EFFORT.trials)
                improve(trials, FIRST_EFFORT, programs.bound_ms, starts=[] if start is None else [start])

        # 4. The bound, and rounds of the program: solve, lower, simulate, correct what it did not see.
        _solve_in_rounds(trials, programs)
        if trials.best is None:
            try_leanest(trials)

        # 5. Local search from the best plans, among them the classification by stalls.
        request.report("improving the plan", 0.7)
        _polish(trials, programs)

        # 6. A tighter bound, with marks where the plan is fullest.
        if programs.gap > OPTIMAL_GAP:
            request.report("tightening the bound", 0.9)
            programs.tighten_bound()

        # 7. Fewer choices, and 8. smaller budgets: sometimes their plans lie inside the gap that is left.
        _try_restricted(trials, programs)
        if smaller:
            _try_smaller(trials, programs)
    except KeyboardInterrupt:
        if trials.best is None:
            raise
        return programs.outcome().stopped()
    return programs.outcome()


def restricted(request: PlanningRequest, only: Leaving) -> PolicyOutcome:
    """Plan with keep and one other choice, as a policy of its own.

    The bound of the restricted program does not hold for all plans: it becomes a note.

    Raises:
        InfeasibleBudget: no such plan was found.
    """
    outcome = search(replace(request, known=()), only, smaller=False)
    bound = f"with keep and {only} alone no plan is faster than {format_ms(outcome.lower_bound_ms)}"
    return replace(
        outcome,
        lower_bound_ms=Candidates(request.dataflow).compute_ms,
        proven=False,
        notes=(*outcome.notes, bound) if outcome.proven else outcome.notes,
    )


def rungs_below(peak_bytes: int, budget_bytes: int) -> list[int]:
    """The rungs of the ladder below a budget, the largest first."""
    rungs = (int(percent * peak_bytes / 100) for percent in range(100, 0, -RUNG_PERCENT))
    return [rung_bytes for rung_bytes in rungs if 0 < rung_bytes < budget_bytes]


def _take_given(trials: Trials) -> None:
    """What the caller knows already: plans for smaller budgets, and choices to start from."""
    for known in trials.request.known:
        trials.offer(trials.complete(known.decisions), known.evaluation)
    if trials.request.start is not None:
        warm_start(trials, trials.request.start)


def _solve_in_rounds(trials: Trials, programs: Programs) -> None:
    for number in range(ROUNDS):
        trials.request.report(f"solving the integer program, round {number + 1}", 0.1 + 0.6 * number / ROUNDS)
        decisions = programs.solve(number)
        if decisions is None or (trial := trials.run(decisions)).fits:
            break
        programs.correct(trial)


def _polish(trials: Trials, programs: Programs) -> None:
    """Local search from the best plans and, while the gap is large, from the plans of two rules of their own kind.

    Given to the solver as a start, such a plan makes as many plans slower as faster (docs/planner.md).
    """
    is_close, request = programs.gap <= SOLVER_GAP, trials.request
    if not is_close or not trials.many:
        improve(trials, LAST_EFFORT, programs.bound_ms)
    if is_close:
        return
    for late_rule in (classify_by_stalls, _fit_idle_first):
        timed = Timed(request.evaluator, request.moment_s(SHARES.stall_rule))
        apart = Trials(replace(request, evaluator=timed), trials.candidates)
        with suppress(OutOfTime):
            late_rule(apart)
        if apart.best is not None:
            start = trials.offer(apart.best.decisions, apart.best.evaluation)
            improve(trials, LAST_EFFORT, programs.bound_ms, starts=[start])


def _fit_idle_first(trials: Trials) -> None:
    if not trials.many:
        fit_rule(trials, idle_first(trials.candidates))


def _try_restricted(trials: Trials, programs: Programs) -> None:
    """Plans with swaps alone and with replays alone, where their own bound does not rule out that they are faster.

    The full program is solved to a gap; a restricted one, being smaller, sometimes finds a plan inside it.
    """
    if trials.candidates.only is not None or trials.many:
        return
    for only in LEAVING:
        if not _may_improve(trials, programs, NO_TIME_FOR_RESTRICTED):
            return
        part = replace(part_of(trials.request), known=(), start=None)
        try:
            if _bound_ms(part, only) < trials.best_ms:
                _take(trials, search(part, only, smaller=False))
        except InfeasibleBudget:
            continue
        except OutOfTime:
            programs.notes.append(NO_TIME_FOR_RESTRICTED)
            return


def _try_smaller(trials: Trials, programs: Programs) -> None:
    """Plans for smaller budgets, which are plans for this one: with them, more memory is never slower.

    A plan that depended on all smaller budgets would take all of their time, so there is a ladder, every
    `RUNG_PERCENT` of the in-core peak, the same for every request. A rung's own plan depends on nothing else; the
    answer to a budget is the fastest of its own plan and those of the rungs below it. A rung whose lower bound is not
    below the best plan cannot give a faster one, nor can any rung below it: with a small gap one bound is all that
    this costs.
    """
    request = trials.request
    if not programs.is_proven:  # without bounds every rung would have to be planned
        return
    for rung_bytes in rungs_below(request.dataflow.profile.peak_bytes, request.budget_bytes):
        if not _may_improve(trials, programs, NO_TIME_FOR_SMALLER):
            return
        request.report("looking at smaller budgets", 0.95)
        below = replace(part_of(request), budget_bytes=rung_bytes, known=(), start=None)
        try:
            if _bound_ms(below, None) >= trials.best_ms:
                return
            _take(trials, search(below, smaller=False))
        except InfeasibleBudget:
            return
        except OutOfTime:
            programs.notes.append(NO_TIME_FOR_SMALLER)
            return


def _may_improve(trials: Trials, programs: Programs, no_time: str) -> bool:
    """Whether anything faster can be found, and there is time to look for it; a note says where there is none."""
    if trials.best_ms <= programs.bound_ms + 1e-9:
        return False
    has_time = trials.request.has_left(SHARES.parts)
    if not has_time:
        programs.notes.append(no_time)
    return has_time


def _bound_ms(request: PlanningRequest, only: Leaving | None) -> float:
    """A time that no such plan is below: inf where none fits, -inf where there is no solver to ask."""
    programs = Programs(Trials(request, Candidates(request.dataflow, only, request.host_budget_bytes)))
    try:
        programs.prove_bound()
    except SolverUnavailable:
        return -math.inf
    return programs.bound_ms


def _take(trials: Trials, part: PolicyOutcome) -> None:
    """Remember the plan of a part of the search, and end all of it where Ctrl-C ended that part."""
    trials.offer(part.decisions, part.evaluation)
    if part.interrupted:
        raise KeyboardInterrupt

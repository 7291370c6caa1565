"""Profile + budget -> Plan: the planner, the lowering, the verifier and the simulator in one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle, can_move, with_resident
from ..ground.errors import InfeasibleBudget, UsageError
from ..ground.process_limits import is_limited
from ..ground.progress import PlanningProgress
from ..ground.units import format_ms
from ..ir import Choice, Decision, Decisions, Plan, Profile, Region
from ..ir.arguments import profile_of
from ..ir.layout import StepLayout
from ..ir.persistent import Moves
from ..ir.plan import Bound
from ..planner import Effort, Evaluation, PlanningRequest, PolicyOutcome, described
from ..simulator import simulate as simulate_schedule
from .arena_fitting import ArenaFitting
from .budgets import is_smallest, parse_budget
from .evaluation import StageEvaluator, verified_timeline
from .free_memory import budget_bytes_of
from .hooked import dataflow_of
from .moving import MovingPlanner
from .options import PlanOptions, checked_region, in_flight
from .plan_building import MANUAL, pack_moving, pack_plan
from .planning_aside import is_worthwhile, plan_in_child
from .simulation import simulate
from .splitting import in_slices, whole_or_in_slices

if TYPE_CHECKING:  # importing it would import the solver
    from ..planner import JointSolution

_QUICK_SHARE, _THOROUGH_SHARE = 0.05, 0.3  # of the time limit, for each plan beside which other things move
UNHURRIED_S = 30.0  # for the smallest budget, whatever the time limit of the plan


def plan(
    profile: Profile | str | Path,
    budget: float | str,
    *,
    policy: str = "ilp",
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    region: Region = "model",
    known: Sequence[Plan] = (),
    start: Decisions | None = None,
    policy_options: Mapping[str, object] | None = None,
    explain: bool = True,
    effort: Effort = "full",
    bound: Bound = "live",
    microbatches_in_flight: int = 1,
    moves: Moves = "activations",
    progress: PlanningProgress | None = None,
) -> Plan:
    """Choose keep, swap or recompute for every activation so that the step fits into the budget and loses little time.

    Args:
        profile: the measured step, or the path of a saved profile.
        budget: bytes, a text such as "16GiB", "60%" of the in-core peak, "min": the smallest for which the policy has a
            plan, or "auto": what is free on the device now, less a margin that is told. It bounds all device bytes of
            the process's tensors: parameters, gradients, optimizer state, inputs, temporaries and activations. Fewer
            than 1024 bytes are refused where that is less than 1% of the in-core peak: 16 is more likely to mean
            "16GiB".
        policy: who decides: "ilp" (the integer program) or a published or plain method by name.
        host_budget: bytes that swapped activations may take in the swap tier; None: no limit.
        time_limit_s: most seconds to plan for; what was found until then carries its gap.
        region: "model": the plan will be applied to calls of the model; "step": to `with run.step()`.
        known: plans made before for the same profile and region: where they fit, "ilp" gives nothing slower.
        start: choices to start from, {activation: choice}, such as those of a plan for another shape in the ids of this
            profile. Activations that are not named are kept. Where the choices fit, "ilp" gives nothing slower; where
            they do not, it lets a few more activations leave.
        policy_options: parameters of the policy, such as {"n_tensors": 3} of "tflms".
        explain: also say what other choices would have cost, which takes some hundred simulations. With effort "fast"
            that is left out.
        effort: "full", or "fast" for a good plan after few simulations (about a second of the processor for 500
            activations), which a full search with `known` can refine.
        bound: what the budget bounds: "live", the sum of live bytes, or "arena", the arena in which they lie, as the
            layout saved with the plan has it. Fitting the arena may take the time limit once more.
        microbatches_in_flight: how many forward passes at most precede the backward pass of the first of them, as for a
            pipeline's stage (`pooch.microbatches_in_flight`) or retained forward passes. The profile is that of one;
            budget, predicted peak and host budget are for all of them.
        moves: what may leave: "activations", or "all": parameters, buffers, gradients and the optimizer's state as
            well, where the step is shorter with them moving, or fits in no other way. `pooch.apply` then needs the
            optimizer.
        progress: called with what is being done and the share that is done.

    Raises:
        UsageError: the profile is something else; the budget, the policy or its parameters cannot be understood; the
            policy has neither effort nor start; the start names no activation; the step never calls the model that a
            plan of region "model" is for; or an arena is to hold several microbatches in flight.
        PlanMismatch: a known plan was made for another profile.
        InfeasibleBudget: no plan fits; names the smallest budget that does.
    """
    options = PlanOptions(
        policy,
        policy_options or {},
        host_budget,
        time_limit_s,
        region,
        explain,
        effort,
        bound,
        microbatches_in_flight,
        moves,
    )
    profile = profile_of(profile, "plan")
    if not isinstance(budget, str):
        budget = parse_budget(budget, profile.peak_bytes)
    return plan_with(
        profile, budget, options, known=known, start=start, progress=progress, aside=is_worthwhile(profile)
    )


def plan_with(
    profile: Profile,
    budget: int | str,
    options: PlanOptions,
    *,
    known: Sequence[Plan] = (),
    start: Decisions | None = None,
    progress: PlanningProgress | None = None,
    aside: bool = False,
) -> Plan:
    """`plan` with its options in one object. A number as its budget is taken as it is, however small.

    Planning aside takes a second to start a process, and returns all memory with its end. It is done in any case where
    memory is limited: what the solver takes and what it leaves behind would be missing where tensors need it.
    """
    profile = options.profile_in_flight(profile)
    if isinstance(budget, str) and not is_smallest(budget):
        budget = budget_bytes_of(profile, budget)
    options.host_bytes(profile)  # an error here is clearer than one of a child process
    _check_region_of(profile, options.region)
    if start is not None:
        _check_start(profile, start)
    if aside or is_limited():
        made = plan_in_child(profile, budget, options, known, start, progress)
        if made is not None:
            return made
    return plan_here(profile, budget, options, known, start, progress)


def plan_here(
    profile: Profile,
    budget: int | str,
    options: PlanOptions,
    known: Sequence[Plan],
    start: Decisions | None = None,
    progress: PlanningProgress | None = None,
) -> Plan:
    """`plan_with` with checked arguments, in this process, which may be a child process.

    The plan is of the step whole or, if there is one, in slices. The budget is a number, or "min".
    """
    budget_bytes = budget if isinstance(budget, int) else smallest_with(profile, options)

    def make(variant: Profile, share: float) -> Plan:
        limited = replace(options, time_limit_s=share * options.time_limit_s)
        own = [
            plan
            for plan in known
            if plan.region == options.region and bool(plan.splits) == bool(variant.splits) and plan.persistent is None
        ]
        begin = start if not variant.splits else None  # its ids are those of the step whole
        return _plan_variant(variant, budget_bytes, limited, known=own, start=begin, progress=progress)

    split = _in_slices(profile, options)
    return make(profile, 1.0) if split is None else whole_or_in_slices(profile, split, make)


def _in_slices(profile: Profile, options: PlanOptions) -> Profile | None:
    """The step in slices, if there is one and the policy is ours: published methods do not know of it."""
    from ..planner import SEARCHES

    return in_slices(profile, options.region) if options.policy in SEARCHES else None


def _plan_variant(profile: Profile, budget_bytes: int, options: PlanOptions, **others: Any) -> Plan:
    moves = options.moves == "all" and can_move(profile) and budget_bytes < profile.peak_bytes
    return (_plan_moving if moves else _plan_staying)(profile, budget_bytes, options, **others)


def _plan_moving(profile: Profile, budget_bytes: int, options: PlanOptions, **others: Any) -> Plan:
    """Let what outlives the step leave as well, if the step is shorter with it, or fits in no other way.

    Raises:
        InfeasibleBudget: nothing fits; names the smallest budget for which there is such a plan.
    """
    started_s = time.monotonic()
    planner = MovingPlanner(profile, budget_bytes, _ByOptions(profile, options, others["progress"]))
    moving, infeasible = planner.best(), None
    try:
        staying = _plan_staying(profile, budget_bytes, replace(options, moves="activations"), **others)
    except InfeasibleBudget as error:
        staying, infeasible = None, error
    if moving is None:
        if staying is not None:
            return staying
        raise InfeasibleBudget(budget_bytes, _smallest_moving(profile, options), options.policy) from infeasible
    plan = pack_moving(profile, moving, planner, described(options.policy, options.policy_options), budget_bytes)
    plan = replace(plan, planning_ms=(time.monotonic() - started_s) * 1e3)
    if staying is not None and staying.predicted_step_ms <= plan.predicted_step_ms:
        note = f"what outlives the step stays: with it moving, the step would take {format_ms(plan.predicted_step_ms)}"
        return replace(staying, notes=(*staying.notes, note))
    return plan


class _ByOptions:
    """Makes the parts of plans in which everything moves.

    Args:
        profile: the step, with everything.
        options: how to plan.
        progress: called with what is being done.
    """

    def __init__(self, profile: Profile, options: PlanOptions, progress: PlanningProgress | None) -> None:
        host_bytes = options.host_bytes(profile)
        if host_bytes is not None:  # what outlives the step may need room for all of it
            left_bytes = host_bytes - sum(each.size_bytes for each in profile.persistent)
            options = replace(options, host_budget=max(1, left_bytes))
        self._options, self._progress = options, progress

    def dataflow(self, profile: Profile) -> Dataflow:
        """What is planned of a profile."""
        return dataflow_of(profile, self._options.region, hooked=True)

    def make(self, evaluator: StageEvaluator, budget_bytes: int, *, thorough: bool) -> PolicyOutcome:
        """Plan activations within a budget."""
        options, share = self._options, _THOROUGH_SHARE if thorough else _QUICK_SHARE
        effort: Effort = options.effort if thorough else "fast"
        chosen = replace(
            options, effort=effort, explain=options.explain and thorough, time_limit_s=share * options.time_limit_s
        )
        return _decide(evaluator, budget_bytes, chosen, progress=self._progress)

    def fit(self, evaluator: StageEvaluator, budget_bytes: int, decisions: Decisions) -> PolicyOutcome | None:
        """Make a plan of these decisions, with a few more activations that leave if it does not fit without."""
        from ..planner import fitted

        return fitted(_request(evaluator, budget_bytes, self._options), decisions)

    def changes(self, dataflow: Dataflow, decisions: Decisions) -> Iterator[dict[int, Choice]]:
        """Yield the decisions with one of them changed, those on the largest activations first."""
        from ..planner import single_changes

        return single_changes(dataflow, decisions)

    def solve(self, evaluator: StageEvaluator, budget_bytes: int, cycle: Cycle) -> JointSolution | None:
        """Solve the program of everything."""
        from ..planner import solve_jointly

        return solve_jointly(_request(evaluator, budget_bytes, self._options), cycle)


def _plan_staying(
    profile: Profile,
    budget_bytes: int,
    options: PlanOptions,
    *,
    known: Sequence[Plan],
    start: Decisions | None,
    progress: PlanningProgress | None,
) -> Plan:
    outcomes = tuple(_known_outcome(profile, plan) for plan in known)
    make = partial(_decide, budget_bytes=budget_bytes, options=options, known=outcomes, start=start, progress=progress)
    fits = budget_bytes >= profile.peak_bytes
    dataflow = dataflow_of(profile, options.region, hooked=not fits)
    planned = make(StageEvaluator(dataflow))
    if fits and planned.schedule.actions:  # a policy that moves things all the same
        dataflow = dataflow_of(profile, options.region, hooked=True)
        if simulate_schedule(dataflow, planned.schedule, detail=False).peak_bytes > budget_bytes:
            planned = make(StageEvaluator(dataflow))
    layout = None
    if options.bound == "arena":
        dataflow, planned, layout = _with_arena(profile, dataflow, planned, budget_bytes, options, make)
    timeline = verified_timeline(dataflow, planned.schedule, planned.decisions, budget_bytes)
    planned = replace(planned, evaluation=Evaluation(planned.schedule, timeline))
    policy = described(options.policy, options.policy_options)
    return pack_plan(dataflow, planned, policy, budget_bytes, bound=options.bound, layout=layout)


def _decide(evaluator: StageEvaluator, budget_bytes: int, options: PlanOptions, **others: Any) -> PolicyOutcome:
    """Ask the policy; `others` are further fields of the request."""
    from ..planner import make_plan

    request = _request(evaluator, budget_bytes, options, **others)
    return make_plan(request, options.policy, options.policy_options, explain=options.explain)


def _request(evaluator: StageEvaluator, budget_bytes: int, options: PlanOptions, **others: Any) -> PlanningRequest:
    """What a policy is asked under the options, from now on."""
    fields: dict[str, Any] = {"time_limit_s": options.time_limit_s, "effort": options.effort, **others}
    host_bytes = options.host_bytes(evaluator.dataflow.profile)
    return PlanningRequest(evaluator.dataflow, budget_bytes, evaluator, host_bytes, **fields)


def _with_arena(
    profile: Profile,
    dataflow: Dataflow,
    planned: PolicyOutcome,
    budget_bytes: int,
    options: PlanOptions,
    make: Callable[..., PolicyOutcome],
) -> tuple[Dataflow, PolicyOutcome, StepLayout]:
    """Change a plan until its arena fits, and return it with what it was made for.

    Raises:
        InfeasibleBudget: no plan was found whose arena fits.
    """
    from ..planner import SEARCHES

    in_core = ArenaFitting(StageEvaluator(dataflow), budget_bytes)
    fitted = in_core.as_it_is(planned)
    if fitted is None:
        dataflow = dataflow_of(profile, options.region, hooked=True)
        evaluator = StageEvaluator(dataflow)
        quick: Effort = "fast" if options.policy in SEARCHES else "full"
        deadline_s = time.monotonic() + options.time_limit_s
        fitting = ArenaFitting(evaluator, budget_bytes, options.host_bytes(profile), deadline_s)

        def replan(live_bytes: int, thorough: bool) -> PolicyOutcome:
            effort = options.effort if thorough else quick
            return make(evaluator, budget_bytes=live_bytes, known=(), effort=effort)

        fitted = fitting.fit(planned, replan, lambda: _leanest(evaluator, options))
    return dataflow, fitted.planned, fitted.layout


def _known_outcome(profile: Profile, known: Plan) -> PolicyOutcome:
    """A plan as planning can know it.

    Raises:
        PlanMismatch, InvalidSchedule: it is none for this profile.
    """
    return PolicyOutcome(known.decisions, Evaluation(known.schedule, simulate(profile, known)), known.lower_bound_ms)


def write_lp(profile: Profile, budget_bytes: int, options: PlanOptions, path: Path) -> None:
    """Write the integer program of a budget as an LP file."""
    from ..planner import write_program

    _check_region_of(profile, options.region)
    profile = options.profile_in_flight(profile)
    dataflow = dataflow_of(profile, options.region, hooked=budget_bytes < profile.peak_bytes)
    write_program(_request(StageEvaluator(dataflow), budget_bytes, options), path)


def plan_from_decisions(
    profile: Profile | str | Path,
    decisions: Decisions,
    budget: float | str | None = None,
    *,
    region: Region = "model",
    microbatches_in_flight: int = 1,
) -> Plan:
    """Make a plan of hand-made or foreign decisions; activations not named are kept.

    Without a budget, or with "min", the plan reaches the lowest peak that the decisions allow. The region and the
    number of microbatches in flight are as for `plan`.

    Raises:
        UsageError: a decision names no activation of the region, or asks for an impossible recompute.
        InfeasibleBudget: a budget was given and the decisions do not fit into it.
    """
    started_s = time.monotonic()
    profile = profile_of(profile, "plan_from_decisions")
    _check_choices(decisions)
    _check_region_of(profile, checked_region(region))
    profile = in_flight(profile, microbatches_in_flight)
    hooked = any(choice != "keep" for choice in decisions.values())
    dataflow = dataflow_of(profile, region, hooked=hooked)
    evaluator = StageEvaluator(dataflow)
    if budget is None or is_smallest(budget):
        evaluation = evaluator.evaluate_smallest(decisions)
        budget_bytes = 0 if budget is None else evaluation.timeline.peak_bytes
    else:
        budget_bytes = budget_bytes_of(profile, budget)
        evaluation = evaluator.evaluate(decisions, budget_bytes)
        if evaluation.timeline.peak_bytes > budget_bytes:
            minimum_bytes = evaluator.evaluate_smallest(decisions).timeline.peak_bytes
            raise InfeasibleBudget(budget_bytes, minimum_bytes, MANUAL)
    planning_ms = (time.monotonic() - started_s) * 1e3
    return manual_plan(dataflow, evaluation, decisions, budget_bytes, planning_ms=planning_ms)


def manual_plan(
    dataflow: Dataflow,
    evaluation: Evaluation,
    decisions: Decisions,
    budget_bytes: int = 0,
    *,
    planning_ms: float = 0.0,
) -> Plan:
    """Pack decisions that no policy made, once the verifier has passed their schedule.

    Args:
        dataflow: the profile and region that they are for.
        evaluation: what the decisions were lowered to.
        decisions: activations not named are kept.
        budget_bytes: what was asked for; 0: nothing.
        planning_ms: wall time spent.

    Raises:
        InvalidSchedule: the schedule cannot be executed.
    """
    most_bytes = budget_bytes or evaluation.timeline.peak_bytes
    timeline = verified_timeline(dataflow, evaluation.schedule, decisions, most_bytes)
    in_core_ms = sum(dataflow.op_times_ms)  # no schedule can be faster than its ops
    planned = PolicyOutcome(
        dict(decisions),
        Evaluation(evaluation.schedule, timeline),
        in_core_ms,
        rows=manual_rows(dataflow, decisions),
        planning_ms=planning_ms,
    )
    return pack_plan(dataflow, planned, MANUAL, budget_bytes)


def budget_in_bytes(profile: Profile, budget: float | str, options: PlanOptions) -> int:
    """A budget for the step in bytes; "min" is the smallest that the policy is known to keep.

    Raises:
        UsageError: the budget does not parse, is not positive, or is too small to be meant.
    """
    return smallest_with(profile, options) if is_smallest(budget) else budget_bytes_of(profile, budget)


def smallest_budget(
    profile: Profile | str | Path,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    region: Region = "model",
    microbatches_in_flight: int = 1,
    moves: Moves = "activations",
) -> int:
    """The smallest budget, in bytes, that the policy is known to keep; asking `plan` for it succeeds.

    Args:
        profile: the measured step, or the path of a saved profile.
        policy: who decides.
        policy_options: parameters of the policy, by name.
        host_budget: bytes that swapped activations may take in the swap tier. None: no limit.
        region: what the plan will cover, "model" or "step".
        microbatches_in_flight: as for `plan`.
        moves: as for `plan`.

    Raises:
        UsageError: the policy, its parameters, the region or the host budget cannot be understood.
    """
    options = PlanOptions(
        policy,
        policy_options or {},
        host_budget,
        region=region,
        microbatches_in_flight=microbatches_in_flight,
        moves=moves,
    )
    return smallest_with(profile_of(profile, "smallest_budget"), options)


def smallest_with(profile: Profile, options: PlanOptions) -> int:
    """`smallest_budget` with its options in one object."""
    profile = options.profile_in_flight(profile)
    _check_region_of(profile, options.region)
    split = _in_slices(profile, options)
    if split is not None:
        return min(_smallest_of(profile, options), _smallest_of(split, options))
    return _smallest_of(profile, options)


def _smallest_moving(profile: Profile, options: PlanOptions) -> int:
    """The smallest budget with all that can leaving: at each point there is what it uses, and nothing else."""
    cycle = Cycle(profile)
    tight = with_resident(profile, cycle.allowed_points(0))
    needed = _smallest_of(tight, replace(options, moves="activations"))
    after_bytes = with_resident(profile).ops[-1].entry_bytes
    slices_bytes = (cycle.need_bytes + cycle.temporary_bytes)[len(profile.ops) :]
    return max(needed, after_bytes + int(slices_bytes.max(initial=0)))


def _smallest_of(profile: Profile, options: PlanOptions) -> int:
    if options.moves == "all" and can_move(profile):
        return min(_smallest_moving(profile, options), profile.peak_bytes)
    # As `plan` has it for what does not fit.
    evaluator = StageEvaluator(dataflow_of(profile, options.region, hooked=True))
    needed = _smallest_live_bytes(evaluator, options)
    if options.bound == "arena":
        needed = ArenaFitting(evaluator, 0).total_bytes(_leanest(evaluator, options))
        plain = StageEvaluator(Dataflow(profile, options.region))
        in_core = PolicyOutcome({}, plain.evaluate({}, profile.peak_bytes), 0.0)
        return min(needed, ArenaFitting(plain, 0).total_bytes(in_core))
    return min(needed, profile.peak_bytes)


def _leanest(evaluator: StageEvaluator, options: PlanOptions) -> PolicyOutcome:
    """The plan for the fewest live bytes that the policy is known to need."""
    from ..planner import SEARCHES

    unhurried = replace(
        options, explain=False, effort="fast" if options.policy in SEARCHES else "full", time_limit_s=UNHURRIED_S
    )
    return _decide(evaluator, _smallest_live_bytes(evaluator, options), unhurried)


def _smallest_live_bytes(evaluator: StageEvaluator, options: PlanOptions) -> int:
    from ..planner import smallest_plan_bytes

    request = _request(evaluator, 1, options, effort="full", time_limit_s=UNHURRIED_S)
    return smallest_plan_bytes(request, options.policy, options.policy_options)


def _check_region_of(profile: Profile, region: Region) -> None:
    """Refuse the region "model" where the profiled step has no such region.

    Raises:
        UsageError: it has not.
    """
    if region == "model" and profile.model_begin == profile.model_end:
        raise UsageError(
            "the profiled step never calls the model itself (it calls model.forward(...), or parts of the model as "
            "training_step does), so a plan of its calls would do nothing: plan for region 'step' and put the forward "
            "pass into `with run.step():`"
        )


def _check_start(profile: Profile, start: Decisions) -> None:
    """Refuse choices to start from that are not for this profile.

    Raises:
        UsageError: a choice does not exist, or is for a value that is no activation.
    """
    _check_choices(start)
    for value in start.keys() - {activation.id for activation in profile.activations}:
        raise UsageError(f"the start has a choice for value {value}, which is not an activation of this profile")


def _check_choices(decisions: Decisions) -> None:
    for value, choice in decisions.items():
        if choice not in ("keep", "swap", "recompute"):
            raise UsageError(f"the decision {choice!r} for value {value} is none of keep, swap, recompute")


def manual_rows(dataflow: Dataflow, decisions: Decisions) -> tuple[Decision, ...]:
    """One row per activation of the region, for decisions that no policy made."""
    return tuple(_manual_row(dataflow, value.id, decisions) for value in dataflow.activations)


def _manual_row(dataflow: Dataflow, value_id: int, decisions: Decisions) -> Decision:
    value = dataflow.profile.values[value_id]
    choice: Choice = decisions.get(value_id, "keep")
    link = dataflow.profile.link
    copy_ms = link.out_ms(value.size_bytes, packs=value.packs) + link.in_ms(value.size_bytes, packs=value.packs)
    reason = "decided by hand" if value_id in decisions else "not named, so kept"
    return Decision(value_id, choice, value.label, value.size_bytes, copy_ms, dataflow.replay_ms(value_id), reason)

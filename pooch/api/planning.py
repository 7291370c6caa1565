"""Profile + budget -> Plan: the planner, the lowering, the verifier and the simulator in one row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import can_move
from ..ground import messages
from ..ground.process_limits import is_limited
from ..ground.progress import PlanningProgress
from ..ir import Decisions, Plan, Profile, Region
from ..ir.arguments import profile_of
from ..ir.layout import StepLayout
from ..ir.persistent import Moves
from ..ir.plan import Bound
from ..planner import Effort, Evaluation, PolicyOutcome, described
from ..simulator import simulate as simulate_schedule
from .arena_fitting import ArenaFitting
from .budgets import is_smallest, parse_budget
from .deciding import decide, own_slices, request_of
from .evaluation import StageEvaluator, verified_timeline
from .free_memory import budget_bytes_of
from .hooked import dataflow_of
from .options import PlanOptions
from .plan_building import pack_plan
from .plan_checks import check_region_of, check_start
from .planning_aside import is_worthwhile, plan_in_child
from .planning_moving import plan_moving
from .simulation import simulate
from .smallest import leanest, smallest_with
from .splitting import whole_or_in_slices


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
            well, where the step is shorter with them moving, or fits in no other way. Such a plan only
            predicts: `pooch.apply` refuses it, and `pooch.auto` moves these without one.
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
    if profile.device.shares_memory:
        messages.tell(
            f"{profile.device.name} shares the host's memory, so a copy there frees nothing: the plan swaps nothing"
        )
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
    check_region_of(profile, options.region)
    if start is not None:
        check_start(profile, start)
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

    split = own_slices(profile, options)
    return make(profile, 1.0) if split is None else whole_or_in_slices(profile, split, make)


def _plan_variant(profile: Profile, budget_bytes: int, options: PlanOptions, **others: Any) -> Plan:
    def staying(options: PlanOptions) -> Plan:
        return _plan_staying(profile, budget_bytes, options, **others)

    if options.moves == "all" and can_move(profile) and budget_bytes < profile.peak_bytes:
        return plan_moving(profile, budget_bytes, options, others["progress"], staying)
    return staying(options)


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
    make = partial(decide, budget_bytes=budget_bytes, options=options, known=outcomes, start=start, progress=progress)
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

        fitted = fitting.fit(planned, replan, lambda: leanest(evaluator, options))
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

    check_region_of(profile, options.region)
    profile = options.profile_in_flight(profile)
    dataflow = dataflow_of(profile, options.region, hooked=budget_bytes < profile.peak_bytes)
    write_program(request_of(StageEvaluator(dataflow), budget_bytes, options), path)

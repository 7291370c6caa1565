"""Whether training under plans gives the numbers of plain training, and stays within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...analysis.dataflow import Dataflow
from ...executor.statistics import RunStats
from ...ground.errors import InfeasibleBudget, PoochError, first_line
from ...ground.progress import silent
from ...ground.units import format_bytes
from ...ir import Choice, Decisions, Link, Plan, Profile
from ...profiler import ProfileOptions, profile_step
from ...torchtools.accelerators import has_streams
from ...torchtools.checksums import CHECKSUM_BYTES
from ...torchtools.determinism import deterministic_algorithms
from ...torchtools.memory_trace import earlier_objects_exempt
from ...torchtools.training_state import seed_all
from ...workloads import Workload
from ..manual import plan_from_decisions
from ..measure.training import Trained, first_difference, train_steps
from ..options import PlanOptions
from ..planning import plan_here
from .finding import Figure, Finding, Patient
from .models import MODELS, Build

STEPS = 3
BUDGET_SHARE = 0.8  # of the in-core peak, where a plan for it exists
_SEED = 7
_LEAST_S = 5.0  # for one model
_LINK = Link("not measured", 0.01, 0.01, 1e6, 1e6)
_OPTIONS = PlanOptions(region="step", explain=False, effort="fast", time_limit_s=2.0)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A training under one plan.

    Attributes:
        way: how the plan decides.
        difference: the first one from plain training; "" for none.
        over_bytes: what the peak was above the budget.
        checksum_bytes: what of that may be for checksums, which compare replays. Small models notice it.
        stats: of the last step.
    """

    way: str
    difference: str
    over_bytes: int
    checksum_bytes: int
    stats: RunStats


def examine_training(patient: Patient) -> Iterator[Finding]:
    """Train each model plainly, with everything swapped, with everything replayed, and under a budget."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models gain nothing from more, and on a busy machine threads wait for one another
    try:
        for number, (name, build) in enumerate(MODELS.items(), start=1):
            patient.progress(f"training model {number} of {len(MODELS)}: {name}")
            if patient.left_s < _LEAST_S:
                yield Finding(f"training: {name}", "not run", "no time was left")
            else:
                yield _examined(name, build, patient)
    finally:
        torch.set_num_threads(threads)


def _examined(name: str, build: Build, patient: Patient) -> Finding:
    check = f"training: {name}"
    # Kernels that may differ from run to run would tell nothing about plans.
    with deterministic_algorithms() as varying, earlier_objects_exempt():
        try:
            plain = _trained(build, None, patient)
            outcomes = [_compared(way, build, plan, plain, patient) for way, plan in _plans(build, patient).items()]
            again = None
            if any(each.difference for each in outcomes):
                again = first_difference(plain, _trained(build, None, patient))
        except (PoochError, RuntimeError) as error:
            return Finding(check, "failed", f"it cannot be trained: {first_line(error)}")
    return _judged(check, outcomes, again, varying)


def _judged(check: str, outcomes: list[_Outcome], again: str | None, varying: list[str]) -> Finding:
    differing = [each for each in outcomes if each.difference]
    over = [each for each in outcomes if each.over_bytes > each.checksum_bytes]
    above_bytes = max(each.over_bytes for each in outcomes)
    moved: dict[str, Figure] = {
        "swapped": format_bytes(sum(each.stats.swapped_in_bytes for each in outcomes)),
        "replayed ops": sum(each.stats.recomputed_ops for each in outcomes),
    }
    if over:
        text = f"the budget was exceeded by {format_bytes(over[0].over_bytes)} where {over[0].way}"
        return Finding(check, "failed", f"{text}: please report it", moved)
    if not differing and above_bytes > 0:
        text = f"the same bits; the budget was exceeded by {format_bytes(above_bytes)} for checksums of replays alone"
        return Finding(check, "told", text, moved)
    if not differing:
        return Finding(
            check, "passed", "the same bits swapped, replayed and under a budget; the budget was held", moved
        )
    if again is not None:
        cause = f" (no deterministic kernel: {', '.join(varying)})" if varying else ""
        return Finding(check, "told", f"plain training differs from itself: {again}{cause}", moved)
    text = f"other bits than plain training where {differing[0].way}: {differing[0].difference}"
    return Finding(check, "failed", f"{text}; look at the checks above for a cause, or please report it", moved)


def _built(build: Build, patient: Patient) -> Workload:
    seed_all(_SEED)
    return build(patient.device)


def _trained(build: Build, plan: Plan | None, patient: Patient) -> Trained:
    return train_steps(_built(build, patient), plan, STEPS, silent)


def _plans(build: Build, patient: Patient) -> dict[str, Plan]:
    """A plan for each way."""
    workload = _built(build, patient)
    options = ProfileOptions(warmup=1, repeats=1, mode="run")
    link = patient.link or _LINK
    profile = profile_step(workload.forward, workload.model, workload.optimizer, link, options).profile
    return {
        "everything is swapped": plan_from_decisions(profile, _all(profile, "swap"), region="step"),
        "everything is replayed": plan_from_decisions(profile, _all(profile, "recompute"), region="step"),
        "a budget is planned for": _within_budget(profile),
    }


def _all(profile: Profile, choice: Choice) -> Decisions:
    """All activations swapped, or recomputed where that is possible."""
    dataflow = Dataflow(profile, "step")
    return {
        value.id: choice for value in dataflow.activations if choice == "swap" or dataflow.refusal(value.id) is None
    }


def _within_budget(profile: Profile) -> Plan:
    try:
        return plan_here(profile, int(BUDGET_SHARE * profile.peak_bytes), _OPTIONS, ())
    except InfeasibleBudget as error:
        return plan_here(profile, error.minimum_bytes, _OPTIONS, ())


def _compared(way: str, build: Build, plan: Plan, plain: Trained, patient: Patient) -> _Outcome:
    trained = _trained(build, plan, patient)
    over_bytes = trained.peak_bytes - trained.rounding_bytes - plan.budget_bytes if plan.budget_bytes else 0
    assert trained.stats is not None
    checksum_bytes = CHECKSUM_BYTES if has_streams(patient.device) and plan.schedule.recomputed else 0
    return _Outcome(way, first_difference(plain, trained) or "", over_bytes, checksum_bytes, trained.stats)

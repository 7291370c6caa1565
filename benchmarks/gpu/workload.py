"""One workload at full size: its profile, plans at several budgets, and training under each, also with the card made as
small as the budget.
"""

from __future__ import annotations

import gc
import math
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch

from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.planning_process import plan_or_smallest
from benchmarks.gpu.race import explained
from benchmarks.gpu.repeatable import on_device, use_deterministic_kernels
from pooch.api.measure.hard_limit import limit_gpu
from pooch.api.measure.timing import Timing, time_under, timed_step
from pooch.api.measure.training import Trained, applied, forward_and_backward, train_steps, train_under
from pooch.api.measure.training_report import TrainingReport, report_of
from pooch.api.profiling import profile_workload
from pooch.executor import Run
from pooch.ground.units import format_bytes, format_ms
from pooch.ir import Plan, Profile
from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.training_state import model_device
from pooch.workloads import Setting, Workload, WorkloadFactory

BUDGETS = ("60%", "40%", "80%")
REHEARSED = 1  # of them: one goes through everything
STEPS, TURNS = 3, 5
PLANNING_S = 10.0
CARD_BYTES = 80 * 10**9  # of which the sizes below fill about half, in-core


@dataclass(frozen=True, slots=True)
class FullSize:
    """Batch size on a card of 80 GB, and settings. A smaller card gets a smaller batch."""

    batch_size: int
    settings: dict[str, Setting]


FULL_SIZES = {
    "resnet50": FullSize(512, {}),
    "gpt2": FullSize(16, {}),
    "unet3d": FullSize(4, {"volume_size": 192}),
    "lstm": FullSize(1024, {}),
}


def factory_of(job: Job) -> WorkloadFactory:
    """The workload as it fits this card, or its small version."""
    name = job.name.partition(":")[2]
    if job.small:
        return WorkloadFactory(f"{name}@small", device=job.device)
    size = FULL_SIZES[name]
    batch_size = size.batch_size
    device = on_device(job.device)
    if accelerators.has_streams(device):
        batch_size = max(1, int(batch_size * min(1.0, accelerators.total_bytes(device) / CARD_BYTES)))
    return WorkloadFactory(name, batch_size=batch_size, device=job.device, settings=size.settings)


def run(job: Job) -> Verdict:
    """Profile, plan all budgets at once beside one another, then train under each while time is left."""
    factory, started_s = factory_of(job), time.monotonic()
    profile = _profiled(job, factory())
    _save(profile, job)
    job.add("notes", f"profiled in {time.monotonic() - started_s:.0f} s, {len(profile.ops)} ops, mode {profile.mode}")
    budgets = BUDGETS[:REHEARSED] if job.small else BUDGETS
    with ProcessPoolExecutor(len(budgets), mp_context=get_context("spawn")) as pool:
        seconds = 2.0 if job.small else PLANNING_S
        planned = {budget: pool.submit(plan_or_smallest, profile, budget, seconds) for budget in budgets}
        plain = _plain(factory, profile, job)
        problems = _train_each(job, factory, profile, plain, planned)
    return _verdict(problems, len(budgets), job)


def _profiled(job: Job, workload: Workload) -> Profile:
    shaky = use_deterministic_kernels(lambda: forward_and_backward(workload, None))
    if shaky:
        job.add("notes", f"no deterministic kernel: {shaky}")
    workload.model.zero_grad(set_to_none=True)
    return profile_workload(workload, progress=job.tell)


def _save(profile: Profile, job: Job) -> None:
    job.profiles.mkdir(parents=True, exist_ok=True)
    name = f"{profile.workload}-b{profile.batch_size}-{job.device}{'-small' if job.small else ''}.json"
    profile.save(job.profiles / name)


def _plain(factory: WorkloadFactory, profile: Profile, job: Job) -> Trained | None:
    """Plain training, unless the step does not fit without a plan."""
    return train_steps(factory(), None, STEPS, job.tell) if profile.mode == "run" else None


def _train_each(
    job: Job, factory: WorkloadFactory, profile: Profile, plain: Trained | None, planned: dict[str, Future[Plan]]
) -> list[str]:
    problems: list[str] = []
    longest_s = 0.0
    for budget, future in planned.items():
        if job.left_s < 1.3 * longest_s:
            job.add("rows", {"workload": profile.workload, "budget": budget, "same bits": "not run: no time left"})
            problems.append(f"not run: {budget}")
            continue
        started_s = time.monotonic()
        chosen = future.result()
        row, problem = train_one(job, factory, profile, chosen, plain)
        job.add(
            "rows",
            {
                "workload": profile.workload,
                "batch": profile.batch_size,
                "budget": _name(budget, chosen, profile),
                **row,
            },
        )
        problems += [f"{budget}: {problem}"] if problem else []
        longest_s = max(longest_s, time.monotonic() - started_s)
    return problems


def _name(budget: str, chosen: Plan, profile: Profile) -> str:
    share = 100 * chosen.budget_bytes / profile.peak_bytes
    infeasible = abs(share - float(budget.rstrip("%"))) > 0.5
    text = f"{budget} infeasible, smallest {share:.1f}%" if infeasible else budget
    return f"{text} = {format_bytes(chosen.budget_bytes)}"


def train_one(
    job: Job, factory: WorkloadFactory, profile: Profile, chosen: Plan, plain: Trained | None
) -> tuple[dict[str, object], str]:
    """One plan: the same bits, peaks, times in turns, and what happens when the card is no larger than the budget.

    Returns:
        The row, and what promise was broken ("" for none).
    """
    gc.collect()
    workload = factory()
    with applied(chosen, workload) as run:
        assert run is not None
        trained = train_under(workload, run, STEPS, job.tell)
        timing = _timed(job, workload, run, plain is not None)
        limited = under_limit(job, workload, run, chosen.budget_bytes)
    del workload
    gc.collect()
    report = report_of(chosen, trained, timing, plain, {})
    difference = (
        explained(factory, plain, trained, job) if plain is not None else "unknown: plain training does not fit"
    )
    job.data.setdefault("raw", []).append({**asdict(report), "status": chosen.status, "gap": chosen.gap, **limited})
    row = {**_row(report, chosen, difference or "yes"), **limited}
    return row, _problem(report, difference, limited)


def _timed(job: Job, workload: Workload, run: Run, fits: bool) -> Timing:
    """Plain and planned steps in turns; planned ones alone where the plain step does not fit."""
    turns = 1 if job.small else TURNS
    if fits:
        return time_under(workload, run, turns, job.tell)
    return Timing((math.nan,), tuple(timed_step(workload, run) for _ in range(turns)))


def _problem(report: TrainingReport, difference: str, limited: dict[str, str]) -> str:
    if difference.startswith("NO"):
        return difference
    if report.within_budget is False:
        return f"measured peak {report.measured_peak_bytes} over the budget {report.budget_bytes}"
    if report.mismatches:
        return "left the plan"
    planned = limited["planned, card of that size"]
    return planned if planned.startswith("died") else ""


def _row(report: TrainingReport, chosen: Plan, bits: str) -> dict[str, object]:
    measured_ms, plain_ms = report.measured_step_ms or 0.0, report.plain_step_ms or 0.0
    return {
        "same bits": bits,
        "in-core peak": format_bytes(report.plain_peak_bytes) if report.plain_peak_bytes else "",
        "predicted peak": format_bytes(chosen.predicted_peak_bytes),
        "measured peak": format_bytes(report.measured_peak_bytes),
        "peak error": f"{report.peak_error or 0.0:+.2%}",
        "reserved": format_bytes(report.measured_reserved_bytes) if report.measured_reserved_bytes else "",
        "within": "yes" if report.within_budget else "NO",
        "plain step": format_ms(plain_ms),
        "planned step": format_ms(measured_ms),
        "predicted step": format_ms(chosen.predicted_step_ms),
        "slowdown": f"{report.slowdown or 0.0:.3f}",
        "predicted": f"{report.predicted_slowdown or 0.0:.3f}",
        "swapped": format_bytes(report.swapped_out_bytes or 0),
        "replayed ops": report.recomputed_ops,
        "late": report.late_swaps,
        "gap": f"{chosen.gap:.1%}",
        "planned in": format_ms(chosen.planning_ms),
    }


def under_limit(job: Job, workload: Workload, run: Run, budget_bytes: int) -> dict[str, str]:
    """Two planned steps, then a plain one, on a card that has no more than the budget (and a fixed slack)."""
    planned, plain = "planned, card of that size", "plain, card of that size"
    device = on_device(job.device)
    if not accelerators.has_streams(device):
        return {planned: "not run: no GPU", plain: "not run: no GPU"}
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    limit_gpu(device, budget_bytes)
    try:
        outcomes = {planned: _survives(workload, run, 2)}
        with run.paused():
            outcomes[plain] = _survives(workload, None, 1)
    finally:
        cuda_only.limit_memory(device, 1.0)
    return outcomes


def _survives(workload: Workload, run: Run | None, steps: int) -> str:
    try:
        for _ in range(steps):
            workload.model.zero_grad(set_to_none=True)
            forward_and_backward(workload, run)
            if workload.optimizer is not None:
                workload.optimizer.step()
        accelerators.synchronize(model_device(workload.model))
    except torch.OutOfMemoryError as error:
        return f"died: {str(error).split('.')[0]}"
    return "went through"


def _verdict(problems: list[str], budgets: int, job: Job) -> Verdict:
    broken = [problem for problem in problems if not problem.startswith("not run")]
    if broken:
        return Verdict("failed", "; ".join(broken))
    if problems:
        others = "" if len(problems) == budgets else "; the other budgets passed"
        return Verdict("not run", "; ".join(problems) + others)
    return Verdict("passed", f"{len(job.data['rows'])} budgets")

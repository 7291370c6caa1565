"""The promise, measured: every workload at several budgets, trained plainly and under the plan.

    python -m benchmarks.main_job [--workload NAME ...] [--budget 80% ...] [--steps 3] [--turns 3]
                                  [--keep-profiles profiles]

Prints and writes one row per workload and budget: same numbers or not, peaks, times, what moved. Plain and planned
steps take turns, so a ratio compares like with like. A budget that no plan can keep is replaced by the smallest one
that can be kept. Rows of workloads that are not measured this time stay if they come from the same machine and
versions.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile
from pooch.session import plan, profile_workload
from pooch.session.measuring import TrainingReport, report_of
from pooch.session.training import Timing, Trained, time_in_turns, train_steps
from pooch.units import format_bytes
from pooch.workloads import workload_factory
from pooch.workloads.loading import WorkloadFactory

WORKLOADS = ("resnet50", "gpt2", "unet3d", "lstm")
BUDGETS = ("100%", "80%", "60%", "45%")


def measure_budget(
    factory: WorkloadFactory, plain: Trained, chosen: Plan, steps: int, turns: int
) -> tuple[TrainingReport, Timing]:
    """Train under one plan; compare with the plain training and with plain steps taken in turns."""
    workload = factory()
    planned = train_steps(workload, chosen, steps, tell)
    timing = time_in_turns(workload, chosen, turns, tell)
    del workload
    gc.collect()
    return report_of(chosen, planned, timing, plain, {}), timing


def plan_or_smallest(profile: Profile, budget: str) -> tuple[str, Plan]:
    """The plan under a budget, or under the smallest feasible one; and what to call it."""
    try:
        return budget, plan(profile, budget, region="step")
    except InfeasibleBudget as error:
        smallest = error.minimum_bytes
        share = 100 * smallest / profile.peak_bytes
        return f"{budget} infeasible, smallest {share:.1f}%", plan(profile, smallest, region="step")


def row_of(name: str, budget: str, chosen: Plan, report: TrainingReport) -> Row:
    """One line of the table."""
    counts = {kind: list(chosen.decisions.values()).count(kind) for kind in ("keep", "swap", "recompute")}
    return {
        "workload": name,
        "budget": f"{budget} = {format_bytes(chosen.budget_bytes)}",
        "same bits": "yes" if report.bitwise_equal else f"NO: {report.first_difference}",
        "in-core peak": format_bytes(report.plain_peak_bytes or 0),
        "predicted peak": format_bytes(chosen.predicted_peak_bytes),
        "measured peak": format_bytes(report.measured_peak_bytes),
        "within": "yes" if report.within_budget else "NO",
        "peak error": _told(report.peak_error, "+.2%"),
        "plain step": _seconds(report.plain_step_ms),
        "planned step": _seconds(report.measured_step_ms),
        "slowdown": _told(report.slowdown, ".3f"),
        "predicted": _told(report.predicted_slowdown, ".3f"),
        "keep/swap/recompute": "/".join(str(counts[kind]) for kind in ("keep", "swap", "recompute")),
        "swapped": format_bytes(report.swapped_out_bytes or 0),
        "replayed ops": report.recomputed_ops,
    }


def _told(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _seconds(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1000:.2f} s"


def main() -> None:
    """Measure what was asked for; print the table; write the results after each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help=f"default: {', '.join(WORKLOADS)}")
    parser.add_argument("--budget", action="append", help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--steps", type=int, default=3, help="compared bitwise, with the optimizer's step after each")
    parser.add_argument("--turns", type=int, default=4, help="timed pairs of a plain and a planned step")
    parser.add_argument(
        "--keep-profiles", type=Path, help="save the profiles in this folder, named by batch and device"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.workload or WORKLOADS
    rows, raw = earlier_results("main-job-cpu", arguments.output, names)
    for name in names:
        factory = workload_factory(name)
        tell(f"{name}: profiling")
        profile = profile_workload(factory(), progress=tell)
        if arguments.keep_profiles:
            arguments.keep_profiles.mkdir(parents=True, exist_ok=True)
            profile.save(arguments.keep_profiles / f"{name}-b{profile.batch_size}-{profile.device.kind}.json")
        plain = train_steps(factory(), None, arguments.steps, tell)
        for budget in arguments.budget or BUDGETS:
            called, chosen = plan_or_smallest(profile, budget)
            report, timing = measure_budget(factory, plain, chosen, arguments.steps, arguments.turns)
            rows.append(row_of(name, called, chosen, report))
            raw.append(
                {"budget": called, "status": chosen.status, "gap": chosen.gap, **asdict(report), **asdict(timing)}
            )
            tell(str(rows[-1]))
        write_results("main-job-cpu", "The main job on the CPU", rows, raw, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()

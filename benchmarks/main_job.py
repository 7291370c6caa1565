"""The promise, measured: every workload at several budgets, trained plainly and under the plan.

    python -m benchmarks.main_job [--workload NAME ...] [--budget 80% ...] [--steps 3] [--turns 10]
                                  [--turns-at 100%=4 ...] [--keep-profiles profiles]

Prints and writes one row per workload and budget: same numbers or not, peaks, times, what moved. Plain and planned
steps take turns, so a ratio compares like with like; the results keep wall time, processor time and page faults of
each of them. A budget that no plan can keep is replaced by the smallest one that can be kept. Rows of workloads that
are not measured this time stay if they come from the same machine and versions.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.samples import (
    FEWEST_TURNS,
    StepCost,
    of_kind,
    ratios,
    step_cost,
    step_rows,
    take_turns,
    timing_of,
    told,
)
from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.api.measure.training import Trained, applied, train_steps
from pooch.api.measure.training_report import report_of
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.errors import InfeasibleBudget
from pooch.ground.units import format_bytes
from pooch.ir import Plan, Profile
from pooch.workloads import Workload, WorkloadFactory

NAME, TITLE = "main-job-cpu", "The main job on the CPU"
WORKLOADS = ("resnet50", "gpt2", "unet3d", "lstm")
BUDGETS = ("100%", "80%", "60%", "45%")
CHOICES = ("keep", "swap", "recompute")
Result = Mapping[str, Any]


def measure_budget(factory: WorkloadFactory, plain: Trained, chosen: Plan, steps: int, turns: int) -> dict[str, Any]:
    """Train under one plan; compare with the plain training and with plain steps taken in turns."""
    workload = factory()
    planned = train_steps(workload, chosen, steps, tell)
    samples = samples_under(workload, chosen, turns)
    del workload
    gc.collect()
    decided = list(chosen.decisions.values())
    return {
        **asdict(report_of(chosen, planned, timing_of(samples), plain, {})),
        "status": chosen.status,
        "gap": chosen.gap,
        "decisions": {choice: decided.count(choice) for choice in CHOICES},
        "samples": samples,
    }


def samples_under(workload: Workload, chosen: Plan, turns: int) -> list[dict[str, Any]]:
    """Plain and planned steps in turns, on one model."""
    with applied(chosen, workload) as run:
        assert run is not None

        def plain_cost() -> StepCost:
            with run.paused():
                return step_cost(workload, None)

        return take_turns({"plain": plain_cost, "planned": lambda: step_cost(workload, run)}, turns)


def plan_or_smallest(profile: Profile, budget: str) -> tuple[str, Plan]:
    """The plan under a budget, or under the smallest feasible one; and what to call it."""
    try:
        return budget, plan(profile, budget, region="step")
    except InfeasibleBudget as error:
        smallest = error.minimum_bytes
        share = 100 * smallest / profile.peak_bytes
        return f"{budget} infeasible, smallest {share:.1f}%", plan(profile, smallest, region="step")


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The table; its times are medians, with the middle half of the turns in brackets."""
    return [_row(result) for result in results]


def _row(result: Result) -> Row:
    samples = result["samples"]
    return {
        "workload": result["workload"],
        "budget": f"{result['budget']} = {format_bytes(result['budget_bytes'])}",
        "same bits": "yes" if result["bitwise_equal"] else f"NO: {result['first_difference']}",
        "in-core peak": format_bytes(result["plain_peak_bytes"] or 0),
        "predicted peak": format_bytes(result["predicted_peak_bytes"]),
        "measured peak": format_bytes(result["measured_peak_bytes"]),
        "within": "yes" if result["within_budget"] else "NO",
        "peak error": f"{result['peak_error']:+.2%}",
        "plain step": told(of_kind(samples, "plain"), ".2f", 1e-3, " s"),
        "planned step": told(of_kind(samples, "planned"), ".2f", 1e-3, " s"),
        "slowdown": told(ratios(samples, "planned"), ".3f", half_form=".2f"),
        "predicted": f"{result['predicted_slowdown']:.3f}",
        "keep/swap/recompute": "/".join(str(result["decisions"][choice]) for choice in CHOICES),
        "swapped": format_bytes(result["swapped_out_bytes"] or 0),
        "replayed ops": result["recomputed_ops"],
    }


def more_of(results: Sequence[Result]) -> dict[str, list[Row]]:
    """The table of the timed steps."""
    labels = [{key: result[key] for key in ("workload", "budget")} for result in results]
    rows = [row for label, result in zip(labels, results, strict=True) for row in step_rows(label, result["samples"])]
    return {"The timed steps: medians, and the middle half of the turns in brackets": rows}


def turns_at(text: str) -> tuple[str, int]:
    """ "100%=4" as an argument.

    Raises:
        ValueError: it is something else.
    """
    budget, _, turns = text.rpartition("=")
    if not budget or int(turns) < 1:
        raise ValueError(text)
    return budget, int(turns)


def main() -> None:
    """Measure what was asked for; print the table; write the results after each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help=f"default: {', '.join(WORKLOADS)}")
    parser.add_argument("--budget", action="append", help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--steps", type=int, default=3, help="compared bitwise, with the optimizer's step after each")
    parser.add_argument("--turns", type=int, default=FEWEST_TURNS, help="timed pairs of a plain and a planned step")
    parser.add_argument(
        "--turns-at", type=turns_at, action="append", default=[], metavar="BUDGET=TURNS", help="other turns for one"
    )
    parser.add_argument(
        "--keep-profiles", type=Path, help="save the profiles in this folder, named by batch and device"
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.workload or WORKLOADS
    results = earlier_results(NAME, arguments.output, names)
    for name in names:
        factory = WorkloadFactory(name)
        tell(f"{name}: profiling")
        profile = profile_workload(factory(), progress=tell)
        if arguments.keep_profiles:
            arguments.keep_profiles.mkdir(parents=True, exist_ok=True)
            profile.save(arguments.keep_profiles / f"{name}-b{profile.batch_size}-{profile.device.kind}.json")
        plain = train_steps(factory(), None, arguments.steps, tell)
        for budget in arguments.budget or BUDGETS:
            called, chosen = plan_or_smallest(profile, budget)
            turns = dict(arguments.turns_at).get(budget, arguments.turns)
            measured = measure_budget(factory, plain, chosen, arguments.steps, turns)
            results.append({**measured, "workload": name, "budget": called})
            tell(str(rows_of(results[-1:])))
        write_results(NAME, TITLE, rows_of(results), results, arguments.output, more_of(results))
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")


if __name__ == "__main__":
    main()

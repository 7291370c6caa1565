"""Packs the steps of the recorded profiles, in-core and planned, and fits plans whose arena keeps the budget.

    python -m benchmarks.layouts [--profiles FOLDER] [--workloads NAME ...] [--effort full|fast] [--seconds 10]
        [--inference] [--output DIR]

The blocks are predicted from profile and schedule; nothing runs. For each profile and budget: arena over the highest
sum of live bytes by policy, then the plan with `bound="arena"`, what of the budget its arena takes, and what it costs
in predicted time. A second table has the forward pass of each profile without gradients; --inference makes it alone.
All seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.analysis.inference import inference_of
from pooch.api.step_layouts import layout_of
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile

NAME, TITLE = "layouts", "Arenas of recorded profiles: over the highest sum of live bytes, and within the budget"
INFERENCE, INFERENCE_TITLE = "layouts-inference", "Arenas of forward passes without gradients, of recorded profiles"
BUDGETS = ("80%", "60%", "45%")
POLICIES = ("sekiyama", "greedy_by_size", "ours")
MIB = 2**20


def measure(
    name: str, profile: Profile, budget: str | None, effort: str, limit_s: float, time_limit_s: float
) -> dict[str, Any]:
    """Pack a step by every policy; with a budget, the planned step, and the plan whose arena keeps it."""
    plan = None
    if budget is not None:
        budget, plan = _planned(profile, budget, effort, time_limit_s)
    result: dict[str, Any] = {"workload": name, "budget": budget or "in-core", "runs": []}
    _pack(result, profile, plan, limit_s)
    if plan is not None:
        result["plan"] = {"step_ms": plan.predicted_step_ms, "budget_bytes": plan.budget_bytes}
        result["fitted"] = _fitted(profile, plan, effort, time_limit_s)
    return result


def measure_inference(name: str, profile: Profile, limit_s: float) -> dict[str, Any]:
    """Pack the forward pass without gradients by every policy."""
    result: dict[str, Any] = {"workload": name, "budget": "inference", "runs": []}
    _pack(result, inference_of(profile), None, limit_s)
    return result | {"step_bytes": layout_of(profile, policy="sekiyama").bound_bytes}


def _pack(result: dict[str, Any], profile: Profile, plan: Plan | None, limit_s: float) -> None:
    for policy in POLICIES:
        started_s = time.process_time()
        layout = layout_of(profile, plan, policy=policy, time_limit_s=limit_s)
        used_s = time.process_time() - started_s
        result |= {"blocks": len(layout.blocks), "bound_bytes": layout.bound_bytes, "outside": layout.outside_bytes}
        result["runs"].append({"policy": policy, "seconds": used_s, "arena_bytes": layout.arena_bytes})
        tell(f"{result['workload']} {result['budget']}, {policy}: {layout.ratio:.4f} in {used_s:.1f} CPU s")


def _planned(profile: Profile, budget: str, effort: str, time_limit_s: float) -> tuple[str, Plan]:
    """Plan for live bytes; where no plan is that small, for the smallest arena that has one."""
    how: dict[str, Any] = {"region": "step", "effort": effort, "explain": False, "time_limit_s": time_limit_s}
    try:
        return budget, pooch.plan(profile, budget, **how)
    except InfeasibleBudget:
        smallest = pooch.plan(profile, "min", bound="arena", **how).budget_bytes
        share = smallest / profile.peak_bytes
        return f"{budget} has no plan; min {share:.1%}", pooch.plan(profile, smallest, **how)


def _fitted(profile: Profile, plan: Plan, effort: str, time_limit_s: float) -> dict[str, Any]:
    started_s = time.process_time()
    fitted = pooch.plan(
        profile, plan.budget_bytes, region="step", effort=effort, explain=False, bound="arena",
        time_limit_s=time_limit_s,
    )  # fmt: skip
    layout = fitted.layout
    assert layout is not None, "the budget bounds the arena"
    seconds = time.process_time() - started_s
    tell(f"  fitted: {layout.total_bytes / fitted.budget_bytes:.4f} of the budget, {seconds:.1f} CPU s")
    return {
        "total_bytes": layout.total_bytes,
        "step_ms": fitted.predicted_step_ms,
        "lower_bound_ms": fitted.lower_bound_ms,
        "gap": fitted.gap,
        "seconds": seconds,
        "kept_as_it_is": fitted.schedule == plan.schedule,
    }


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: a row per profile and budget."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    row: dict[str, object] = {
        "workload": result["workload"],
        "budget": result["budget"],
        "blocks": result["blocks"],
        "bound": f"{result['bound_bytes'] / MIB:.0f} MiB",
    }
    for run in result["runs"]:
        row[run["policy"]] = f"{run['arena_bytes'] / result['bound_bytes']:.4f} ({run['seconds']:.1f} s)"
    fitted = result.get("fitted")
    row["arena fitted: of the budget"] = ""
    row["longer by"] = ""
    row["gap to the lower bound"] = ""
    if fitted:
        plan = result["plan"]
        row["arena fitted: of the budget"] = f"{fitted['total_bytes'] / plan['budget_bytes']:.4f}"
        row["longer by"] = f"{fitted['step_ms'] / plan['step_ms'] - 1:.2%}"
        row["gap to the lower bound"] = f"{fitted['gap']:.1%}"
    return row


def inference_rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table of forward passes: a row per profile."""
    return [_inference_row(result) for result in results]


def _inference_row(result: Mapping[str, Any]) -> Row:
    return {
        "workload": result["workload"],
        "blocks": result["blocks"],
        "live bytes of the training step": f"{result['step_bytes'] / MIB:.0f} MiB",
        "live bytes": f"{result['bound_bytes'] / MIB:.0f} MiB",
        **{
            f"arena, {run['policy']}": f"{run['arena_bytes'] / MIB:.0f} MiB, "
            f"{run['arena_bytes'] / result['bound_bytes']:.4f} ({run['seconds']:.1f} s)"
            for run in result["runs"]
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path("profiles"))
    parser.add_argument("--workloads", nargs="+", help="stems of the files, such as lstm-b32-cpu; default: all")
    parser.add_argument("--effort", choices=["full", "fast"], default="full")
    parser.add_argument("--seconds", type=float, default=10.0, help="CPU seconds for our policy of packing")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each plan")
    parser.add_argument("--inference", action="store_true", help="only the forward passes without gradients")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    found = {path.stem: path for path in sorted(given.profiles.glob("*.json"))}
    profiles = {name: Profile.load(path) for name, path in found.items() if name in (given.workloads or found)}
    passes = [measure_inference(name, profile, given.seconds) for name, profile in profiles.items()]
    write_results(INFERENCE, INFERENCE_TITLE, inference_rows_of(passes), passes, given.output)
    print(markdown_table(inference_rows_of(passes)))
    if given.inference:
        return 0
    results = []
    for name, profile in profiles.items():
        for budget in (None, *BUDGETS):
            result = measure(name, profile, budget, given.effort, given.seconds, given.time_limit)
            results.append(result | {"effort": given.effort})
            write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

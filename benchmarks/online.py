"""Steps that evict by a rule while they run, beside the integer program that knows the step: time lost, simulated.

    python -m benchmarks.online [--profile profiles/NAME.json ...] [--budget 80% ...] [--time-limit 20] [--page-only]

The integer program's plans are those of benchmarks/results/policies.json where it has them for the same profile and
budget; others are planned. A budget that no plan can keep is replaced by the smallest one that can be kept. Nothing is
trained, and no clock is read: the same profiles give the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.policies import ProfileCells, digest_of, measure_profile
from benchmarks.policies import stored as stored_policies
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.analysis.dataflow import Dataflow
from pooch.api.hooked import dataflow_of
from pooch.ir import OnlineStep, Profile
from pooch.planner import MakeRule
from pooch.published.policies.dtr import DynamicRematerialization
from pooch.simulator import run_online

NAME, TITLE = "online", "Evicting while the step runs, beside plans that know it"
BUDGETS = ("80%", "60%", "45%")
RULES: Mapping[str, MakeRule | None] = {
    "online": None,
    "DTR": DynamicRematerialization().rule,
    "DTR, eq": DynamicRematerialization("eq").rule,
    "DTR, eq, sampled": DynamicRematerialization("eq", samples=1).rule,
}
HALVINGS = 10  # of the budgets between one that a run exceeds and the in-core peak


def planned(path: Path, budgets: Sequence[str], time_limit_s: float) -> ProfileCells:
    """The integer program's plans of a profile: stored ones, or new ones."""
    profile, digest = Profile.load(path), digest_of(path)
    for cells in stored_policies():
        headings = {heading for heading, _ in cells.columns}
        if cells.profile_digest == digest and all(_heading(headings, budget) for budget in budgets):
            return cells
    tell(f"{path.stem}: no stored plans, planning")
    return measure_profile(profile, budgets, time_limit_s, digest, policies=("ilp",))


def _heading(headings: set[str], budget: str) -> str | None:
    """That of the budget, or of the smallest one that can be kept where it is larger."""
    share = float(budget.removesuffix("%"))
    instead = (heading for heading in headings if "(smallest)" in heading and float(heading.partition("%")[0]) > share)
    return budget if budget in headings else next(instead, None)


def measure(path: Path, budgets: Sequence[str], time_limit_s: float) -> list[dict[str, Any]]:
    """One result per budget."""
    profile, cells = Profile.load(path), planned(path, budgets, time_limit_s)
    dataflow, bytes_of = dataflow_of(profile, "step", hooked=True), dict(cells.columns)
    results = []
    for budget in budgets:
        heading = _heading(set(bytes_of), budget)
        if heading is None:
            continue
        budget_bytes = bytes_of[heading]
        results.append(
            {
                "workload": profile.workload,
                "profile_digest": cells.profile_digest,
                "budget": heading,
                "budget_bytes": budget_bytes,
                "in_core_peak_bytes": profile.peak_bytes,
                "in_core_ms": profile.step_ms,
                "plan_ms": cells.cell("ilp", budget_bytes).step_ms,
                "lower_bound_ms": cells.cell("ilp", budget_bytes).lower_bound_ms,
                "runs": {name: _run(dataflow, budget_bytes, rule) for name, rule in RULES.items()},
            }
        )
    return results


def _run(dataflow: Dataflow, budget_bytes: int, rule: MakeRule | None) -> dict[str, Any]:
    run = run_online(dataflow, budget_bytes, None, rule)
    told = {**asdict(run), "decisions": Counter(run.decisions.values())}
    return told if run.feasible else {**told, "needs_bytes": _needs(dataflow, run, budget_bytes, rule)}


def _needs(dataflow: Dataflow, run: OnlineStep, budget_bytes: int, rule: MakeRule | None) -> int:
    """The smallest budget found that the run keeps, by bisection."""
    low, high = budget_bytes, max(run.peak_bytes, dataflow.profile.peak_bytes)
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        low, high = (low, middle) if run_online(dataflow, middle, None, rule).feasible else (middle, high)
    return high


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Time lost as a share of the in-core step, or what a run needs instead of the budget."""
    return [
        {
            "workload": result["workload"],
            "budget": result["budget"],
            "integer program": _share(result, result["plan_ms"]),
            **{name: _told(result, run) for name, run in result["runs"].items()},
        }
        for result in results
    ]


def _share(result: Mapping[str, Any], step_ms: float) -> str:
    return f"{step_ms / result['in_core_ms'] - 1:.1%}"


def _told(result: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    if run["over_bytes"]:
        return f"needs {run['needs_bytes'] / result['in_core_peak_bytes']:.1%}"
    return _share(result, run["step_ms"])


def actions_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What the runs that kept the budget did."""
    return [
        {
            "workload": result["workload"],
            "budget": result["budget"],
            "rule": name,
            "evictions": run["evictions"],
            "replayed ops": run["replays"],
            "replays, ms": f"{run['replay_ms']:.1f}",
            "copies out": run["copies_out"],
            "copies in": run["copies_in"],
            "waiting for copies, ms": f"{run['stall_ms']:.1f}",
        }
        for result in results
        for name, run in result["runs"].items()
        if not run["over_bytes"]
    ]


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", help="default: all in profiles/")
    parser.add_argument("--budget", action="append", help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds per plan that is not stored")
    parser.add_argument("--page-only", action="store_true", help="simulate nothing: make the tables of what is stored")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    if arguments.page_only:
        results = json.loads((arguments.output / f"{NAME}.json").read_text())["results"]
    else:
        paths = arguments.profile or sorted(Path("profiles").glob("*.json"))
        budgets = arguments.budget or BUDGETS
        results = [result for path in paths for result in measure(path, budgets, arguments.time_limit)]
    rows = rows_of(results)
    write_results(NAME, TITLE, rows, results, arguments.output, {"What the runs did": actions_of(results)})
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()

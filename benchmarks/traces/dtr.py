"""Plans and evicts under budgets on the operator logs of DTR, beside DTR's own simulator.

    python -m benchmarks.traces.dtr LOGS [--simulator FOLDER] [--ratio 0.8 ...] [--time-limit 10] [--page-only]

LOGS is a folder of logs, such as that of `simrd/logs.zip` in https://github.com/uwsampl/dtr-prototype, and FOLDER the
folder `simrd` beside it, whose simulator then runs as it is, with its heuristics h_DTR and h_DTR-eq. Budgets are shares
of the in-core peak. Nothing is trained; transfers are modelled as 12 GB/s each way.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from benchmarks.traces.dtr_log import profile_of, read_log
from pooch.api.hooked import dataflow_of
from pooch.errors import InfeasibleBudget
from pooch.ir import Profile
from pooch.planner import MakeRule
from pooch.published.policies.dtr import DynamicRematerialization
from pooch.simulator import run_online

NAME, TITLE = "traces-dtr", "DTR's operator logs: time over in-core time, by budget"
RATIOS = (0.8, 0.6, 0.4, 0.3, 0.2)
MODELS = ("resnet32", "unet", "transformer", "inceptionv4", "tv_densenet121", "treelstm", "lstm")
NO_TIER_BYTES = 1024  # the smallest swap tier that a plan can be asked for: no activation fits into it
THEIRS = {"DTR": "DTR's simulator", "DTREqClass": "DTR's simulator, eq"}

# Runs DTR's own simulator as its authors' experiments do: the eager runtime, given up at twice the in-core time.
THEIR_RUN = """
import json, math, sys, threading
log, ratios = sys.argv[1], json.loads(sys.argv[2])
from simrd.heuristic import DTR, DTREqClass, Heuristic
from simrd.parse import parse_file
from simrd.runtime import RematExceededError, RuntimeV1, RuntimeV2EagerOptimized
def run():
    with open(log) as file:
        step = parse_file(file, start=True).get_closure()
    plain = RuntimeV1(math.inf, Heuristic(), stats=False, trace=False)
    step(plain)
    peak, compute = plain.telemetry.summary["max_memory"], plain.telemetry.summary["model_compute"]
    found = {}
    for ratio in ratios:
        for heuristic in (DTR, DTREqClass):
            one = RuntimeV2EagerOptimized(int(peak * ratio), heuristic(), remat_limit=compute, trace=False, stats=False)
            try:
                step(one)
                found[f"{heuristic.__name__} {ratio}"] = one.clock / compute
            except MemoryError:
                found[f"{heuristic.__name__} {ratio}"] = "out of memory"
            except RematExceededError:
                found[f"{heuristic.__name__} {ratio}"] = "over 2"
    json.dump({"peak_bytes": peak, "runs": found}, sys.stdout)
sys.setrecursionlimit(10**6)
threading.stack_size(256 << 20)
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


def their_runs(simulator: Path | None, log: Path, ratios: Sequence[float]) -> dict[str, Any]:
    """What DTR's simulator says; nothing without it."""
    if simulator is None:
        return {"peak_bytes": None, "runs": {}}
    command = [sys.executable, "-c", THEIR_RUN, str(log.resolve()), json.dumps(list(ratios))]
    done = subprocess.run(command, cwd=simulator, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(log: Path, ratios: Sequence[float], time_limit_s: float, simulator: Path | None) -> list[dict[str, Any]]:
    """One result per ratio."""
    model = log.name.partition("-")[0]
    profile = profile_of(read_log(log), model)
    theirs = their_runs(simulator, log, ratios)
    results = []
    for ratio in ratios:
        budget_bytes = int(profile.peak_bytes * ratio)
        result: dict[str, Any] = {
            "model": model,
            "ops": len(profile.ops) - 1,
            "activations": len(profile.activations),
            "peak_bytes": profile.peak_bytes,
            "their_peak_bytes": theirs["peak_bytes"],
            "in_core_ms": profile.step_ms,
            "ratio": ratio,
            "runs": {column: theirs["runs"].get(f"{name} {ratio}") for name, column in THEIRS.items()},
        }
        result["runs"] |= {
            "plan": planned(profile, budget_bytes, NO_TIER_BYTES, time_limit_s),
            "online": online(profile, budget_bytes, 0, None),
            "h_DTR on our machine": online(profile, budget_bytes, 0, DynamicRematerialization().rule),
            "plan with swaps": planned(profile, budget_bytes, None, time_limit_s),
        }
        tell(f"{model} at {ratio}: {result['runs']}")
        results.append(result)
    return results


def planned(profile: Profile, budget_bytes: int, host_budget: int | None, time_limit_s: float) -> float | str:
    """Time of the integer program's plan over in-core time, or the smallest share of the peak that has a plan."""
    started_s = time.thread_time()
    try:
        plan = pooch.plan(
            profile, budget_bytes, host_budget=host_budget, region="step", time_limit_s=time_limit_s, explain=False
        )
    except InfeasibleBudget as error:
        return f"needs {error.minimum_bytes / profile.peak_bytes:.1%}"
    finally:
        tell(f"  planned in {time.thread_time() - started_s:.1f} CPU s")
    assert plan.predicted_peak_bytes <= budget_bytes
    return plan.predicted_step_ms / profile.step_ms


def online(profile: Profile, budget_bytes: int, host_budget: int | None, rule: MakeRule | None) -> float | str:
    """Time of a step without a plan over in-core time."""
    run = run_online(dataflow_of(profile, "step", hooked=True), budget_bytes, host_budget, rule)
    return run.step_ms / profile.step_ms if run.feasible else "does not fit"


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: a row per model and ratio."""
    return [
        {
            "model": result["model"],
            "ops": result["ops"],
            "activations": result["activations"],
            "in-core peak": f"{result['peak_bytes'] / 1e9:.2f} GB",
            "budget": f"{result['ratio']:.0%}",
            **{name: told(run) for name, run in result["runs"].items()},
        }
        for result in results
    ]


def told(run: float | str | None) -> str:
    """A ratio, or why there is none."""
    return "" if run is None else run if isinstance(run, str) else f"{run:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path)
    parser.add_argument("--simulator", type=Path)
    parser.add_argument("--model", action="append", help=f"default: {', '.join(MODELS)}")
    parser.add_argument("--ratio", type=float, action="append", help=f"default: {', '.join(map(str, RATIOS))}")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds per plan")
    parser.add_argument("--page-only", action="store_true", help="simulate nothing: make the table of what is stored")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    if given.page_only:
        results = json.loads((given.output / f"{NAME}.json").read_text())["results"]
    for model in () if given.page_only else given.model or MODELS:
        (log,) = given.logs.glob(f"{model}-*.log")
        results += measure(log, given.ratio or RATIOS, given.time_limit, given.simulator)
        write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

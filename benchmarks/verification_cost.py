"""What it costs to compare replays with what they replace.

    python -m benchmarks.verification_cost [--budget 60%] [--rounds 7] [--names gpt2 ...] [--output benchmarks/results]

Each workload is planned at a share of its memory, and steps that compare nothing ("off"), the default in steady state
("first", after its recipes are proven) and "always" take turns on one model, in an order that rotates. Beside them
stands a step under the default whose recipes are not proven, in which every recomputed value is compared wholly and
copied to the tier. All ratios are to the "off" step of the same round: of the elapsed time, and of the processor time
of the whole process, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pooch
from benchmarks.samples import spread
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.api.measure.timing import timed_step
from pooch.executor.verification import PROOFS, Verification
from pooch.workloads.loading import load_workload

if TYPE_CHECKING:
    from pooch.executor import Run
    from pooch.workloads import Workload

Sample = dict[str, float]
NAMES = ("gpt2", "resnet50", "unet3d", "lstm")
WAYS = ("off", "first", "always")
TARGETS = {"first": 1.01, "unproven": 1.10}


def sample(workload: Workload, run: Run) -> Sample:
    """Time one step."""
    begin_s = time.process_time()
    wall_ms = timed_step(workload, run)
    return {"wall_ms": wall_ms, "cpu_ms": (time.process_time() - begin_s) * 1000}


def measured(name: str, budget: str, rounds: int) -> dict[str, Any]:
    """Time the steps of one workload. Samples are in the order in which they were measured."""
    workload = load_workload(name)
    profile = pooch.profile(workload.forward, workload.model, workload.optimizer)
    plan = pooch.plan(profile, budget, region="step")
    samples: dict[str, list[Sample]] = {way: [] for way in (*WAYS, "unproven")}
    with pooch.apply(plan, workload.model, measure_every=None, verify="first") as run:
        timed_step(workload, run)
        for number in range(rounds):
            tell(f"{name}: round {number + 1} of {rounds}")
            turns = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            for way in turns:
                run._verification.verify = way  # what is proven stays so
                if way == "first":
                    for _ in range(PROOFS if number == 0 else 0):
                        timed_step(workload, run)
                samples[way].append(sample(workload, run))
            # The recipes are those of a new plan once more.
            proven, run._verification = run._verification, Verification("first", lambda topic, text: None)
            samples["unproven"].append(sample(workload, run))
            copied_bytes = run.stats.verified_bytes
            run._verification = proven
        told = str(run.verified)
        return {
            "workload": name,
            "budget_bytes": plan.budget_bytes,
            "recomputed": sum(choice.choice == "recompute" for choice in plan.choices),
            "recomputed_ops": run.stats.recomputed_ops,
            "copied_bytes": copied_bytes,
            "verified": told,
            "samples": samples,
        }


def ratios(found: dict[str, Any], way: str, kind: str) -> list[float]:
    """Each sample over the "off" step of its round."""
    samples = found["samples"]
    return [one[kind] / plain[kind] for one, plain in zip(samples[way], samples["off"], strict=True)]


def row(found: dict[str, Any]) -> Row:
    """The row of a workload."""
    off_ms = statistics.median(each["wall_ms"] for each in found["samples"]["off"])
    cells: dict[str, Any] = {
        "workload": found["workload"],
        "recomputed": f"{found['recomputed']} values, {found['recomputed_ops']} ops",
        "step": f"{off_ms:.0f} ms",
    }
    for way, title in (("first", "default, proven"), ("unproven", "default, unproven"), ("always", "always")):
        for kind, what in (("wall_ms", "elapsed"), ("cpu_ms", "processor")):
            found_spread = spread(ratios(found, way, kind))
            assert found_spread is not None
            cells[f"{title}: {what}"] = f"{found_spread.median:.3f} ({found_spread.middle('.3f')})"
    medians = {way: statistics.median(ratios(found, way, "cpu_ms")) for way in TARGETS}
    cells["kept"] = "yes" if all(medians[way] <= most for way, most in TARGETS.items()) else "NO"
    return cells


def main() -> int:
    """Measure, print, write; exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    found = [measured(name, arguments.budget, arguments.rounds) for name in arguments.names]
    rows = [row(each) for each in found]
    write_results("verification-cost-cpu", "What comparing replays costs", rows, found, arguments.output)
    sys.stdout.write(f"{markdown_table(rows)}\n")
    return int(any(each["kept"] == "NO" for each in rows))


if __name__ == "__main__":
    sys.exit(main())

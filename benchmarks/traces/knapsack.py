"""Decisions of PyTorch's knapsack solvers under a budget, beside plans for the same values.

    python -m benchmarks.traces.knapsack [--instances 1000] [--planned 60] [--output DIR]

The solvers are those of torch/_functorch/_activation_checkpointing/knapsack.py, which choose what a compiled graph
saves under `activation_memory_budget`. Instances are the one of pytorch/pytorch#197871 (three values of one unit, room
for one), values that the quantization rounds down, and random small ones of whole units, as in that issue.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch._functorch._activation_checkpointing import knapsack

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.ir import Profile
from tests.toys import FAST_LINK, ToyStep

NAME, TITLE = "traces-knapsack", "PyTorch's knapsack solvers: what they save, against the room that they are given"
UNIT = 1e-4  # to which the solvers quantize memory
UNIT_BYTES = 1_000_000
NO_TIER_BYTES = 1024  # the smallest swap tier that a plan can be asked for: no activation fits into it
NAMES = (
    "greedy_knapsack",
    "dp_knapsack",
    "dp_knapsack_sliding_hirschberg",
)  # the fourth, an integer program, needs scipy
Solver = Callable[[list[float], list[float], float], tuple[float, list[int], list[int]]]


@dataclass(frozen=True)
class Instance:
    """Values that may be saved.

    Attributes:
        kind: where it is from.
        units: memory of each.
        times_ms: to compute each again.
        room: in units.
    """

    kind: str
    units: tuple[float, ...]
    times_ms: tuple[float, ...]
    room: float


def instances(count: int) -> list[Instance]:
    """The public one, one whose values are rounded down, and random ones."""
    draw = random.Random(0)
    found = [
        Instance("pytorch#197871", (1, 1, 1), (1, 1, 1), 1),
        Instance("rounded down", (1.4,) * 10, (1,) * 10, 5),
    ]
    for _ in range(count):
        many = draw.randint(3, 8)
        units = tuple(draw.randint(1, 5) for _ in range(many))
        times_ms = tuple(draw.randint(1, 10) for _ in range(many))
        found.append(Instance("random, whole units", units, times_ms, draw.randint(1, sum(units) - 1)))
    return found


def saved_units(solver: Solver, instance: Instance) -> float:
    """How much a solver saves."""
    memory = [units * UNIT for units in instance.units]
    _, saved, _ = solver(memory, list(instance.times_ms), instance.room * UNIT)
    return sum(instance.units[item] for item in saved)


def profile_of(instance: Instance) -> Profile:
    """A step that makes the values from parameters, and reads them in its backward pass."""
    step = ToyStep()
    for units, time_ms in zip(instance.units, instance.times_ms, strict=True):
        weight = step.parameter(UNIT_BYTES)
        step.op([weight], [round(units * UNIT_BYTES)], saves=[], saves_outputs=[0], time_ms=time_ms)
    return step.build(FAST_LINK, persistent_bytes=0, workload="knapsack")


def planned_excess(instance: Instance) -> float:
    """Peak over budget of our plan. The value that is just being made needs its own bytes besides the room."""
    profile = profile_of(instance)
    room_bytes = (instance.room + max(instance.units)) * UNIT_BYTES
    budget_bytes = min(profile.peak_bytes, profile.persistent_bytes + round(room_bytes))
    plan = pooch.plan(profile, budget_bytes, host_budget=NO_TIER_BYTES, region="step", explain=False)
    return plan.predicted_peak_bytes / budget_bytes


def measure(count: int, planned: int) -> list[dict[str, Any]]:
    """One result per kind of instance."""
    results = []
    by_kind: dict[str, list[Instance]] = {}
    for instance in instances(count):
        by_kind.setdefault(instance.kind, []).append(instance)
    for kind, members in by_kind.items():
        result: dict[str, Any] = {"kind": kind, "instances": len(members), "example": asdict(members[0]), "solvers": {}}
        for name in NAMES:
            shares = [saved_units(getattr(knapsack, name), each) / each.room for each in members]
            over = sum(share > 1 + 1e-9 for share in shares)
            result["solvers"][name] = {"over": over, "worst": max(shares)}
            tell(f"{kind}, {name}: {over} of {len(members)} over, at worst {max(shares):.2f}")
        excesses = [planned_excess(each) for each in members[:planned]]
        result["plans"] = {"planned": len(excesses), "over": sum(e > 1 for e in excesses), "worst": max(excesses)}
        results.append(result)
    return results


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """How many decisions pass what they were given, and by how much at worst."""
    return [
        {
            "instances": f"{result['kind']}: {result['instances']}",
            **{
                name.removesuffix("_knapsack"): f"{run['over']} over, at most {run['worst']:.2f} of the room"
                for name, run in result["solvers"].items()
            },
            "plans": f"{result['plans']['over']} of {result['plans']['planned']} over, at most "
            f"{result['plans']['worst']:.2f} of the budget",
        }
        for result in results
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Solve, plan, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--planned", type=int, default=60, help="instances of a kind that we plan")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    results = measure(given.instances, given.planned)
    write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the integer program with all possible decisions, on many small random steps: docs/oracle.md.

    python -m benchmarks.oracle_sweep [--steps 12] [--activations 9] [--first-seed 0] [--processes 2] [--page-only]

Makes `--steps` steps of each shape (`tests/planner/shapes.py`): chains, skips, shared inputs, in-place ops, and a
mixture, with unequal sizes and links of all kinds. Each of the 3^n decisions is lowered and simulated. Writes every
step to benchmarks/results/oracle.json and makes the page from that file; `--page-only` only makes the page. Exit code 1
if a plan is over 1% slower than the best, or a bound is above it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.tables import markdown_table
from pooch.errors import InfeasibleBudget
from pooch.ir.files import replace_file
from tests.planner.shapes import SHAPES
from tests.planner.support import all_decisions, case, make_plan, oracle_ms

RESULTS, PAGE = Path("benchmarks/results/oracle.json"), Path("docs/oracle.md")
MOST_SLOWER = 0.01
NOISE_MS = 1e-6
SHARES = (0.0, 0.25, 0.5, 0.75)
HEAD = """# Plans against all decisions

Made by `{command}`.
Random steps of five shapes, with unequal sizes and links of all kinds, each small enough to lower and simulate every
combination of keep, swap and recompute. The budget is 0, 25, 50 or 75% of the way from the smallest peak of any
combination to the in-core peak. "Slower": the integer program's step relative to the best step of all combinations that
fit. "Gap": the gap that the program reports. "Bound": the largest lower bound relative to the best step; above 100% it
would be wrong. "Failed": slower by more than 1%, or a bound above the best step.

"""


@dataclass(frozen=True)
class Checked:
    """One step under one budget: how the plan and the bound compare with the best of all decisions."""

    shape: str
    seed: int
    activations: int
    decisions: int
    slower: float
    gap: float
    bound_share: float
    bound_above_ms: float

    @property
    def is_good(self) -> bool:
        return self.slower <= MOST_SLOWER and self.bound_above_ms <= NOISE_MS


def check(shape: str, seed: int, most_activations: int) -> Checked | None:
    """None where the step is too long or too short, or fits anyway."""
    random = Random(f"{shape} {seed}")
    of = case(SHAPES[shape](random, random.randint(4, most_activations)))
    activations = len(of.dataflow.activations)
    if not 3 <= activations <= most_activations:
        return None
    peaks = [of.evaluator.evaluate(decisions, 1).timeline.peak_bytes for decisions in all_decisions(of.dataflow)]
    budget_bytes = int(min(peaks) + random.choice(SHARES) * (of.profile.peak_bytes - min(peaks)))
    best_ms = oracle_ms(of, budget_bytes)
    if budget_bytes >= of.profile.peak_bytes or not best_ms:
        return None
    try:
        planned = make_plan(of.dataflow, budget_bytes, of.evaluator, explain=False)
    except InfeasibleBudget:
        return Checked(shape, seed, activations, len(peaks), float("inf"), 1.0, 0.0, 0.0)
    bound_ms = planned.lower_bound_ms
    slower = planned.timeline.step_ms / best_ms - 1
    return Checked(
        shape, seed, activations, len(peaks), slower, planned.gap, bound_ms / best_ms, bound_ms - best_ms
    )  # fmt: skip


def sweep(shape: str, steps: int, most_activations: int, first_seed: int) -> list[Checked]:
    """So many steps of one shape."""
    found: list[Checked] = []
    for seed in count(first_seed):
        checked = check(shape, seed, most_activations)
        if checked is not None:
            found.append(checked)
            sys.stderr.write(f"  {checked}\n")
        if len(found) == steps:
            return found
    raise AssertionError("unreachable: seeds do not end")


def table(found: Sequence[Checked]) -> str:
    """One line per shape."""
    rows = []
    for shape in dict.fromkeys(checked.shape for checked in found):
        of_shape = [checked for checked in found if checked.shape == shape]
        worst = max(of_shape, key=lambda checked: checked.slower)
        rows.append(
            {
                "shape": shape,
                "steps": len(of_shape),
                "activations": f"{min(c.activations for c in of_shape)} to {max(c.activations for c in of_shape)}",
                "combinations tried": sum(c.decisions for c in of_shape),
                "best found": sum(c.slower <= 1e-9 for c in of_shape),
                "slower at most": f"{worst.slower:.3%}",
                "largest gap": f"{max(c.gap for c in of_shape):.1%}",
                "bound at most": f"{max(c.bound_share for c in of_shape):.3%}",
                "failed": sum(not c.is_good for c in of_shape),
            }
        )
    return markdown_table(rows)


def page(document: Mapping[str, Any]) -> str:
    """The whole page, of what was stored."""
    return HEAD.format(command=document["command"]) + table(checked_of(document)) + "\n"


def checked_of(document: Mapping[str, Any]) -> list[Checked]:
    """The steps that were stored."""
    return [Checked(**each) for each in document["results"]]


def main() -> int:
    """Check so many steps of each shape, write the page, and say whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each shape")
    parser.add_argument("--activations", type=int, default=9, help="at most")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--page-only", action="store_true", help="check nothing: make the page of the stored steps")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if not arguments.page_only:
        jobs = [(shape, arguments.steps, arguments.activations, arguments.first_seed) for shape in SHAPES]
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            swept = [asdict(checked) for part in pool.starmap(sweep, jobs, chunksize=1) for checked in part]
        asked = f"--steps {arguments.steps} --activations {arguments.activations} --first-seed {arguments.first_seed}"
        made = {"command": f"python -m benchmarks.oracle_sweep {asked}", "results": swept}
        replace_file(arguments.results, json.dumps(made, indent=1).encode())
    document = json.loads(arguments.results.read_text())
    found = checked_of(document)
    replace_file(arguments.output, page(document).encode())
    sys.stdout.write(table(found) + "\n")
    return 0 if all(checked.is_good for checked in found) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Plans and bounds of the integer program against every decision there is, on many small random steps.

    python -m benchmarks.oracle_sweep [--steps 100] [--activations 9] [--first-seed 0]

Steps have chains, skips, shared inputs, in-place ops, unequal sizes and links of all kinds (`tests/toys.py`). Each of
the 3^n decisions is lowered and simulated. Exit code 1 where a plan is over 1% slower than the best, or a bound above.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from random import Random

from pooch.errors import InfeasibleBudget
from pooch.planner import make_plan
from tests.planner.support import case, oracle_ms, oracle_peak
from tests.toys import random_profile

MOST_SLOWER = 0.01
NOISE_MS = 1e-6
SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Checked:
    """One step under one budget: how much slower than the best the plan is, and how far above it the bound."""

    seed: int
    activations: int
    slower: float
    bound_above_ms: float

    @property
    def is_good(self) -> bool:
        return self.slower <= MOST_SLOWER and self.bound_above_ms <= NOISE_MS


def check(seed: int, most_activations: int) -> Checked | None:
    """None where the step is too long, too short, or fits anyway."""
    random = Random(seed)
    of = case(random_profile(random, random.randint(4, 16)))
    activations = len(of.dataflow.activations)
    if not 3 <= activations <= most_activations:
        return None
    low = oracle_peak(of)
    budget_bytes = int(low + random.choice(SHARES) * (of.profile.peak_bytes - low))
    best_ms = oracle_ms(of, budget_bytes)
    if budget_bytes >= of.profile.peak_bytes or best_ms is None:
        return None
    try:
        planned = make_plan(of.dataflow, budget_bytes, of.evaluator)
    except InfeasibleBudget:
        return Checked(seed, activations, float("inf"), 0.0)
    slower = planned.timeline.step_ms / best_ms - 1 if best_ms else 0.0
    return Checked(seed, activations, slower, planned.lower_bound_ms - best_ms)


def main() -> None:
    """Check so many steps; tell each failure and the worst case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--activations", type=int, default=9, help="at most")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    found: list[Checked] = []
    seed = arguments.first_seed
    while len(found) < arguments.steps:
        checked = check(seed, arguments.activations)
        seed += 1
        if checked is not None:
            found.append(checked)
            if not checked.is_good:
                sys.stdout.write(f"FAILED {checked}\n")
    bad = sum(not checked.is_good for checked in found)
    worst = max(found, key=lambda checked: checked.slower)
    longest = max(checked.activations for checked in found)
    sys.stdout.write(
        f"{len(found)} steps of up to {longest} activations: {bad} failed; the slowest plan is {worst.slower:.3%} over "
        f"the best there is (seed {worst.seed}); the nearest bound is "
        f"{abs(max(checked.bound_above_ms for checked in found)):.6f} ms away from it\n"
    )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

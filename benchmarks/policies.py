"""Every policy on every recorded profile at several budgets: docs/policies.md.

    python -m benchmarks.policies [--profile profiles/NAME.json ...] [--budget 80% ...] [--time-limit 60]

Everything is simulated, nothing is trained. A budget that no plan can keep is replaced by the smallest one that can be
kept. Ends with exit code 1 where any policy's plan is faster than the integer program's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import tell
from pooch.errors import InfeasibleBudget
from pooch.ir import Profile
from pooch.session import ComparisonRow, compare, plan
from pooch.units import format_bytes, format_ms

BUDGETS = ("80%", "60%", "45%", "35%")
TOLERANCE_MS = 1e-6
HEAD = """# The policies side by side

Made by `python -m benchmarks.policies` from the recorded profiles in `profiles/`; simulated, not trained. A cell is the
predicted step over the in-core step (1.0000: nothing lost), the fastest of a column in bold; "needs": the method has no
plan under that budget, and the smallest budget for which it has one, as a share of the in-core peak. "lower bound": no
plan whatever is faster in the simulator's model. What each method does is in [methods.md](methods.md).
"""


@dataclass(frozen=True)
class ProfileCells:
    """All cells of one profile; `columns`: (heading, budget in bytes)."""

    profile: Profile
    columns: tuple[tuple[str, int], ...]
    rows: tuple[ComparisonRow, ...]

    def cell(self, policy: str, budget_bytes: int) -> ComparisonRow:
        return next(row for row in self.rows if (row.policy, row.budget_bytes) == (policy, budget_bytes))


def measure_profile(profile: Profile, budgets: Sequence[str], time_limit_s: float) -> ProfileCells:
    """Plan one profile by every policy under each budget."""
    columns = tuple(dict.fromkeys(_column(profile, budget, time_limit_s) for budget in budgets))
    rows = compare(
        profile,
        [budget_bytes for _, budget_bytes in columns],
        time_limit_s=time_limit_s,
        region="step",
        progress=lambda text, share: tell(f"{profile.workload}: {text} ({share:.0%})"),
    )
    return ProfileCells(profile, columns, rows)


def _column(profile: Profile, budget: str, time_limit_s: float) -> tuple[str, int]:
    """The budget, or the smallest that can be kept."""
    budget_bytes = int(float(budget.removesuffix("%")) * profile.peak_bytes / 100)
    try:  # swaps alone reach the smallest peak, and quickly
        plan(profile, budget_bytes, policy="swap_opt", time_limit_s=time_limit_s, region="step")
    except InfeasibleBudget:
        try:
            plan(profile, budget_bytes, time_limit_s=time_limit_s, region="step")
        except InfeasibleBudget as error:
            return f"{100 * error.minimum_bytes / profile.peak_bytes:.1f}% (smallest)", error.minimum_bytes
    return budget, budget_bytes


def beaten(cells: ProfileCells) -> list[ComparisonRow]:
    """Plans that are faster than the integer program's."""
    found = []
    for row in cells.rows:
        best = cells.cell("ilp", row.budget_bytes).plan
        if row.plan is not None and (
            best is None or row.plan.predicted_step_ms < best.predicted_step_ms - TOLERANCE_MS
        ):
            found.append(row)
    return found


def section(cells: ProfileCells) -> str:
    """The part of the page on one profile."""
    profile, link = cells.profile, cells.profile.link
    policies = list(dict.fromkeys(row.policy for row in cells.rows))
    modelled = " (modelled)" if profile.device.modelled else ""
    lines = [
        f"## {profile.workload}, batch {profile.batch_size}",
        "",
        f"{profile.device.name}{modelled}; in-core {format_ms(profile.step_ms)}, {format_bytes(profile.peak_bytes)};",
        f"{len(profile.activations)} activations; {link.tier}: {format_bytes(link.out_bytes_per_ms * 1000)}/s out,",
        f"{format_bytes(link.in_bytes_per_ms * 1000)}/s in, "
        f"{'both ways at once' if link.full_duplex else 'one way at a time'}.",
        "",
        _line(["policy", *(heading for heading, _ in cells.columns)]),
        _line(["---", *("---:" for _ in cells.columns)]),
        *(_line([policy, *(_cell(cells, policy, budget) for _, budget in cells.columns)]) for policy in policies),
        _line(["*lower bound*", *(_bound(cells, budget) for _, budget in cells.columns)]),
    ]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _cell(cells: ProfileCells, policy: str, budget_bytes: int) -> str:
    row = cells.cell(policy, budget_bytes)
    if row.plan is None:
        return f"needs {100 * row.minimum_bytes / cells.profile.peak_bytes:.1f}%"
    steps_ms = [r.plan.predicted_step_ms for r in cells.rows if r.plan is not None and r.budget_bytes == budget_bytes]
    told = f"{row.plan.predicted_step_ms / row.plan.in_core_step_ms:.4f}"
    return f"**{told}**" if row.plan.predicted_step_ms <= min(steps_ms) + TOLERANCE_MS else told


def _bound(cells: ProfileCells, budget_bytes: int) -> str:
    best = cells.cell("ilp", budget_bytes).plan
    return "" if best is None else f"{best.lower_bound_ms / best.in_core_step_ms:.4f}"


def main() -> int:
    """Plan everything, write the page, and say whether anything beat the integer program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", help="default: all in profiles/")
    parser.add_argument("--budget", action="append", help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan")
    parser.add_argument("--output", type=Path, default=Path("docs/policies.md"))
    arguments = parser.parse_args()
    paths = arguments.profile or sorted(Path("profiles").glob("*.json"))
    measured = [measure_profile(Profile.load(p), arguments.budget or BUDGETS, arguments.time_limit) for p in paths]
    arguments.output.write_text("\n".join([HEAD, *(section(cells) for cells in measured)]))
    losses = [row for cells in measured for row in beaten(cells)]
    for row in losses:
        tell(f"{row.policy} beats the integer program at {format_bytes(row.budget_bytes)}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())

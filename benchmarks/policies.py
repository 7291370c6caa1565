"""Every policy on every recorded profile at several budgets: docs/policies.md.

    python -m benchmarks.policies [--profile profiles/NAME.json ...] [--budget 80% ...] [--time-limit 60] [--page-only]
    python -m benchmarks.policies --policy online [--policy ...]

Everything is simulated, nothing is trained. A budget that no plan can keep is replaced by the smallest one that can be
kept. Writes every cell to benchmarks/results/policies.json and makes the page of that file alone; `--page-only` makes
the page again, `--policy` plans by these policies alone under the stored budgets and keeps the other cells. Ends with
exit code 1 where any policy's plan is faster than the integer program's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.tables import tell
from pooch.api.measure.comparison import ComparisonRow, compare
from pooch.api.options import PlanOptions
from pooch.api.planning import plan
from pooch.errors import InfeasibleBudget
from pooch.ground.units import format_bytes, format_ms
from pooch.ir import Link, Profile
from pooch.ir.files import replace_file
from pooch.planner import policy_names

BUDGETS = ("80%", "60%", "45%", "35%")
TOLERANCE_MS = 1e-6
RESULTS, PAGE = Path("benchmarks/results/policies.json"), Path("docs/policies.md")
HEAD = """# The policies side by side

Made by `python -m benchmarks.policies` from the recorded profiles in `profiles/`, as `pooch compare` compares policies;
simulated, not trained, so that what is faster here is *predicted* to be. A cell is the predicted step relative to the
in-core step (1.0000: nothing lost); the fastest of each column is in bold. "needs" means
that the method has no plan under that budget, and gives the smallest budget for which it has one, as a share of the
in-core peak. "lower bound": no plan is faster in the simulator's model. [methods.md](methods.md) describes the methods.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one policy makes of one budget.

    Attributes:
        step_ms, lower_bound_ms: predicted; None where the policy has no plan.
        minimum_bytes: the smallest budget for which it has one, where it has none here; else 0.
    """

    policy: str
    budget_bytes: int
    step_ms: float | None
    lower_bound_ms: float | None
    minimum_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileCells:
    """All cells of one profile.

    Attributes:
        profile_digest: of the file that holds the profile, "" where it is in no file.
        in_core_ms, peak_bytes, activations: of the profile.
        columns: (heading, budget in bytes).
    """

    workload: str
    batch_size: int
    profile_digest: str
    device: str
    in_core_ms: float
    peak_bytes: int
    activations: int
    link: Link
    columns: tuple[tuple[str, int], ...]
    cells: tuple[Cell, ...]

    def cell(self, policy: str, budget_bytes: int) -> Cell:
        return next(cell for cell in self.cells if (cell.policy, cell.budget_bytes) == (policy, budget_bytes))


def measure_profile(
    profile: Profile,
    budgets: Sequence[str],
    time_limit_s: float,
    profile_digest: str = "",
    policies: Sequence[str] = (),
) -> ProfileCells:
    """Plan one profile by every policy, or by these, under each budget."""
    columns = tuple(dict.fromkeys(_column(profile, budget, time_limit_s) for budget in budgets))
    rows = compare(
        profile,
        [budget_bytes for _, budget_bytes in columns],
        PlanOptions(time_limit_s=time_limit_s, region="step"),
        policies=policies,
        progress=lambda text, share: tell(f"{profile.workload}: {text} ({share:.0%})"),
    )
    return ProfileCells(
        workload=profile.workload,
        batch_size=profile.batch_size,
        profile_digest=profile_digest,
        device=profile.device.name + (" (modelled)" if profile.device.modelled else ""),
        in_core_ms=profile.step_ms,
        peak_bytes=profile.peak_bytes,
        activations=len(profile.activations),
        link=profile.link,
        columns=columns,
        cells=tuple(_cell_of(row) for row in rows),
    )


def with_policies(found: ProfileCells, profile: Profile, policies: Sequence[str], time_limit_s: float) -> ProfileCells:
    """The cells with those of some policies planned again, under the same budgets."""
    options = PlanOptions(time_limit_s=time_limit_s, region="step")
    rows = compare(profile, [budget_bytes for _, budget_bytes in found.columns], options, policies=policies)
    kept = (cell for cell in found.cells if cell.policy not in policies)
    columns, order = [budget_bytes for _, budget_bytes in found.columns], policy_names()
    places = {(budget, policy): (columns.index(budget), order.index(policy)) for budget in columns for policy in order}
    cells = sorted([*kept, *map(_cell_of, rows)], key=lambda cell: places[cell.budget_bytes, cell.policy])
    return replace(found, cells=tuple(cells))


def _cell_of(row: ComparisonRow) -> Cell:
    if row.plan is None:
        return Cell(row.policy, row.budget_bytes, None, None, row.minimum_bytes)
    return Cell(row.policy, row.budget_bytes, row.plan.predicted_step_ms, row.plan.lower_bound_ms, 0)


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


def beaten(found: ProfileCells) -> list[Cell]:
    """Plans that are faster than the integer program's."""
    losses = []
    for cell in found.cells:
        best_ms = found.cell("ilp", cell.budget_bytes).step_ms
        if cell.step_ms is not None and (best_ms is None or cell.step_ms < best_ms - TOLERANCE_MS):
            losses.append(cell)
    return losses


def section(found: ProfileCells) -> str:
    """The part of the page on one profile."""
    link = found.link
    policies = list(dict.fromkeys(cell.policy for cell in found.cells))
    lines = [
        f"## {found.workload}, batch {found.batch_size}",
        "",
        f"{found.device}; in-core {format_ms(found.in_core_ms)}, {format_bytes(found.peak_bytes)};",
        f"{found.activations} activations; {link.tier}: {format_bytes(link.out_bytes_per_ms * 1000)}/s out,",
        f"{format_bytes(link.in_bytes_per_ms * 1000)}/s in, "
        f"{'both ways at once' if link.full_duplex else 'one way at a time'}.",
        "",
        _line(["policy", *(heading for heading, _ in found.columns)]),
        _line(["---", *("---:" for _ in found.columns)]),
        *(_line([policy, *(_text(found, policy, budget) for _, budget in found.columns)]) for policy in policies),
        _line(["*lower bound*", *(_bound(found, budget) for _, budget in found.columns)]),
    ]
    return "\n".join(lines) + "\n"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _text(found: ProfileCells, policy: str, budget_bytes: int) -> str:
    cell = found.cell(policy, budget_bytes)
    if cell.step_ms is None:
        return f"needs {100 * cell.minimum_bytes / found.peak_bytes:.1f}%"
    steps_ms = [c.step_ms for c in found.cells if c.step_ms is not None and c.budget_bytes == budget_bytes]
    told = f"{cell.step_ms / found.in_core_ms:.4f}"
    return f"**{told}**" if cell.step_ms <= min(steps_ms) + TOLERANCE_MS else told


def _bound(found: ProfileCells, budget_bytes: int) -> str:
    bound_ms = found.cell("ilp", budget_bytes).lower_bound_ms
    return "" if bound_ms is None else f"{bound_ms / found.in_core_ms:.4f}"


def page(measured: Sequence[ProfileCells]) -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(cells) for cells in measured)])


def stored(path: Path = RESULTS) -> list[ProfileCells]:
    """The cells that were written to a file."""
    return [_loaded(each) for each in json.loads(path.read_text())["results"]]


def _loaded(each: Mapping[str, Any]) -> ProfileCells:
    whole = {
        "link": Link(**each["link"]),
        "columns": tuple((heading, budget_bytes) for heading, budget_bytes in each["columns"]),
        "cells": tuple(Cell(**cell) for cell in each["cells"]),
    }
    return ProfileCells(**{**each, **whole})


def digest_of(path: Path) -> str:
    """Of a profile's file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Plan everything, write cells and page, and say whether anything beat the integer program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, action="append", help="default: all in profiles/")
    parser.add_argument("--budget", action="append", help=f"default: {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds per plan")
    parser.add_argument("--page-only", action="store_true", help="plan nothing: make the page of the stored cells")
    parser.add_argument("--policy", action="append", help="plan by these alone, keep the stored cells of the others")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if not arguments.page_only:
        paths = arguments.profile or sorted(Path("profiles").glob("*.json"))
        budgets = arguments.budget or BUDGETS
        if arguments.policy:
            known, limit_s = {cells.profile_digest: cells for cells in stored(arguments.results)}, arguments.time_limit
            planned = [with_policies(known[digest_of(p)], Profile.load(p), arguments.policy, limit_s) for p in paths]
        else:
            planned = [measure_profile(Profile.load(p), budgets, arguments.time_limit, digest_of(p)) for p in paths]
        document = {"time_limit_s": arguments.time_limit, "results": [asdict(cells) for cells in planned]}
        replace_file(arguments.results, json.dumps(document, indent=1).encode())
    measured = stored(arguments.results)
    replace_file(arguments.output, page(measured).encode())
    losses = [cell for cells in measured for cell in beaten(cells)]
    for cell in losses:
        tell(f"{cell.policy} beats the integer program at {format_bytes(cell.budget_bytes)}")
    return 1 if losses else 0


if __name__ == "__main__":
    sys.exit(main())

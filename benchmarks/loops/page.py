"""The page docs/loops.md, made from the stored lines alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.architectures import outcome
from benchmarks.tables import Row, markdown_table
from pooch.ground.units import format_bytes

Line = Mapping[str, Any]
WIDTH = 160
HEAD = """# Loops of others

Made by `python -m benchmarks.loops` from `benchmarks/results/loops-cpu.jsonl`. Each line is a training loop as the
examples and tutorials of PyTorch, Hugging Face, TRL, PEFT, Accelerate and Lightning have it, written from their
documentation (`benchmarks/loops/`), with random weights and data and small sizes. Those of the
[training scripts](setups.md) are others.

- **Each training is a process of its own**: plain training first, then under 75% and 50% of its peak, with one line
  (`pooch.auto`, or the callback of the framework) and without any, as `pooch exec` finds the models.
- **same bits**: losses, evaluations, what is saved in the end and the random state, compared with plain training, with
  deterministic algorithms and one thread. Plain training in the process that had Pooch has to have them as well.
- **peak**: of the whole training, evaluation and optimizer steps included, counted below PyTorch, in the C library,
  without Pooch (`benchmarks/setups/counting.cpp`). **held**: it is within the budget. **told**: it is not, by the
  factor that follows, and Pooch has said so.
- **largest need**: the larger of what the script holds (its data above all) and of what the operator needs that needs
  most: what it reads, and what it adds while it runs. No budget below it can be held, whatever leaves. An evaluation
  without gradients saves nothing, so that nothing of it can leave.
- **x**: processor time of the training thread, the median step under the budget over the median plain step of the same
  process. These steps are small: a few milliseconds, of which hooks take their share.
"""


def page(lines: Mapping[str, Line], found: str) -> str:
    """The page.

    Args:
        lines: What is stored, by the name of the loop.
        found: What the sweep has found, as told by hand.
    """
    trained = [line for line in lines.values() if line["governed"]]
    failed = [line for line in lines.values() if not line["governed"]]
    parts = [HEAD, "## What came of it\n", in_words(trained) + "\n", markdown_table([row_of(line) for line in trained])]
    reasons = [_reason(line, cell) for line in trained for cell in line["governed"] if not _is_good(cell)]
    if reasons:
        parts += ["", "## What falls short, and why\n", *reasons]
    if failed:
        parts += [
            "",
            "## Not trained plainly\n",
            *(f"- {line['name']}: {line['plain']['failure'][:WIDTH]}" for line in failed),
        ]
    return "\n".join([*parts, "", found])


def in_words(trained: list[Line]) -> str:
    """How many there are of each kind."""
    cells = [cell for line in trained for cell in line["governed"]]
    done = [cell for cell in cells if not cell["failure"]]
    over = [cell for cell in done if not outcome.is_within(cell)]
    told = sum(map(outcome.is_told, over))
    below = sum(cell["budget_bytes"] < need_bytes(line["plain"]) for line in trained for cell in line["governed"])
    times = [outcome.slowdown(cell) for cell in done] or [0.0]
    return (
        f"{len(trained)} loops in {len(cells)} trainings under a budget: {len(done)} ended, "
        f"{sum(map(_is_same, done))} of them with the same bits, {len(done) - len(over)} within the budget; "
        f"{told} passed it and said so, {len(over) - told} without saying so; {below} of these budgets are below the "
        f"largest need. Median time {statistics.median(times):.2f}."
    )


def need_bytes(plain: Mapping[str, Any]) -> int:
    """The larger of what the script holds and of what one operator needs."""
    return int(max(plain["need_bytes"] - plain["held_bytes"], plain["held_bytes"]))


def row_of(line: Line) -> Row:
    """The row of a loop."""
    plain = line["plain"]
    cells = {f"{cell['way']} {cell['share']:.0%}": _in_short(cell) for cell in line["governed"]}
    return {
        "loop": line["name"],
        "steps": plain["steps"],
        "plain peak": format_bytes(plain["peak_bytes"]),
        "largest need": f"{need_bytes(plain) / plain['peak_bytes']:.0%}" if plain["need_bytes"] else "unknown",
        **cells,
    }


def _in_short(cell: Mapping[str, Any]) -> str:
    if cell["failure"]:
        return "**not ended**"
    passed = cell["peak_bytes"] / cell["budget_bytes"]
    held = "held" if outcome.is_within(cell) else f"{'told' if outcome.is_told(cell) else '**not told**'} {passed:.3f}"
    counts = "/".join(str(cell["pooch"][f"steps_{kind}"]) for kind in ("on_plan", "online", "in_core"))
    bits = "" if _is_same(cell) else "**other bits**, "
    return f"{bits}{held}, {counts}, x{outcome.slowdown(cell):.2f}"


def _is_same(cell: Mapping[str, Any]) -> bool:
    return outcome.is_same(cell) and not cell["differences_afterwards"]  # type: ignore[arg-type]


def _is_good(cell: Mapping[str, Any]) -> bool:
    return not cell["failure"] and _is_same(cell) and outcome.is_within(cell)  # type: ignore[arg-type]


def _reason(line: Line, cell: Mapping[str, Any]) -> str:
    plain, start = line["plain"], f"- {line['name']}, {cell['way']} {cell['share']:.0%}"
    if cell["failure"]:
        return f"{start}: {cell['failure'][:WIDTH]}"
    if not _is_same(cell):
        return f"{start}: {', '.join([*cell['differences'], *cell['differences_afterwards']])} differ"
    if cell["budget_bytes"] < need_bytes(plain):
        return (
            f"{start}: the budget of {format_bytes(cell['budget_bytes'])} is below the largest need of "
            f"{format_bytes(need_bytes(plain))} ({plain['need_operator']})"
        )
    ungoverned = [line for line in cell["told"] if "no call of" in line]
    return f"{start}: {'; '.join([cell['pooch']['verdict'].removeprefix('pooch: '), *ungoverned])}"

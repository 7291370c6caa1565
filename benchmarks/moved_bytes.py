"""What a step moves of parameters, gradients and state: at least, by a plan with everything, and under `pooch.auto`.

    python -m benchmarks.moved_bytes [--steps 6]

The model is that of `benchmarks.persistent_peers`. Nothing is timed. An optimizer uses all of these, and at its end all
of them are new: what exceeds the budget has to be copied out and back in each step, whatever the order.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import pooch
from benchmarks.persistent_peers import BATCH, LENGTH, VOCABULARY, WARM_STEPS, Model
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.ground.units import format_bytes
from pooch.ir import Profile

NAME, TITLE = "moved-bytes-cpu", "What a step moves of parameters, gradients and state"
SHARES = (0.7, 0.54, 0.36)  # of the in-core peak
Found = dict[str, Any]


def made() -> tuple[Model, torch.optim.AdamW, torch.Tensor]:
    """The model, its optimizer, and a batch."""
    torch.manual_seed(0)
    model = Model(is_checkpointed=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(0, VOCABULARY, (BATCH, LENGTH))


def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def profiled() -> Profile:
    """The step, measured."""
    model, optimizer, tokens = made()
    return pooch.profile(lambda: loss_of(model, tokens), model, optimizer=optimizer)


def planned(profile: Profile, budget_bytes: int) -> tuple[int, int]:
    """What a plan copies out and back of them in each step."""
    persistent = pooch.plan(profile, budget_bytes, moves="all", explain=False).persistent
    assert persistent is not None
    return persistent.copied_out_bytes, persistent.copied_in_bytes


def trained(budget_bytes: int, steps: int) -> tuple[int, int]:
    """What `pooch.auto` copies out and back of them in each step."""
    model, optimizer, tokens = made()
    with pooch.auto(model, budget_bytes, optimizer, quiet=True) as auto:

        def moved() -> tuple[int, int]:
            kinds = auto.summary().persistent
            return sum(each.out_bytes for each in kinds), sum(each.in_bytes for each in kinds)

        begin = (0, 0)
        for number in range(WARM_STEPS + steps):
            if number == WARM_STEPS:
                begin = moved()
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            while auto.is_planning:
                time.sleep(0.05)
        end = moved()
    return (end[0] - begin[0]) // steps, (end[1] - begin[1]) // steps


def measured(profile: Profile, share: float, steps: int) -> Found:
    """One budget."""
    budget_bytes = int(share * profile.peak_bytes)
    tell(format_bytes(budget_bytes))
    held_bytes = sum(each.size_bytes for each in profile.persistent)
    least_bytes = max(0, held_bytes - budget_bytes)
    return {
        "workload": str(share), "budget_bytes": budget_bytes, "held_bytes": held_bytes,
        "least_bytes": (least_bytes, least_bytes), "planned_bytes": planned(profile, budget_bytes),
        "trained_bytes": trained(budget_bytes, steps),
    }  # fmt: skip


def rows_of(results: list[Found]) -> list[Row]:
    """One row for each budget."""
    return [
        {
            "budget": format_bytes(found["budget_bytes"]),
            "parameters, gradients and state": format_bytes(found["held_bytes"]),
            "at least: out, back": _both(found["least_bytes"]),
            "by a plan": _both(found["planned_bytes"]),
            "under `pooch.auto`": _both(found["trained_bytes"]),
        }
        for found in results
    ]


def _both(moved: tuple[int, int]) -> str:
    return ", ".join(map(format_bytes, moved))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps of `pooch.auto` that count")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    profile = profiled()
    results = [measured(profile, share, arguments.steps) for share in SHARES]
    rows = rows_of(results)
    sys.stdout.write(markdown_table(rows) + "\n")
    write_results(NAME, TITLE, rows, results, arguments.output)


if __name__ == "__main__":
    main()

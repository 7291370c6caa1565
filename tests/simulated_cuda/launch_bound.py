"""Predicted and measured times of steps that wait for their host: `python -m tests.simulated_cuda.launch_bound`.

Kernels and copies of the simulated device are told to take almost nothing, so a step takes what the host needs to issue
it, and a plan costs what its hooks, replays and copies take of the host. That is what the simulator's host clock
predicts (docs/schedule.md). How long a kernel takes cannot be tested here, and nothing of this is a GPU figure.

Each round is a process of its own: it profiles a few times and keeps the shortest step, plans, and lets plain and
planned steps take turns, of which the shortest count: other programs only make a step longer. What a plan costs is
compared as a multiple of the plain step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tests.simulated_cuda.environment import ROOT, VENV, set_up_or_tell, variables

PACE = {"SIMULATED_CUDA_KERNEL_US": "0", "SIMULATED_CUDA_COPY_GB_PER_S": "1000"}
POLICIES = ("ilp", "recompute_all", "swap_all")
BUDGET, PROFILES = 0.6, 5
LAYERS, WIDTH, ROWS = 48, 64, 256  # activations of 64 KiB: copies are real, and large ones would take time
NAMES, BATCH_SIZE = ("gpt2@small", "mlp"), 4


@dataclass(frozen=True)
class Row:
    """A plan in one round. Plain training: policy "plain", all of it as it was profiled and then measured again.

    Attributes:
        predicted, measured: the planned step as a multiple of the plain one; of plain training the step in ms.
        swaps, replays: of the schedule.
    """

    workload: str
    policy: str
    predicted: float
    measured: float
    ops: int = 0
    swaps: int = 0
    replays: int = 0


@contextmanager
def workload_of(name: str) -> Iterator[Any]:
    """One of `NAMES`, on the device."""
    from tests.simulated_cuda.peaks import fresh

    if name == "mlp":
        yield _mlp()
        return
    with fresh(name, batch_size=BATCH_SIZE) as workload:
        yield workload


def _mlp() -> Any:
    import torch

    from pooch.workloads import Workload

    with torch.device("cuda"):
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
        model, rows = torch.nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Workload(model, lambda: model(rows).square().mean(), optimizer, "mlp", ROWS)


def rows_of(name: str, turns: int) -> list[Row]:
    """One round.

    Args:
        turns: steps of each kind.
    """
    import pooch
    from pooch.api.measure.timing import time_in_turns
    from pooch.ground.progress import silent

    with workload_of(name) as workload:
        profiles = [pooch.profile(workload.forward, workload.model, mode="run", repeats=1) for _ in range(PROFILES)]
        profile = min(profiles, key=lambda each: each.step_ms)
        rows, plain_ms = [], []
        for policy in POLICIES:
            plan = _planned(profile, policy)
            timing = time_in_turns(workload, plan, turns, silent, verify="off")
            shortest_ms = min(timing.plain_samples_ms)
            kinds = [action.kind for action in plan.schedule.actions]
            plain_ms += timing.plain_samples_ms
            rows.append(
                Row(
                    name,
                    policy,
                    plan.predicted_step_ms / profile.step_ms,
                    min(timing.planned_samples_ms) / shortest_ms,
                    len(profile.ops),
                    kinds.count("copy_in") + kinds.count("refill"),
                    kinds.count("replay"),
                )
            )
    return [Row(name, "plain", profile.step_ms, min(plain_ms), len(profile.ops)), *rows]


def _planned(profile: Any, policy: str) -> Any:
    import pooch

    budget = int(BUDGET * profile.peak_bytes)
    try:
        return pooch.plan(profile, budget, policy=policy, region="step", explain=False)
    except pooch.errors.InfeasibleBudget as error:
        return pooch.plan(profile, error.minimum_bytes, policy=policy, region="step", explain=False)


def table(rows: list[Row]) -> str:
    """All rounds, as Markdown: medians, and the extremes of the rounds' ratios.

    Args:
        rows: of all rounds.
    """
    columns = ("workload", "plan", "ops", "swaps", "replays", "predicted", "measured", "predicted / measured", "rounds")
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for key in dict.fromkeys((row.workload, row.policy) for row in rows):
        lines.append("| " + " | ".join(_cells([row for row in rows if (row.workload, row.policy) == key])) + " |")
    return "\n".join(lines) + "\n"


def _cells(rounds: list[Row]) -> list[str]:
    first = rounds[0]
    unit = "{:.1f} ms" if first.policy == "plain" else "{:.2f} x plain"
    ratios = [row.predicted / row.measured for row in rounds]
    predicted = statistics.median(row.predicted for row in rounds)
    measured = statistics.median(row.measured for row in rounds)
    return [
        first.workload,
        first.policy,
        *(str(statistics.median_low([getattr(row, what) for row in rounds])) for what in ("ops", "swaps", "replays")),
        unit.format(predicted),
        unit.format(measured),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        str(len(rounds)),
    ]


def main() -> int:
    """Print the table. Exit code 0 also where the device cannot be set up, which is said."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.launch_bound", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each workload (5)")
    parser.add_argument("--turns", type=int, default=15, help="steps of each kind in a round (15)")
    parser.add_argument("--round", choices=NAMES, help="one round in this process, rows as JSON")
    arguments = parser.parse_args()
    if arguments.round:
        for row in rows_of(arguments.round, arguments.turns):
            sys.stdout.write(json.dumps(asdict(row)) + "\n")
        return 0
    if not set_up_or_tell():
        return 0
    rows = [row for name in NAMES for _ in range(arguments.rounds) for row in _round(name, arguments.turns)]
    sys.stdout.write(table(rows))
    return 0


def _round(name: str, turns: int) -> list[Row]:
    command = [str(VENV / "bin/python"), "-m", __spec__.name, "--round", name, "--turns", str(turns)]
    environment = variables(False, inherited={**os.environ, **PACE})
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    sys.exit(main())

"""Pooch beside `torch.utils.checkpoint` around each block, in one run.

    python -m benchmarks.against_checkpoint [--workload resnet50 ...] [--steps 3]

Checkpointing has no budget: its peak is measured first, and Pooch gets a budget a little below it. Then plain,
checkpointed and planned
steps take turns.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile
from pooch.session import plan, profile_workload
from pooch.session.training import applied, timed_step, train_steps
from pooch.workloads import Workload, workload_factory

BLOCKS = {"resnet50": "Bottleneck", "gpt2": "GPT2Block"}
SHARE_OF_CHECKPOINT_PEAK = 0.97


@contextmanager
def checkpointed(model: torch.nn.Module, block_name: str) -> Iterator[int]:
    """Every block of that class under `torch.utils.checkpoint`; yields how many there are."""
    blocks: list[Any] = [module for module in model.modules() if type(module).__name__ == block_name]
    for block in blocks:
        block.forward = functools.partial(_checkpointed_forward, block.forward)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.forward


def _checkpointed_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _checkpoint_peak(workload: Workload, block_name: str) -> int:
    with checkpointed(workload.model, block_name) as blocks:
        assert blocks > 0, f"no module of class {block_name} in the model"
        return train_steps(workload, None, 2, tell).peak_bytes


def _plan_below(profile: Profile, checkpoint_peak: int) -> Plan:
    """A plan for a little less than checkpointing needs; where one op alone needs more than that, for the least."""
    try:
        return plan(profile, int(checkpoint_peak * SHARE_OF_CHECKPOINT_PEAK), region="step")
    except InfeasibleBudget as error:
        return plan(profile, error.minimum_bytes, region="step")


def compare(name: str, steps: int) -> list[Row]:
    """Three rows: plain, checkpointed, planned."""
    factory = workload_factory(name)
    profile = profile_workload(factory(), progress=tell)
    plain_peak = train_steps(factory(), None, 2, tell).peak_bytes
    checkpoint_peak = _checkpoint_peak(factory(), BLOCKS[name])
    gc.collect()
    chosen = _plan_below(profile, checkpoint_peak)
    workload = factory()
    planned_peak = train_steps(workload, chosen, 2, tell).peak_bytes
    times: dict[str, list[float]] = {"plain": [], "checkpoint": [], "pooch": []}
    with applied(chosen, workload) as run:
        assert run is not None
        for turn in range(steps + 1):
            tell(f"turn {turn} of {steps}")
            with run.paused():
                times["plain"].append(timed_step(workload, None))
                with checkpointed(workload.model, BLOCKS[name]):
                    times["checkpoint"].append(timed_step(workload, None))
            times["pooch"].append(timed_step(workload, run))
    medians = {who: statistics.median(samples[1:]) for who, samples in times.items()}
    peaks = {"plain": plain_peak, "checkpoint": checkpoint_peak, "pooch": planned_peak}
    return [_row(name, who, peaks, medians) for who in ("plain", "checkpoint", "pooch")]


def _row(name: str, who: str, peaks: dict[str, int], medians: dict[str, float]) -> Row:
    return {
        "workload": name,
        "method": {"plain": "plain", "checkpoint": "torch.utils.checkpoint, each block", "pooch": "Pooch"}[who],
        "measured peak": f"{peaks[who] / 2**20:.1f} MiB",  # two of them may lie close together
        "peak / plain": f"{peaks[who] / peaks['plain']:.3f}",
        "step": f"{medians[who] / 1000:.2f} s",
        "step / plain": f"{medians[who] / medians['plain']:.3f}",
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=sorted(BLOCKS), help="default: all")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.workload or sorted(BLOCKS)
    rows, _ = earlier_results("against-checkpoint-cpu", arguments.output, names)
    for name in names:
        rows += compare(name, arguments.steps)
        write_results("against-checkpoint-cpu", "Pooch beside torch.utils.checkpoint", rows, rows, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")


if __name__ == "__main__":
    main()

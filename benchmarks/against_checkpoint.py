"""Pooch beside `torch.utils.checkpoint` around each block, in one run.

    python -m benchmarks.against_checkpoint [--workload resnet50 ...] [--turns 10]

Checkpointing has no budget: its peak is measured first, and Pooch gets a budget a little below it. Then plain,
checkpointed and planned steps take turns; the results keep every one of them.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.samples import FEWEST_TURNS, StepCost, of_kind, ratios, step_cost, step_rows, take_turns, told
from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.api.measure.training import applied, train_steps
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile
from pooch.workloads import Workload, WorkloadFactory

NAME, TITLE = "against-checkpoint-cpu", "Pooch beside torch.utils.checkpoint"
BLOCKS = {"resnet50": "Bottleneck", "gpt2": "GPT2Block"}
SHARE_OF_CHECKPOINT_PEAK = 0.97
METHODS = {"plain": "plain", "checkpoint": "torch.utils.checkpoint, each block", "pooch": "Pooch"}
Result = Mapping[str, Any]


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


def compare(name: str, turns: int) -> dict[str, Any]:
    """Peaks and timed steps of plain, checkpointed and planned training."""
    factory = WorkloadFactory(name)
    profile = profile_workload(factory(), progress=tell)
    plain_peak = train_steps(factory(), None, 2, tell).peak_bytes
    checkpoint_peak = _checkpoint_peak(factory(), BLOCKS[name])
    gc.collect()
    chosen = _plan_below(profile, checkpoint_peak)
    workload = factory()
    planned_peak = train_steps(workload, chosen, 2, tell).peak_bytes
    return {
        "workload": name,
        "budget_bytes": chosen.budget_bytes,
        "peak_bytes": {"plain": plain_peak, "checkpoint": checkpoint_peak, "pooch": planned_peak},
        "samples": _samples(workload, chosen, BLOCKS[name], turns),
    }


def _samples(workload: Workload, chosen: Plan, block_name: str, turns: int) -> list[dict[str, Any]]:
    with applied(chosen, workload) as run:
        assert run is not None

        def plain_cost() -> StepCost:
            with run.paused():
                return step_cost(workload, None)

        def checkpoint_cost() -> StepCost:
            with run.paused(), checkpointed(workload.model, block_name):
                return step_cost(workload, None)

        ways = {"plain": plain_cost, "checkpoint": checkpoint_cost, "pooch": lambda: step_cost(workload, run)}
        return take_turns(ways, turns)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Three rows for each workload; times are medians, with the middle half of the turns in brackets."""
    return [_row(result, who) for result in results for who in METHODS]


def _row(result: Result, who: str) -> Row:
    peaks, samples = result["peak_bytes"], result["samples"]
    return {
        "workload": result["workload"],
        "method": METHODS[who],
        "measured peak": f"{peaks[who] / 2**20:.1f} MiB",  # two of them may lie close together
        "peak / plain": f"{peaks[who] / peaks['plain']:.3f}",
        "step": told(of_kind(samples, who), ".2f", 1e-3, " s"),
        "step / plain": told(ratios(samples, who), ".3f", half_form=".2f") if who != "plain" else "1",
    }


def more_of(results: Sequence[Result]) -> dict[str, list[Row]]:
    """The table of the timed steps."""
    rows = [row for result in results for row in step_rows({"workload": result["workload"]}, result["samples"])]
    return {"The timed steps: medians, and the middle half of the turns in brackets": rows}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=sorted(BLOCKS), help="default: all")
    parser.add_argument("--turns", type=int, default=FEWEST_TURNS, help="timed steps of each kind")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.workload or sorted(BLOCKS)
    results = earlier_results(NAME, arguments.output, names)
    for name in names:
        results.append(compare(name, arguments.turns))
        write_results(NAME, TITLE, rows_of(results), results, arguments.output, more_of(results))
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")


if __name__ == "__main__":
    main()

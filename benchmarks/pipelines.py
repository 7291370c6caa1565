"""Pipelines over gloo: the peak of each stage without and under a plan, beside the predicted one, and the results.

    python -m benchmarks.pipelines [--stages 2 4] [--budget 75%]

For each schedule, the stages run in processes of their own: plainly, then under plans for their microbatches in flight.
Ends with exit code 1 where a peak is over its budget or further than 2% from the prediction, or results differ.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.ground.units import format_bytes
from pooch.torchtools.memory_meter import MemoryMeter

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MICROBATCHES, ROWS, WIDTH, BLOCKS = 6, 512, 96, 3
NEAR = 0.02


def block() -> nn.Module:
    """A part of a stage."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """The loss of one microbatch."""
    return (output - target).square().mean()


class Stage:
    """The stage of one process."""

    def __init__(self, schedule: str, rank: int, stages: int) -> None:
        torch.manual_seed(rank)
        self.model = nn.Sequential(*(block() for _ in range(BLOCKS)))
        self.stage = PipelineStage(self.model, rank, stages, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](self.stage, MICROBATCHES, loss_fn=mean_square)
        self.batch, self.target = torch.rand(MICROBATCHES * ROWS, WIDTH), torch.rand(MICROBATCHES * ROWS, WIDTH)

    def step(self) -> tuple[list[Tensor], int]:
        """Losses and gradients of a step, and the peak of live bytes."""
        self.model.zero_grad()
        losses: list[Tensor] = []
        inputs = (self.batch,) if self.stage.is_first else ()
        last = {"target": self.target, "losses": losses, "return_outputs": False} if self.stage.is_last else {}
        distributed.barrier()
        with MemoryMeter(torch.device("cpu")) as meter:
            self.schedule.step(*inputs, **last)
        found = [loss.detach() for loss in losses] + [p.grad for p in self.model.parameters() if p.grad is not None]
        return [tensor.clone() for tensor in found], meter.peak_bytes

    def profile(self) -> tuple[pooch.Profile, int]:
        """The profile of one microbatch, and how many are in flight."""
        inputs = (self.batch[:ROWS],) if self.stage.is_first else ()
        loss = (lambda output: mean_square(output, self.target[:ROWS])) if self.stage.is_last else None
        one = pooch.stage_step(self.stage, self.schedule, *inputs, loss=loss)
        self.model.zero_grad()
        made = pooch.profile(one.forward, self.model, accumulate=one.accumulate)
        return made, one.microbatches_in_flight


def measure_stage(rank: int, stages: int, schedule: str, budget: str, folder: str) -> None:
    """Measures one stage, in a process of its own, and writes what was found into a folder."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=stages, timeout=timedelta(seconds=600)
    )
    stage = Stage(schedule, rank, stages)
    stage.step()
    profile, in_flight = stage.profile()
    plan = pooch.plan(profile, budget, effort="fast", microbatches_in_flight=in_flight)
    plain, plain_bytes = stage.step()
    with pooch.apply(plan, stage.model, measure_every=None) as run:
        stage.step()
        planned, planned_bytes = stage.step()
        off_path = run.totals.steps_off_path
    same = len(plain) == len(planned) and all(torch.equal(*pair) for pair in zip(plain, planned, strict=True))
    kept_bytes = sum(tensor.nbytes for tensor in plain)  # the plain results, which the planned steps find
    found = {
        "schedule": schedule,
        "stages": stages,
        "stage": rank,
        "in_flight": in_flight,
        "plain_bytes": plain_bytes,
        "in_core_bytes": plan.in_core_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.predicted_peak_bytes,
        "measured_bytes": planned_bytes - kept_bytes,
        "host_bytes": plan.host_bytes,
        "same": same,
        "off_path": off_path,
    }
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(schedule: str, stages: int, budget: str) -> list[dict[str, Any]]:
    """Measures all stages of one schedule."""
    with tempfile.TemporaryDirectory(prefix="pooch-") as folder:
        multiprocessing.spawn(measure_stage, (stages, schedule, budget, folder), nprocs=stages)  # type: ignore[no-untyped-call]
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(stages)]


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """One row per stage."""
    return [
        {
            "schedule": found["schedule"],
            "stage": f"{found['stage'] + 1} of {found['stages']}",
            "in flight": found["in_flight"],
            "plain peak": format_bytes(found["plain_bytes"]),
            "predicted plain": f"{found['in_core_bytes'] / found['plain_bytes'] - 1:+.2%}",
            "budget": format_bytes(found["budget_bytes"]),
            "measured peak": format_bytes(found["measured_bytes"]),
            "predicted": f"{found['predicted_bytes'] / found['measured_bytes'] - 1:+.2%}",
            "swap tier": format_bytes(found["host_bytes"]),
            "same bits": "yes" if found["same"] else "NO",
            "kept": "yes" if is_kept(found) else "NO",
        }
        for found in results
    ]


def is_kept(found: dict[str, Any]) -> bool:
    """Whether the results are the same, the budget is kept, and the prediction is near."""
    near = abs(found["predicted_bytes"] / found["measured_bytes"] - 1) <= NEAR
    return found["same"] and near and found["measured_bytes"] <= found["budget_bytes"] and not found["off_path"]


def main() -> int:
    """Measure, print, write; exit code 1 where something was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--budget", default="75%", help="of each stage, as pooch.plan takes it")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    results = []
    for stages in arguments.stages:
        for schedule in SCHEDULES:
            tell(f"{schedule}, {stages} stages")
            results += measure(schedule, stages, arguments.budget)
    rows = rows_of(results)
    write_results("pipelines", "Stages of pipelines under plans", rows, results, arguments.output)
    sys.stdout.write(markdown_table(rows) + "\n")
    return int(any(row["kept"] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

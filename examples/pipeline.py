"""A pipeline of two stages, each under a budget of its own (in two processes of this machine, over gloo).

With `torchrun --nproc-per-node 2` each process would call `train(rank)`; here they are started by the script itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pooch_planner as pooch
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STAGES, MICROBATCHES, ROWS, WIDTH = 2, 4, 256, 64


def block() -> nn.Module:
    """A part of a stage."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch."""
    return (output - target).square().mean()


def train(rank: int, store: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=STAGES)
    torch.manual_seed(rank)
    model = nn.Sequential(*(block() for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    stage = PipelineStage(model, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_square)
    batch, target = torch.rand(MICROBATCHES * ROWS, WIDTH), torch.rand(MICROBATCHES * ROWS, WIDTH)

    def step() -> None:
        if stage.is_last:
            schedule.step(target=target, losses=[], return_outputs=False)
        else:
            schedule.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    step()  # the stages learn each other's shapes
    if stage.is_last:
        one = pooch.stage_step(stage, schedule, loss=lambda output: mean_square(output, target[:ROWS]))
    else:
        one = pooch.stage_step(stage, schedule, batch[:ROWS])
    profile = pooch.profile(one.forward, model, optimizer, accumulate=one.accumulate)
    in_flight = one.microbatches_in_flight
    del one
    plan = pooch.plan(profile, "85%", microbatches_in_flight=in_flight)
    distributed.barrier()
    with pooch.apply(plan, model) as run:
        for _ in range(3):
            step()
    peak, predicted = (run.totals.peak_bytes or 0) / 2**20, plan.predicted_peak_bytes / 2**20
    print(
        f"stage {rank}: {in_flight} in flight, budget {plan.budget_bytes / 2**20:.2f} MiB, peak {peak:.2f} MiB, "
        f"predicted {predicted:.2f} MiB",
        flush=True,
    )
    over = torch.tensor(run.totals.steps_over_budget)
    distributed.all_reduce(over)  # which also waits for the other stage
    if stage.is_last:
        print(f"{over} steps over the budget in both stages")
    distributed.destroy_process_group()


def main() -> None:
    """Start both stages."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        multiprocessing.spawn(train, (store,), nprocs=STAGES)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

"""Stages of `torch.distributed.pipelining` in processes of their own, under plans for their microbatches in flight."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import pooch
from pooch.errors import UsageError
from pooch.executor import apply_plan
from pooch.executor.floor import Floor
from pooch.torchtools.memory_meter import MemoryMeter
from tests.executor.support import assert_same, mixed
from tests.executor.test_microbatches import Block
from tests.forked_ranks import run_ranks

MICROBATCHES, ROWS, WIDTH = 4, 256, 48
IN_FLIGHT = {"gpipe": (4, 4), "1f1b": (2, 1)}  # of the first and of the last stage


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """The stage of this rank, and its part of a step."""

    def __init__(self, kind: str, rank: int, ranks: int) -> None:
        torch.manual_seed(4)
        blocks = [Block(WIDTH) for _ in range(2 * ranks)]
        self.model = nn.Sequential(*blocks[2 * rank : 2 * rank + 2])
        self.batch, self.target = torch.rand(MICROBATCHES * ROWS, WIDTH), torch.rand(MICROBATCHES * ROWS, WIDTH)
        self.stage = PipelineStage(self.model, rank, ranks, torch.device("cpu"))
        schedule = ScheduleGPipe if kind == "gpipe" else Schedule1F1B
        self.schedule = schedule(self.stage, MICROBATCHES, loss_fn=mean_square)

    def step(self) -> tuple[dict[str, Tensor], int]:
        self.model.zero_grad()
        torch.manual_seed(5)
        losses: list[Tensor] = []
        inputs = (self.batch,) if self.stage.is_first else ()
        last = {"target": self.target, "losses": losses, "return_outputs": False} if self.stage.is_last else {}
        distributed.barrier()
        with MemoryMeter(torch.device("cpu")) as meter:
            self.schedule.step(*inputs, **last)
        found = {f"loss {number}": loss.detach().clone() for number, loss in enumerate(losses)}
        found |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return found, meter.peak_bytes

    def step_of_one(self) -> pooch.StageStep:
        inputs = (self.batch[:ROWS],) if self.stage.is_first else ()
        loss = (lambda output: mean_square(output, self.target[:ROWS])) if self.stage.is_last else None
        return pooch.stage_step(self.stage, self.schedule, *inputs, loss=loss)


def stage_under_a_plan(rank: int, ranks: int, store: str, kind: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=240)
    )
    pipeline = Pipeline(kind, rank, ranks)
    inputs = (pipeline.batch[:ROWS],) if pipeline.stage.is_first else ()
    with pytest.raises(UsageError, match="let the schedule make one step"):
        pooch.stage_step(pipeline.stage, pipeline.schedule, *inputs)
    pipeline.step()
    pipeline.model.zero_grad()
    one = pipeline.step_of_one()
    assert one.microbatches_in_flight == IN_FLIGHT[kind][rank]
    profile = pooch.profile(one.forward, pipeline.model, accumulate=one.accumulate)
    plan = pooch.plan_from_decisions(
        profile, mixed(profile, "model"), "min", microbatches_in_flight=one.microbatches_in_flight
    )
    del one
    distributed.barrier()
    plain, plain_bytes = pipeline.step()  # held beside the plan: without a floor it disturbs no step
    no_floor = mock.patch.object(Floor, "_counted", return_value=None)
    with no_floor, warnings.catch_warnings(), apply_plan(plan, pipeline.model, measure_every=None) as run:
        warnings.simplefilter("error")  # gradients of earlier microbatches are expected
        pipeline.step()
        planned, peak_bytes = pipeline.step()
        assert run.totals.steps == 2 * MICROBATCHES
        assert run.totals.steps_off_path == 0
        assert run.stats.swapped_out_bytes > 0
        assert run.stats.recomputed_ops > 0
    assert_same(plain, planned)
    peak_bytes -= sum(tensor.nbytes for tensor in plain.values())
    near = 0.001 if kind == "1f1b" else 0.02  # a stage of GPipe may hold gradients of inputs until it has sent them
    assert plain_bytes == pytest.approx(plan.in_core_peak_bytes, rel=near)
    assert peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=near)
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_two_stages_keep_their_bits_and_the_predicted_peak(kind: str, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    run_ranks(stage_under_a_plan, (2, store, kind), 2)


def test_microbatches_of_other_schedules_are_not_guessed() -> None:
    class Stage:
        num_stages, stage_index = 4, 1

    schedule = object.__new__(ScheduleInterleaved1F1B)
    with pytest.raises(UsageError, match="ScheduleInterleaved1F1B is neither ScheduleGPipe nor Schedule1F1B"):
        pooch.microbatches_in_flight(Stage(), schedule)
    schedule = object.__new__(Schedule1F1B)
    schedule._n_microbatches = 8
    assert pooch.microbatches_in_flight(Stage(), schedule) == 3
    schedule._n_microbatches = 2
    assert pooch.microbatches_in_flight(Stage(), schedule) == 2

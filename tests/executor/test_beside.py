"""What a program does on streams of its own beside the step: prefetchers, and collectives as FSDP issues them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.errors import ProfileError
from pooch.executor import apply_plan
from pooch.executor.engines.streams import StreamEngine
from pooch.executor.plan_guide import PlanGuide
from pooch.ir import Plan, Profile
from pooch.profiler.recorder import ForwardRecorder
from tests.executor.fake_streams import Machine, Stream, install
from tests.executor.nets import Job
from tests.executor.support import assert_same, mixed, profile_job, tight_plan, train

CPU = torch.device("cpu")
Beside = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """The fake of streams, for the engine and for the profiler."""
    fake = Machine()
    install(fake, monkeypatch)
    monkeypatch.setattr("pooch.executor.apply.make_engine", lambda *_, **__: StreamEngine(CPU))
    monkeypatch.setattr(ForwardRecorder, "_stream_now", lambda recorder: fake.current)
    yield fake
    gc.collect()


class Beneath(nn.Module):
    """Its weight is gathered beside the step, as FSDP does, and so is the next batch, in a second stream's order.

    Attributes:
        beside: the context of what is done on another stream. prefetches: whether there is a next batch.
        touched: what is computed there of an activation.
    """

    def __init__(self, beside: Beside) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.shards = nn.ParameterList([nn.Parameter(torch.rand(8, 16) / 16) for _ in range(2)])
        self.beside, self.prefetches, self.touched = beside, True, False
        self.batches: list[Tensor] = []
        self.seen: list[Tensor] = []

    def gather(self) -> Tensor:
        with self.beside(), torch.no_grad():
            gathered = torch.cat([shard.detach() for shard in self.shards])
        if gathered.is_cuda:
            gathered.record_stream(torch.cuda.current_stream())
        return gathered.clone() + torch.cat(list(self.shards)) * 0.5  # copied out of the buffer on the step's stream

    def forward(self, rows: Tensor) -> Tensor:
        if self.prefetches:
            with self.beside(), torch.no_grad():
                self.batches[:] = [(rows * 2).cos()]
        hidden = torch.tanh(self.first(rows)).exp()
        if self.touched:
            with self.beside(), torch.no_grad():
                self.seen[:] = [hidden.sin()]
        return torch.tanh(self.second(torch.tanh(hidden @ self.gather()).exp())).exp().sum()


def make(beside: Beside) -> Job:
    torch.manual_seed(0)
    model = Beneath(beside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(
        model, optimizer, lambda generator: (torch.rand(32, 16, generator=generator),), lambda m, b: m(b[0]), CPU
    )


def on(machine: Machine, stream: Stream) -> Beside:
    return lambda: machine.stream(stream)


def planned(job: Job) -> tuple[Profile, Plan]:
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    kinds = {action.kind for action in plan.schedule.actions}
    assert {"copy_out", "copy_in", "replay"} <= kinds
    return profile, plan


def test_what_is_done_beside_the_step_is_let_through(machine: Machine) -> None:
    plain, _ = train(make(on(machine, Stream())), None)
    job = make(on(machine, Stream()))
    _, plan = planned(job)
    assert not any("cos" in op.name for op in plan.expected)
    told, stats = train(job, plan)
    assert stats is not None
    assert (stats.mismatches, stats.late_swaps) == (0, 0)
    assert stats.swapped_in_bytes > 0
    assert stats.recomputed_ops > 0
    assert machine.races == []
    assert_same(plain, told)


def test_a_prefetcher_that_has_nothing_more_to_fetch_changes_nothing(machine: Machine) -> None:
    job = make(on(machine, Stream()))
    _, plan = planned(job)
    job.model.prefetches = False
    _, stats = train(job, plan)
    assert stats is not None
    assert stats.mismatches == 0
    assert stats.swapped_in_bytes > 0


def test_nothing_that_another_stream_works_on_is_moved_or_made_again(machine: Machine) -> None:
    plain, _ = train(make(on(machine, Stream())), None)
    job = make(on(machine, Stream()))
    job.model.touched = True
    profile, plan = planned(job)
    (touched,) = [value for value in profile.values if value.fixed and "another stream" in value.fixed]
    assert touched.saved
    assert touched.label.endswith("exp")
    told, stats = train(job, plan)
    assert stats is not None
    assert stats.mismatches == 0
    assert stats.swapped_in_bytes > 0
    assert machine.races == []
    assert_same(plain, told)


def test_another_stream_that_works_on_a_planned_value_ends_the_plan_and_says_so(machine: Machine) -> None:
    plain, _ = train(make(on(machine, Stream())), None)
    side = Stream()
    job = make(on(machine, side))
    _, plan = planned(job)
    job.model.touched = True
    with pytest.warns(UserWarning, match=r"sin\.default on another stream, which works on a value of the plan"):
        told, stats = train(job, plan)
    assert stats is not None
    assert stats.mismatches == 1
    assert side in {stream for _, stream in machine.recorded}  # its memory is not given out before the stream is done
    assert machine.races == []
    assert_same(plain, told)


def test_a_value_written_beside_the_step_is_read_by_no_replay(machine: Machine) -> None:
    """A replay would read what the other stream has written since."""
    side = Stream()
    linear = nn.Linear(4, 4)
    recorder = ForwardRecorder(linear)
    state = torch.zeros(4)
    with recorder:
        state.exp()
        with machine.stream(side):
            state.add_(1)
        state.sin()
    assert [op.name for op in recorder.ops] == ["aten.exp.default", "aten.sin.default"]
    assert [recorder.values[op.reads[0]].role for op in recorder.ops] == ["transient", "transient"]


def test_a_model_on_a_stream_of_its_own_within_the_step_is_refused_in_one_line(machine: Machine) -> None:
    job = make(on(machine, Stream()))
    loss = job.loss

    def on_a_stream(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        with machine.stream(Stream()):
            return loss(model, batch)

    job.loss = on_a_stream
    with pytest.raises(ProfileError, match="another stream"):
        profile_job(job)


def test_reads_on_another_stream_are_answered_on_the_steps_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by nodes on the CPU, which run on whatever stream is current where `backward` was called."""
    plain, _ = train(make(on(machine, Stream())), None, steps=1)
    job = make(on(machine, Stream()))
    _, plan = planned(job)
    real, streams = PlanGuide.run, []

    def noted(actions: PlanGuide, action: Any) -> None:
        streams.append(machine.current)
        machine.current.work()
        real(actions, action)

    monkeypatch.setattr(PlanGuide, "run", noted)
    side = Stream()
    with apply_plan(plan, job.model) as run:
        with run.step():
            loss = job.forward()
        with machine.stream(side):
            loss.backward()
        assert run.stats.recomputed_ops > 0
    assert set(streams) == {machine.compute}
    assert side.clock[machine.compute.name] == machine.compute.issued  # it waits for all that was done for it
    assert side in {stream for _, stream in machine.recorded}
    for name, parameter in job.model.named_parameters():
        assert torch.equal(plain[f"step 0: {name}.grad"], parameter.grad)
    assert machine.races == []

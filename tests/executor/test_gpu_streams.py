"""Streams and devices beside the step's own, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import apply_plan
from pooch.ir import Choice
from tests.executor.nets import Job
from tests.executor.support import all_of, assert_same, is_same, mixed, profile_job, quick_profile, tight_plan, train
from tests.executor.test_beside import Beneath
from tests.simulated_cuda.mistakes import is_simulated, take_mistakes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS = 4096


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make(side: torch.cuda.Stream) -> Job:
    """The step's stream and the side wait for one another where one reads what the other has made."""
    torch.manual_seed(0)
    model = Beneath(lambda: InOrder(side)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Job(
        model,
        optimizer,
        lambda generator: (torch.rand(ROWS, 16, generator=generator),),
        lambda m, batch: m(batch[0]).mean(),
        torch.device("cuda"),
    )


class InOrder:
    """What is done inside runs on another stream, after what came before, and before what comes after."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before = torch.cuda.current_stream()
        self._stream.wait_stream(self._before)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.set_stream(self._before)
        self._before.wait_stream(self._stream)


@pytest.mark.filterwarnings("error:the step left the planned path")  # in any of them
def test_a_prefetcher_and_gathered_weights_are_let_through() -> None:
    plain, _ = train(make(torch.cuda.Stream()), None)
    job = make(torch.cuda.Stream())
    profile = profile_job(job)
    planned, stats = train(job, tight_plan(profile, mixed(profile)))
    assert stats is not None
    assert (stats.mismatches, stats.late_swaps) == (0, 0)
    assert stats.swapped_in_bytes > 0
    assert stats.recomputed_ops > 0
    assert_same(plain, planned)


def test_a_side_stream_that_works_on_a_planned_value_ends_the_plan_and_keeps_the_numbers() -> None:
    plain, _ = train(make(torch.cuda.Stream()), None)
    job = make(torch.cuda.Stream())
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    job.model.touched = True
    with pytest.warns(UserWarning, match="another stream, which works on a value of the plan"):
        planned, stats = train(job, plan)
    assert stats is not None
    assert stats.mismatches == 1
    assert_same(plain, planned)


class Forked(nn.Module):
    """Does some of its work on another stream where it has one, and waits as PyTorch asks for it.

    Attributes:
        side: that stream. work: what the model does. seen: what was computed there without autograd.
    """

    def __init__(self, work: Callable[[Forked, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(ROWS, 64, device="cuda"))
        self.nothing = torch.zeros((), device="cuda")
        self.work, self.side, self.seen = work, cast("torch.cuda.Stream | None", None), self.nothing

    def forward(self, rows: Tensor) -> Tensor:
        return self.work(self, rows)

    def aside(self, func: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """What a function makes of a value on the other stream."""
        if self.side is None:
            return func(value)
        here = torch.cuda.current_stream()
        with InOrder(self.side):
            torch.cuda._sleep(10**6)
            made = func(value)
        value.record_stream(self.side)
        made.record_stream(here)
        return made

    def look_aside(self, value: Tensor) -> None:
        """Like `aside`, but nobody waits for it until `meet`: autograd holds the value until the backward pass."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side), torch.no_grad():
                torch.cuda._sleep(10**6)
                self.seen = value.sin()

    def meet(self) -> None:
        """Take memory and write over it, then wait for the other stream."""
        for _ in range(4):
            torch.ones_like(self.weight)
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)


def looked_at(model: Forked, rows: Tensor) -> Tensor:
    value = (model.weight * rows).exp()
    before = model.weight.sin()  # at which a planned copy of the value begins
    model.look_aside(value)
    result = value * 2
    del value
    model.meet()
    return result.sum() + before.sum()


def looked_at_while_away(model: Forked, rows: Tensor) -> Tensor:
    value = (model.weight * rows).exp()
    result = value * 2
    meanwhile = model.weight.sin().cos().sin().cos()
    model.look_aside(value)
    del value
    model.meet()
    return result.sum() + meanwhile.sum()


def read_by_two_streams(model: Forked, rows: Tensor) -> Tensor:
    value = (model.weight * rows).cos()
    here = value.sin()
    return here.sum() + model.aside(torch.sin, value).sum()


def read_while_others_take_memory(model: Forked, rows: Tensor) -> Tensor:
    """The node on the other stream is the last reader of its value, and the next node does not depend on it."""
    value = (model.weight * rows).cos()
    here = (model.weight * 3).sin()
    return here.sum() + model.aside(torch.sin, value).sum()


def kept_and_made_again(model: Forked, rows: Tensor) -> Tensor:
    """The first read of the kept value, which may be on the other stream, has the other one made again."""
    kept = (model.weight * rows).cos()
    made_again = (model.weight * 3).sin()
    product = kept * made_again
    there = model.nothing if model.side is None else model.aside(lambda value: value.sin().sum(), kept)
    return product.sum() + there


FORKS = (looked_at, looked_at_while_away, read_by_two_streams, read_while_others_take_memory, kept_and_made_again)


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("choice", ["swap", "recompute"])
@pytest.mark.parametrize("work", FORKS)
def test_a_program_that_forks_a_stream_computes_what_it_does_without_a_plan(
    work: Callable[[Forked, Tensor], Tensor], choice: Choice
) -> None:
    """Planned without the fork, so that the other stream works on values of the plan."""
    torch.manual_seed(0)
    model, rows = Forked(work), torch.rand(ROWS, 64, device="cuda")
    profile = quick_profile(lambda: model(rows), model)
    decisions = all_of(profile, choice, "model")
    is_tied = work is kept_and_made_again
    if is_tied:
        (kept,) = [value.id for value in profile.values if value.label.endswith("cos")]
        decisions[kept] = "keep"
    plan = tight_plan(profile, decisions, "model")
    emptied = {action.target for action in plan.schedule.actions if action.kind == "empty"}
    assert emptied or work is not looked_at_while_away
    model.side = torch.cuda.Stream()
    plain = gradients(model, rows, torch.cuda.current_stream())
    seen = model.seen
    with apply_plan(plan, model) as run:
        planned = gradients(model, rows, torch.cuda.current_stream())
        assert run.stats.mismatches == (not is_tied)
        moved = {"swap": run.stats.swapped_out_bytes, "recompute": run.stats.recomputed_ops}
        assert moved[choice] > 0
    assert is_same(plain["weight"], planned["weight"])
    assert is_same(seen, model.seen)


def test_memory_that_another_stream_is_told_to_use_may_be_planned() -> None:
    """`record_stream` has a schema as if it wrote over the tensor."""
    torch.manual_seed(0)
    model, rows = Forked(lambda model, rows: recorded((model.weight * rows).exp()) * 2), torch.rand(ROWS, 64).cuda()
    profile = quick_profile(lambda: model(rows).sum(), model)
    assert not any("record_stream" in op.name for op in profile.ops)
    assert all(value.overwritten_at < 0 for value in profile.values)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    with apply_plan(plan, model, on_mismatch="error") as run:
        model(rows).sum().backward()
        assert run.stats.recomputed_ops > 0


def recorded(tensor: Tensor) -> Tensor:
    tensor.record_stream(torch.cuda.Stream())
    return tensor


class WithAHead(nn.Module):
    """Its last layer is on another device, so nodes of the backward pass run in two threads."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh()).cuda(0)
        self.head, self.device = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)).to(device), device

    def forward(self, rows: Tensor) -> Tensor:
        here = self.body(rows).exp()
        there = self.head(here.to(self.device)).exp().to(rows.device)
        return (there * here.sin()).mean()


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_model_on_two_devices(device: str, choice: Any, own_stream: bool) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    torch.manual_seed(0)
    model, rows = WithAHead(device), torch.rand(ROWS, 16, device="cuda:0")
    side = torch.cuda.Stream(0) if own_stream else torch.cuda.current_stream(torch.device("cuda", 0))
    side.wait_stream(torch.cuda.current_stream(torch.device("cuda", 0)))
    plain = gradients(model, rows, side)
    with torch.cuda.stream(side):
        profile = quick_profile(lambda: model(rows), model)
    decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")
    plan = tight_plan(profile, decisions, "model")
    assert not any(profile.ops[op.target].refusal for op in plan.schedule.actions if op.kind == "replay")
    with apply_plan(plan, model) as run:
        planned = gradients(model, rows, side)
        assert run.stats.mismatches == 0
        assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0
    assert all(is_same(plain[name], planned[name]) for name in plain)


def gradients(model: nn.Module, rows: Tensor, stream: torch.cuda.Stream) -> dict[str, Tensor]:
    """The forward pass on a stream, the backward pass from where another one is current."""
    torch.manual_seed(5)
    model.zero_grad()
    with torch.cuda.stream(stream):
        loss = model(rows)
    torch.cuda.current_stream(torch.device("cuda", 0)).wait_stream(stream)
    loss.backward()
    torch.cuda.synchronize(0)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def first_of_two_ranks() -> Iterator[None]:
    """The other one is not there: it is taken to have the same shards, and gradients go nowhere."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    destroy_process_group()


@pytest.mark.usefixtures("first_of_two_ranks")
@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
def test_a_sharded_model_keeps_to_its_plan(choice: Any) -> None:
    """FSDP2 gathers parameters on streams of its own."""
    model, rows = sharded(), torch.rand(ROWS, 64, device="cuda", requires_grad=True)
    plain = [loss_and_gradient(model, rows) for _ in range(3)]
    profile = quick_profile(lambda: model(rows).mean(), model)
    # FSDP2 lets go of what it gathered too early where, as in the first pass of profiling, no backward pass follows.
    if is_simulated():
        take_mistakes()
    assert not any("all_gather" in op.name for op in profile.ops)
    decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")
    with apply_plan(tight_plan(profile, decisions, "model"), model, on_mismatch="error") as run:
        for loss, gradient in plain:
            again = loss_and_gradient(model, rows)
            assert is_same(loss, again[0])
            assert is_same(gradient, again[1])
            assert (run.stats.mismatches, run.stats.late_swaps) == (0, 0)
            assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.SiLU(), nn.Linear(64, 64)) for _ in range(3)]
    model = nn.Sequential(*parts).cuda()
    for part in parts:
        fully_shard(part)
    fully_shard(model)
    return model


def loss_and_gradient(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows.grad = None
    loss = model(rows).mean()
    loss.backward()
    model.zero_grad()
    assert rows.grad is not None
    return loss.detach(), rows.grad.clone()


@pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="no cuDNN")
def test_recurrent_dropout_goes_on_while_other_dropout_is_drawn_again() -> None:
    """A generator that a replay had set would make the next call begin its dropout anew."""
    plain, _ = train(recurrent(), None, steps=5)
    job = recurrent()
    profile = profile_job(job)
    planned, stats = train(recurrent(), tight_plan(profile, all_of(profile, "recompute")), steps=5)
    assert stats is not None
    assert stats.mismatches == 0
    assert stats.recomputed_ops > 0
    assert_same(plain, planned)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)
        self.layers = nn.LSTM(16, 16, num_layers=2, dropout=0.2)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(self.drop(torch.tanh(self.first(rows)).exp()))[0].exp().mean()


def recurrent() -> Job:
    torch.manual_seed(0)
    model = Recurrent().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Job(
        model,
        optimizer,
        lambda generator: (torch.rand(32, 8, 16, generator=generator),),
        lambda m, batch: m(batch[0]),
        torch.device("cuda"),
    )

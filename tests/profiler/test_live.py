"""A step that is recorded while it trains gives the profile that `pooch.profile` makes, whatever left meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pooch.errors import ProfileError
from pooch.executor import apply_plan
from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from pooch.profiler.live import LiveTrace
from tests.executor.nets import Block, ConvNet, Recurrent
from tests.executor.online.support import holding, without_collector
from tests.executor.online.zoo import Autocast, Cube, Layers, in_place, rows, several_outputs, views
from tests.executor.support import LINK, mixed, quick_profile, tight_plan

pytestmark = pytest.mark.cpu
Made = tuple[nn.Module, Callable[[], Tensor]]


def made(model: nn.Module, inputs: Tensor) -> Made:
    return model, lambda: model(inputs).float().square().mean()


def language(model: nn.Module) -> Made:
    tokens = torch.randint(0, 50, (4, 16))
    return model, lambda: functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


ZOO: dict[str, Callable[[], Made]] = {
    "convolutions": lambda: made(ConvNet(8), torch.rand(4, 3, 16, 16)),
    "attention": lambda: made(Block(32), torch.randn(4, 16, 32)),
    "recurrent": lambda: language(Recurrent(32)),
    "in place": lambda: made(Layers(in_place), rows()),
    "own results": lambda: made(Layers(lambda hidden: hidden.sigmoid().tanh().softmax(-1).exp()), rows()),
    "own function": lambda: made(Layers(Cube.apply), rows()),
    "views": lambda: made(Layers(views), rows()),
    "several outputs": lambda: made(Layers(several_outputs), rows()),
    "autocast": lambda: made(Autocast(), rows()),
}


def recorded(
    model: nn.Module,
    forward: Callable[[], Tensor],
    evictor: Evictor,
    budget_bytes: int,
    between: Callable[[], None] = lambda: None,
) -> Profile:
    """The profile of a step under a budget, in bytes above what is live before. `between` comes before its backward."""
    start_bytes = evictor.live.now()
    evictor.set_budget(start_bytes + budget_bytes)
    evictor.begin_step(RunStats())
    trace = LiveTrace([model], Step(evictor), start_bytes)
    trace.open()
    with trace.around_call():
        loss = forward()
    trace.close_forward()
    between()
    loss.backward()
    return trace.profile(LINK, "")


def without_times(profile: Profile) -> Profile:
    """What two profiles of one step have in common."""
    start = profile.persistent_bytes
    ops = tuple(
        replace(op, time_ms=0.0, entry_bytes=op.entry_bytes - start, peak_bytes=op.peak_bytes - start)
        for op in profile.ops
    )
    values = tuple(replace(value, touches=None, saved_outside_model=False) for value in profile.values)
    return replace(
        profile, ops=ops, values=values, persistent_bytes=0, peak_bytes=profile.peak_bytes - start, step_ms=0.0,
        notes=(), workload="", model_begin=0, model_end=profile.forward_ops, time_factor=1.0, mode="run",
    )  # fmt: skip


@pytest.mark.parametrize("pressure", [False, True], ids=["alone", "under pressure"])
@pytest.mark.parametrize("kind", ZOO)
def test_it_is_the_profile_of_the_ordinary_session(kind: str, pressure: bool) -> None:
    torch.manual_seed(1)
    model, forward = ZOO[kind]()
    ordinary = quick_profile(forward, model)
    model.zero_grad()
    room_bytes = 2**40 if not pressure else (ordinary.peak_bytes - ordinary.persistent_bytes) // 2
    with holding() as evictor, without_collector():
        live = recorded(model, forward, evictor, room_bytes)
        swapped_bytes = evictor.stats.swapped_out_bytes
    assert bool(swapped_bytes) == pressure
    assert check_profile(live) is None
    assert (live.model_begin, live.model_end) == (0, live.forward_ops)  # up to the backward pass
    # A live record does not see reads that are no ops after the model's call: what is held then counts as in use.
    assert all(a.touches in (None, b.touches) for a, b in zip(live.values, ordinary.values, strict=True))
    ours, theirs = without_times(live), without_times(ordinary)
    for name in theirs.__dataclass_fields__:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_making_room_is_no_part_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, forward = ZOO["convolutions"]()
    pause_s, evict = 0.3, Evictor._evict_cheapest
    calls = {"forward": 0, "backward": 0}
    part = "forward"

    def slowly(*args: Any) -> int:
        calls[part] += 1
        time.sleep(pause_s)
        return evict(*args)

    def turn() -> None:
        nonlocal part
        part = "backward"
        evictor.set_budget(evictor.live.now())  # so that the first gradient asks for room

    with holding() as evictor, without_collector():
        monkeypatch.setattr(Evictor, "_evict_cheapest", slowly)
        profile = recorded(model, forward, evictor, 200_000, turn)
    assert min(calls.values()) > 0
    assert 0 < profile.step_ms < 1000 * pause_s


def test_it_can_be_planned_and_the_plan_runs() -> None:
    torch.manual_seed(1)
    model, forward = ZOO["own results"]()
    forward().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with holding() as evictor, without_collector():
        live = recorded(model, forward, evictor, 200_000)
        assert evictor.stats.swapped_out_bytes
    model.zero_grad()
    with apply_plan(tight_plan(live, mixed(live)), model) as run:
        with run.step():
            loss = forward()
        loss.backward()
        assert run.stats.mismatches == 0
        assert run.stats.swapped_out_bytes
        assert run.stats.recomputed_ops
    assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))


def test_gradients_of_a_recorded_step_are_those_of_a_plain_one() -> None:
    torch.manual_seed(1)
    model, forward = ZOO["own function"]()
    forward().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with holding() as evictor:
        recorded(model, forward, evictor, 120_000)
        assert evictor.stats.swapped_out_bytes
    assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))


def test_a_record_that_is_given_up_is_told() -> None:
    torch.manual_seed(1)
    model, forward = ZOO["own results"]()
    with holding() as evictor:
        evictor.begin_step(RunStats())
        trace = LiveTrace([model], Step(evictor), 0)
        trace.open()
        loss = forward()
        trace.stop()
        trace.stop()
        loss.backward()
        with pytest.raises(ProfileError, match="not recorded to its end"):
            trace.profile(LINK, "")


def test_what_other_steps_hold_may_leave_meanwhile() -> None:
    """Their values are no part of the record, whose curve does not show that they left either."""
    torch.manual_seed(1)
    model, forward = ZOO["own results"]()
    ordinary = quick_profile(forward, model)
    model.zero_grad()
    with holding() as evictor, without_collector():
        evictor.begin_step(RunStats())
        with following(Step(evictor)):
            earlier = forward()
        model.zero_grad()
        live = recorded(model, forward, evictor, (ordinary.peak_bytes - ordinary.persistent_bytes) // 2)
        assert evictor.stats.swapped_out_bytes
        assert any(value.number >= 2**40 and value.storage is None for value in evictor._values)
        del earlier
    ours, theirs = without_times(live), without_times(ordinary)
    assert ours.ops == theirs.ops
    assert ours.peak_bytes == theirs.peak_bytes

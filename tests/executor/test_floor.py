"""A step that leaves the plan under `pooch.apply` stays within the budget all the same."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.errors import PlanMismatch
from pooch.executor import Run, mode, native_watch
from pooch.executor.evictor import Evictor
from pooch.executor.live_bytes import CountedBytes
from pooch.executor.plan_guide import PlanGuide
from pooch.executor.records import VersionProbe
from pooch.ir import Choice, Region
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.settings import called_as_unwatched
from tests.counting import counting, the_allocator
from tests.executor.support import budget_at, mixed, quick_profile
from tests.other_threads import another_thread

pytestmark = pytest.mark.cpu
CPU = torch.device("cpu")
MIB = 2**20


class Growing(nn.Module):
    """Activations of 2 MiB a layer. After `ordinary` layers it takes others than were profiled, and more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(10))
        self.ordinary, self.more = 10, 0

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers[: self.ordinary]:
            rows = layer(rows).tanh().sin()
        for number in range(self.more):
            rows = self.layers[number % len(self.layers)](rows).sigmoid().cos()
        return rows.square().mean()


def planned(share: float = 0.6) -> tuple[Growing, Tensor, pooch.Plan]:
    torch.manual_seed(0)
    model, rows = Growing(), torch.rand(2048, 256)
    profile = quick_profile(lambda: model(rows), model)
    plan = pooch.plan(profile, budget_at(profile, share), region="model", time_limit_s=3)
    assert plan.schedule.actions
    model.zero_grad()
    return model, rows, plan


def swapped_and_kept() -> tuple[Growing, Tensor, pooch.Plan]:
    """By hand: what replays read is held for them, and a plan by measured times may hold more or less of it."""
    model, rows, _ = planned()
    profile = quick_profile(lambda: model(rows), model)
    ids = [value.id for value in Dataflow(profile, "model").activations]
    decisions: dict[int, Choice] = {each: "swap" if place % 2 else "keep" for place, each in enumerate(ids)}
    plan = pooch.plan_from_decisions(profile, decisions, region="model")
    model.zero_grad()
    return model, rows, replace(plan, budget_bytes=plan.predicted_peak_bytes)


def gradients(model: nn.Module, rows: Tensor) -> dict[str, bytes]:
    model.zero_grad()
    model(rows).backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, bytes]:
    """Not as tensors, which would take a part of the budget."""
    return {name: p.grad.cpu().numpy().tobytes() for name, p in model.named_parameters() if p.grad is not None}


def counted_peak(step: Callable[[], object]) -> int:
    """Counted below PyTorch, from the beginning of a step to its end."""
    gc.collect()
    allocator, user = the_allocator(), object()
    assert allocator.install(user)
    try:
        earlier_bytes = live_bytes(CPU) - allocator.live_bytes()
        allocator.reset_peak()
        step()
        return earlier_bytes + allocator.peak_bytes()
    finally:
        allocator.remove(user)


@pytest.mark.parametrize(("ordinary", "more"), [(0, 12), (5, 7), (10, 8)])
def test_a_step_that_leaves_its_plan_stays_within_the_budget(ordinary: int, more: int) -> None:
    model, rows, plan = planned()
    with pooch.apply(plan, model, measure_every=0) as run:
        for _ in range(3):
            gradients(model, rows)
        model.ordinary, model.more = ordinary, more
        with run.paused():
            expected = gradients(model, rows)
            plain_bytes = counted_peak(lambda: gradients(model, rows))
        model.zero_grad()
        with pytest.warns(UserWarning, match="the budget is held without the plan"):
            peak_bytes = counted_peak(lambda: model(rows).backward())
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 1
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
        assert plain_bytes > plan.budget_bytes
        assert peak_bytes <= plan.budget_bytes
        check_that_the_plan_is_followed_again(model, rows, plan, run)
    assert not the_allocator().is_in_use


def test_a_backward_pass_that_takes_more_than_planned_stays_within_the_budget() -> None:
    """What a hook of the program's holds from the middle of the backward pass on is in no plan."""
    model, rows, plan = swapped_and_kept()
    taken: list[Tensor] = []

    def hooked(loss: Tensor) -> Tensor:
        loss.register_hook(lambda gradient: taken.extend(torch.rand(256, 1024) for _ in range(5)) or gradient)
        return loss

    with pooch.apply(plan, model, measure_every=0) as run:
        gradients(model, rows)
        with run.paused():
            expected = gradients(model, rows)
            plain_bytes = counted_peak(lambda: gradients(model, rows))
        model.zero_grad()
        peak_bytes = counted_peak(lambda: hooked(model(rows)).backward())
        assert gradients_of(model) == expected
        assert len(taken) == 5
        assert run.stats.mismatches == 0
        assert run._floor.stall_ms > 0
        assert run._floor.missing_bytes == 0
        assert plain_bytes > plan.budget_bytes >= peak_bytes


def test_a_plan_that_fails_in_the_middle_of_the_backward_pass_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, plan = planned()
    monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # Python runs the actions
    with pooch.apply(plan, model, measure_every=0) as run:
        gradients(model, rows)
        with run.paused():
            expected = gradients(model, rows)
        model.zero_grad()
        loss = model(rows)
        act, acted = PlanGuide.act, list[int]()

        def fails(guide: PlanGuide, slot: int) -> None:
            acted.append(slot)
            if len(acted) == 3:
                raise PlanMismatch("the third slot of the backward pass fails")
            act(guide, slot)

        monkeypatch.setattr(PlanGuide, "act", fails)
        with pytest.warns(UserWarning, match="the third slot of the backward pass fails.; the budget is held"):
            peak_bytes = counted_peak(loss.backward)
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 1
        assert run.stats.late_swaps > 0
        assert peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("region", ["step", "model"])
def test_a_plain_step_while_the_plan_pauses_asks_for_no_room(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it never enters the region of its plan."""
    model, rows, _ = planned()
    profile = quick_profile(lambda: model(rows), model)
    plan = pooch.plan(profile, budget_at(profile, 0.6), region=region, time_limit_s=3)
    model.zero_grad()
    asked = list[int]()
    make_room = Evictor.make_room
    monkeypatch.setattr(Evictor, "make_room", lambda *given: asked.append(given[1]) or make_room(*given))
    with pooch.apply(plan, model, measure_every=0) as run:
        for _ in range(2):
            with run.forward_region():
                loss = model(rows)
            loss.backward()
        asked.clear()
        with run.paused():
            plain_bytes = counted_peak(lambda: gradients(model, rows))
            assert plain_bytes > plan.budget_bytes
            assert not asked
        torch.empty(plan.budget_bytes)
        assert asked, "it was asked for before, so it is again"


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_whatever_a_plan_moves_leaves_at_any_time(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what it has yet to copy out, and what it has just made again."""
    monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # Python runs the actions
    model, rows, _ = planned()
    profile = quick_profile(lambda: model(rows), model)
    ids = [value.id for value in Dataflow(profile, "model").activations]
    plan = pooch.plan_from_decisions(profile, dict.fromkeys(ids, choice), region="model")
    act, here_bytes, stayed = PlanGuide.act, list[int](), list[int]()
    model.zero_grad()
    with pooch.apply(plan, model, measure_every=0) as run:
        gradients(model, rows)
        with run.paused():
            expected = gradients(model, rows)

        def everything_leaves(guide: PlanGuide) -> None:
            free = [value for value in guide.values.may_leave() if not value.is_held_elsewhere(run._floor.memory)]
            here_bytes.append(sum(value.storage.nbytes() for value in free))
            run._floor.relieve()
            stayed.extend(value.number for value in free if value.storage is not None)

        def acts(guide: PlanGuide, slot: int) -> None:
            everything_leaves(guide)
            act(guide, slot)
            everything_leaves(guide)

        monkeypatch.setattr(PlanGuide, "act", acts)
        assert gradients(model, rows) == expected
    assert max(here_bytes) >= 2 * MIB
    assert not stayed


def test_an_allocation_that_fails_is_tried_again_once_values_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that has done nothing yet can run again. Natively: see test_native_watch."""
    monkeypatch.setattr(mode, "is_native", lambda _: False)
    model, rows, plan = planned(0.95)
    with pooch.apply(plan, model, measure_every=0) as run:
        gradients(model, rows)
        planned_bytes = run.stats.swapped_in_bytes
        with run.paused():
            expected = gradients(model, rows)
        model.zero_grad()
        failures = fail_once(monkeypatch, "aten.sin.default", 8)
        loss = model(rows)
        assert failures == ["failed"]
        assert run._floor.stall_ms > 0
        loss.backward()
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 0
        assert run.stats.ran_out_bytes == 1
        assert run.stats.swapped_in_bytes > planned_bytes


def test_an_allocation_that_fails_though_nothing_can_leave_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "is_native", lambda _: False)
    model, rows, plan = planned(0.95)
    with pooch.apply(plan, model, measure_every=0):
        gradients(model, rows)
        fail_once(monkeypatch, "aten.addmm.default", 8)
        monkeypatch.setattr(Evictor, "relieve", lambda _: 0)  # nothing can leave
        with pytest.raises(torch.OutOfMemoryError):
            model(rows)


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, number: int) -> list[str]:
    """Have one call of an operator fail for want of memory, as on a device that others use too."""
    calls, failures = [0], list[str]()

    def called(func: Any, *given: Any) -> Any:
        if str(func) == name:
            calls[0] += 1
            if calls[0] == number:
                failures.append("failed")
                raise torch.OutOfMemoryError("no memory")
        return called_as_unwatched(func, *given)

    monkeypatch.setattr(mode, "called_as_unwatched", called)
    return failures


@pytest.mark.parametrize("may_train", [True, False])
def test_the_budget_is_held_beside_threads_of_others_too(may_train: bool) -> None:
    """What those hold that may train is not looked at."""
    model, rows, plan = planned()
    with another_thread(may_train=may_train), pooch.apply(plan, model, measure_every=0) as run:
        gradients(model, rows)
        model.more = 8
        with run.paused():
            expected = gradients(model, rows)
        model.zero_grad()
        with pytest.warns(UserWarning, match="the budget is held without the plan"):
            peak_bytes = counted_peak(lambda: model(rows).backward())
        assert gradients_of(model) == expected
        assert peak_bytes <= plan.budget_bytes


def check_that_the_plan_is_followed_again(model: Growing, rows: Tensor, plan: pooch.Plan, run: Run) -> None:
    model.ordinary, model.more = 10, 0
    with run.paused():
        expected = gradients(model, rows)
    model.zero_grad()
    peak_bytes = counted_peak(lambda: model(rows).backward())
    assert gradients_of(model) == expected
    assert run.stats.mismatches == 0
    assert peak_bytes <= plan.budget_bytes


def test_the_limit_of_another_budget_stays() -> None:
    """The CPU's allocator holds one: a plan that is left says that it cannot hold its own."""
    model, rows, plan = planned()
    asked: list[int] = []
    with counting() as allocator, pooch.apply(plan, model, measure_every=0):
        allocator.set_limit(2**60, asked.append)
        model.more = 2
        with pytest.warns(UserWarning, match="keeps its activations and may exceed the budget"):
            gradients(model, rows)
        assert allocator._make_room == asked.append


def test_a_later_limit_is_left_in_place_by_one_that_ends() -> None:
    with counting() as allocator:
        first, second = CountedBytes(allocator), CountedBytes(allocator)
        first.hold(2**60, lambda _: None)
        second.hold(2**60, lambda _: None)
        first.close()
        assert allocator.has_limit
        second.close()
        assert not allocator.has_limit


def test_the_limit_of_a_counter_that_was_freed_stands_in_nobodys_way() -> None:
    allocator = the_allocator()
    left = CountedBytes(allocator)
    left.hold(2**60, lambda _: None)
    assert allocator.has_limit
    del left
    assert not allocator.is_in_use
    assert not allocator.has_limit


def test_a_step_that_fails_off_the_plan_leaves_no_budget_behind() -> None:
    model, rows, plan = planned()
    with pooch.apply(plan, model, measure_every=0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.more = 2
        with pytest.raises(RuntimeError, match="broken"):
            failing(model, rows)
        model.more = 0
        gradients(model, rows)
    assert not the_allocator().is_in_use
    assert not the_allocator().has_limit


def failing(model: Growing, rows: Tensor) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    with model.layers[1].register_forward_hook(broken):
        model(rows)


@pytest.mark.parametrize("kind", ["plain", "conjugated", "negated", "both"])
def test_a_kept_value_that_leaves_in_the_middle_of_an_op_is_watched_for_writes(kind: str) -> None:
    """There a detached tensor has a version counter of its own, unless PyTorch is asked for the layer of views."""
    tensor, other, probes = torch.rand(100), torch.rand(100), list[VersionProbe]()
    if kind != "plain":
        tensor = tensor.to(torch.complex64).conj()
        tensor = {"conjugated": tensor, "negated": tensor.imag, "both": torch._neg_view(tensor)}[kind]
        assert (tensor.is_conj(), tensor.is_neg()) == (kind != "negated", kind != "conjugated")
    tensor.mul_(2)
    with counting() as allocator:
        allocator.set_limit(0, lambda _: probes.append(VersionProbe(tensor)))
        allocator.ask_for_room(True)
        kept = other + 1
    assert probes
    assert kept._version == 0
    assert not any(probe.moved() for probe in probes)
    tensor.mul_(2)
    assert all(probe.moved() for probe in probes)


def test_several_forward_passes_whose_values_leave_keep_their_bits() -> None:
    """What dropout keeps was written over before autograd saved it."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.5))]
    model, rows = nn.Sequential(*layers, nn.Flatten(0)), torch.rand(256, 64)
    profile = quick_profile(lambda: model(rows).square().mean(), model)
    plan = pooch.plan_from_decisions(profile, mixed(profile, "model"), region="model")
    plan = replace(plan, budget_bytes=plan.predicted_peak_bytes)

    def step() -> dict[str, bytes]:
        model.zero_grad()
        torch.manual_seed(1)
        losses = [model(rows).square().mean() for _ in range(3)]
        for loss in losses:
            loss.backward()
        return gradients_of(model)

    expected = step()
    with pooch.apply(plan, model, measure_every=0) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert step() == expected
        assert run._floor.is_held
        assert run._floor.stall_ms > 0

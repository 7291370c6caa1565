"""Values that the program holds leave memory during the forward pass, and whoever looks at them finds them there."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.errors import InfeasibleBudget
from pooch.executor import Run, apply_plan
from pooch.ir import Choice, Plan, Profile
from pooch.torchtools.memory_trace import MemoryTrace, MemoryTracer, live_bytes, marker, quiet_collector
from tests import toys
from tests.executor.support import all_of, assert_same, is_same, moved_bytes, quick_profile, tight_plan

CPU = torch.device("cpu")


class UNet3d(nn.Module):
    """Three levels with dropout and batch norm; the skip of the first level is the largest value there is."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.down, self.bottom = _level(1, width), _level(width, width), _level(width, width)
        self.up, self.leave = _level(2 * width, width), _level(2 * width, 1)

    def forward(self, volume: Tensor) -> Tensor:
        first = self.enter(volume)
        second = self.down(functional.max_pool3d(first, 2))
        with marker("bottom"):
            third = self.bottom(functional.max_pool3d(second, 2))
        up = self.up(torch.cat([functional.interpolate(third, scale_factor=2.0), second], 1))
        return self.leave(torch.cat([functional.interpolate(up, scale_factor=2.0), first], 1))


def _level(inner: int, outer: int) -> nn.Module:
    layers = nn.Conv3d(inner, outer, 3, padding=1), nn.BatchNorm3d(outer), nn.Dropout3d(0.1), nn.SiLU()
    return nn.Sequential(*layers)


def traced(step: Callable[[], Any]) -> tuple[int, MemoryTrace]:
    """Live bytes at the start of a step, and what happened to memory in it."""
    with quiet_collector():
        start_bytes, tracer = live_bytes(CPU), MemoryTracer(CPU)
        tracer.start()
        step()
        return start_bytes, tracer.stop()


def bytes_in(trace: MemoryTrace, name: str) -> int:
    """Highest live bytes, above the start, within a marked stretch."""
    span = next(span for span in trace.markers if span.name == name)
    live = highest = 0
    for event in trace.events:
        if event.time_ns > span.start_ns and not highest:
            highest = live
        live += event.size_bytes
        if span.start_ns <= event.time_ns <= span.end_ns:
            highest = max(highest, live)
    return highest


@pytest.mark.cpu
@pytest.mark.parametrize("region", ["model", "step"])
def test_the_largest_skip_is_gone_while_the_bottom_is_computed(region: Any) -> None:
    # GIVEN a 3D U-Net, and its step traced plainly
    torch.manual_seed(0)
    model, volume = UNet3d(), torch.rand(1, 1, 32, 32, 32)

    def step() -> Tensor:
        torch.manual_seed(7)
        model.zero_grad()
        loss: Tensor = model(volume).square().mean()
        return loss

    step().backward()  # gradients are there from now on
    profile = quick_profile(step, model)
    state = copy.deepcopy(model.state_dict())
    plain_start, plain = traced(lambda: step().backward())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    statistics = {name: b.clone() for name, b in model.named_buffers()}
    skip = max(Dataflow(profile, region).activations, key=lambda v: (v.allocated_bytes, v.release))
    # WHEN it is trained under a plan that swaps everything as early as can be
    plan = tight_plan(profile, all_of(profile, "swap", region), region)
    model.load_state_dict(state)
    with apply_plan(plan, model) as run:

        def planned_step() -> None:
            with run.step() if region == "step" else torch.enable_grad():
                loss = step()
            loss.backward()

        start, trace = traced(planned_step)
        stats = run.stats
    # THEN the skip, and more, is not in memory while the bottom is computed
    assert bytes_in(trace, "bottom") <= bytes_in(plain, "bottom") - skip.allocated_bytes
    assert stats.emptied_bytes == moved_bytes(plan, profile, "empty") >= skip.size_bytes
    assert (stats.late_swaps, stats.mismatches) == (0, 0)
    # AND the peak is what was predicted, and the bits are those of plain training
    assert start + trace.peak_bytes <= plan.predicted_peak_bytes * 1.02
    assert start + trace.peak_bytes < plain_start + plain.peak_bytes
    assert_same(gradients, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert_same(statistics, dict(model.named_buffers()))


def test_a_smaller_budget_is_feasible_than_when_held_values_stay() -> None:
    # GIVEN a skip over an op that needs much room for itself in the forward pass
    step = toys.ToyStep()
    (skip,) = step.op([step.external(8)], [100], saves_outputs=[0])
    (middle,) = step.op([skip], [10], saves=[skip])
    (narrow,) = step.op([middle], [10], saves=[middle], workspace_bytes=200)
    step.op([narrow, skip], [10], saves=[narrow, skip])
    profile = step.build()
    # WHEN it is planned for less than there is
    away, staying = (_smallest(known) for known in (profile, _without_looks(profile)))
    # THEN the smallest budget is smaller by the skip where the skip can leave, and that budget is kept
    assert away == staying - 100
    plan = pooch.plan(profile, away, region="step")
    assert plan.predicted_peak_bytes == away
    assert plan.decisions[skip] == "swap"


def _smallest(profile: Profile) -> int:
    with pytest.raises(InfeasibleBudget) as caught:
        pooch.plan(profile, "1%", region="step")
    return caught.value.minimum_bytes


def _without_looks(profile: Profile) -> Profile:
    """As if nobody knew when values are looked at."""
    return replace(profile, values=tuple(replace(value, touches=None) for value in profile.values))


class Held(nn.Module):
    """`first` is held over two wide ops; `peek` looks at it in between, under a plan that was made without."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)
        self.peek: Callable[[Tensor], Any] = lambda first: None
        self.kept: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        first = self.inner(rows).exp()
        second = first.sin()
        third = self.outer(second)
        self.seen = self.peek(first)
        fourth = third.cos()
        return fourth * first


def emptying_plan(model: nn.Module, rows: Tensor, choice: Choice = "swap") -> Plan:
    profile = quick_profile(lambda: model(rows).sum(), model)
    plan = tight_plan(profile, all_of(profile, choice, "model"), "model")
    assert any(action.kind == "empty" for action in plan.schedule.actions) == (choice == "swap")
    return plan


def _raw(first: Tensor) -> list[float]:
    view: numpy.ndarray = first.detach().numpy()
    return view.ravel().tolist()  # type: ignore[no-any-return]


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "print": lambda first: f"{first} {first!r}",
    "item": lambda first: first[3, 5].item(),
    "tolist": lambda first: first.tolist(),
    "numpy": _raw,
    "array": lambda first: numpy.asarray(first.detach()).tolist(),
    "deepcopy": lambda first: copy.deepcopy(first.detach()).tolist(),
    "slice": lambda first: first[2:5, 3:].tolist(),
    "equal": lambda first: torch.equal(first, first + 0),
    "storage": lambda first: bytes(first.untyped_storage().tolist()),
    "dlpack": lambda first: torch.from_dlpack(first.detach()).tolist(),
}


def look_once(name: str, planned: bool) -> tuple[str, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model, rows = Held(), torch.rand(8, 16)
    plan = emptying_plan(model, rows)
    model.peek = LOOKS[name]
    with apply_plan(plan, model) if planned else torch.enable_grad() as run:
        model(rows).sum().backward()
        stats = run.stats if isinstance(run, Run) else None
    return str(model.seen), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, stats


OF_THE_HOST = ("array", "numpy")  # there are none of a tensor on another device


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.cpu) if name in OF_THE_HOST else name for name in sorted(LOOKS)]
)
def test_who_looks_finds_it(name: str) -> None:
    seen, gradients, _ = look_once(name, planned=False)
    planned_seen, planned_gradients, stats = look_once(name, planned=True)
    assert planned_seen == seen
    assert_same(gradients, planned_gradients)
    assert stats.emptied_bytes > 0
    assert stats.late_swaps > 0


@pytest.mark.cpu
def test_an_array_stays_valid_after_its_tensor_was_to_leave() -> None:
    model, rows = Held(), torch.rand(8, 16)
    plan = emptying_plan(model, rows)
    arrays: list[Any] = []
    model.inner.register_forward_hook(lambda module, inputs, result: None)
    model.peek = lambda first: arrays.append((first.detach().numpy(), first.detach().clone()))
    with pytest.warns(UserWarning, match="left the planned path"), apply_plan(plan, model):
        model(rows).sum().backward()
    array, expected = arrays[0]
    assert is_same(torch.from_numpy(array), expected)


def test_after_an_exception_everything_is_there() -> None:
    model, rows = Held(), torch.rand(8, 16)
    plan = emptying_plan(model, rows)
    caught: list[Tensor] = []

    def fail(first: Tensor) -> None:
        caught.append(first)
        raise ValueError("in the middle")

    model.peek = fail
    with apply_plan(plan, model) as run:
        with suppress(ValueError):
            model(rows)
        assert run.stats.emptied_bytes > 0
        expected = model.inner(rows).exp()
        assert is_same(caught[0].detach(), expected.detach())


def test_what_is_kept_beyond_the_region_is_there_after_it() -> None:
    """The plan was made of a step that lets go of it."""
    model, rows = Held(), torch.rand(8, 16)
    plan = emptying_plan(model, rows)
    model.peek = model.kept.append
    with apply_plan(plan, model) as run:
        loss = model(rows).sum()
        assert run.stats.emptied_bytes > 0
        assert is_same(model.kept[0].detach(), model.inner(rows).exp().detach())
        loss.backward()


class HeldFromTheBeginning(Held):
    """Looks at `first` before it leaves."""

    def forward(self, rows: Tensor) -> Tensor:
        first = self.inner(rows).exp()
        self.peek(first)
        second = first.sin()
        third = self.outer(second)
        fourth = third.cos()
        return fourth * first


def _through_its_address(first: Tensor) -> numpy.ndarray:
    """As C code has it. (`Tensor.numpy` would forbid PyTorch to resize the storage, whatever we remember.)"""
    address = (ctypes.c_float * first.numel()).from_address(first.data_ptr())
    return numpy.ctypeslib.as_array(address).reshape(first.shape)


@pytest.mark.cpu
def test_what_somebody_has_the_address_of_stays_where_it_is() -> None:
    """It may be read at any time from then on, unseen."""
    model, rows = HeldFromTheBeginning(), torch.rand(8, 16)
    profile = quick_profile(lambda: model(rows).sum(), model)
    plan = tight_plan(profile, all_of(profile, "swap", "model"), "model")
    emptied_bytes, held_bytes = moved_bytes(plan, profile, "empty"), 8 * 16 * 4
    assert emptied_bytes >= held_bytes
    arrays: list[numpy.ndarray] = []
    with apply_plan(plan, model) as run:
        model(rows).sum().backward()
        assert (run.stats.emptied_bytes, run.stats.mismatches) == (emptied_bytes, 0)
        model.peek = lambda first: arrays.append(_through_its_address(first))
        loss = model(rows).sum()
        assert (run.stats.emptied_bytes, run.stats.mismatches) == (emptied_bytes - held_bytes, 0)
        seen = torch.from_numpy(arrays[0].copy())  # while autograd still holds it
        loss.backward()
    assert is_same(seen, model.inner(rows).exp())


def test_what_is_away_is_back_as_soon_as_the_path_is_left() -> None:
    """From there on raw looks are not watched, and a tensor without its bytes would be read."""
    model, rows = Held(), torch.rand(8, 16)
    plan = emptying_plan(model, rows)
    sizes: list[int] = []

    def leave(first: Tensor) -> None:
        before = run.stats.emptied_bytes
        rows.cosh()  # no op of the plan's
        sizes.extend((before, run.stats.mismatches, first.untyped_storage().nbytes()))

    with apply_plan(plan, model) as run:
        model.peek = leave
        with pytest.warns(UserWarning, match="left the planned path"):
            loss = model(rows).sum()
        emptied_bytes, mismatches, held_bytes = sizes
        assert emptied_bytes >= 8 * 16 * 4
        assert mismatches == 1
        assert held_bytes == 8 * 16 * 4
        assert run.stats.late_swaps > 0
        loss.backward()


@pytest.mark.cpu
def test_no_mode_is_left_behind() -> None:
    model, rows = Held(), torch.rand(8, 16)
    with apply_plan(emptying_plan(model, rows), model):
        model(rows).sum().backward()
    assert torch.overrides._get_current_function_mode() is None
    assert not isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), TorchDispatchMode)

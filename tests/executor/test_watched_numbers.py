"""A step that is watched computes the bits of one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pooch
from pooch.executor import apply_plan
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.profiler.pressure import EVERYTHING_STAYS, NOTHING_STAYS, evicting
from pooch.profiler.recorder import ForwardRecorder
from pooch.profiler.step import record_step
from pooch.torchtools.raw_looks import RawLooks
from pooch.workloads import built_in_workloads, load_workload
from tests.executor.online.support import holding
from tests.executor.support import all_of, is_same, quick_profile, tight_plan

pytestmark = pytest.mark.cpu
SMALL = [
    f"{entry.name}@{preset.name}"
    for entry in built_in_workloads().values()
    for preset in entry.presets
    if preset.name.startswith("small")
]


class Taught(nn.Module):
    """A frozen teacher in eval mode within the forward pass, whose attention is one fused kernel; and a long skip."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(256, 256), nn.Linear(256, 256)
        self.teacher = nn.TransformerEncoderLayer(256, 4, 128, batch_first=True)
        self.attention = nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = functional.gelu(self.enter(rows)).view(4, 64, 256)
        self.teacher.eval()
        self.attention.eval()
        skip = hidden.exp()
        hidden = self.leave(skip.sin())
        with torch.no_grad():
            taught = self.teacher(hidden) + self.attention(hidden, hidden, hidden)[0]
        return (torch.tanh(hidden + taught).cos() * skip).square().mean()


def taught() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model, rows = Taught(), torch.randn(256, 256)
    return model, lambda: model(rows)


def bits(model: nn.Module, forward: Callable[[], Tensor]) -> list[Tensor]:
    """Loss, gradients, buffers and the random state of one step from a given seed."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = forward()
    loss.backward()
    return _results(model, loss)


def _results(model: nn.Module, loss: Tensor) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [each.detach().clone() for each in (loss, *gradients, *model.buffers())] + [torch.get_rng_state()]


def test_the_fast_path_is_another_one_under_a_function_mode() -> None:
    """Else the tests below show nothing: this is what watching must not do."""
    model, forward = taught()
    plain = bits(model, forward)
    with torch.overrides.BaseTorchFunctionMode():
        watched = bits(model, forward)
    assert not all(map(is_same, plain, watched))


@pytest.mark.parametrize("mode", ["run", "offload", "fake"])
def test_a_profile_sees_the_fast_path(mode: Any) -> None:
    model, forward = taught()
    profile = pooch.profile(forward, model, mode=mode)
    assert {"aten._transformer_encoder_layer_fwd.default", "aten._native_multi_head_attention.default"} <= {
        op.name for op in profile.ops
    }


@pytest.mark.parametrize("region", ["model", "step"])
def test_a_plan_that_empties_storages_keeps_the_fast_path(region: str) -> None:
    model, forward = taught()
    plain = bits(model, forward)
    profile = quick_profile(forward, model)
    plan = tight_plan(profile, all_of(profile, "swap", region), region)  # type: ignore[arg-type]
    assert any(action.kind == "empty" for action in plan.schedule.actions)
    torch.manual_seed(1)
    model.zero_grad()
    with apply_plan(plan, model) as run:
        with run.forward_region():
            loss = forward()
        loss.backward()
        assert all(map(is_same, plain, _results(model, loss)))
        assert run.stats.emptied_bytes > 0
        assert run.stats.mismatches == 0


def test_auto_keeps_the_fast_path() -> None:
    model, forward = taught()
    plain = bits(model, forward)
    with pooch.auto(model, "1MiB", tell=lambda text: None) as auto:
        for _ in range(3):
            assert all(map(is_same, plain, bits(model, forward)))
        assert auto.summary().steps == 3


@contextmanager
def recorded(model: nn.Module) -> Iterator[None]:
    """As `pooch.profile` watches a forward pass."""
    recorder = ForwardRecorder(model)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (recorder.note_saved(x), x), lambda saved: saved[1])
    with recorder.path.watched(), hooks, RawLooks(recorder.looked), recorder:
        yield
    assert recorder.ops


@contextmanager
def followed(model: nn.Module) -> Iterator[None]:
    """As `pooch.auto` watches one under no plan, with nothing to do."""
    with holding() as evictor:
        evictor.begin_step(RunStats())
        with following(Step(evictor)):
            yield


WAYS = {"recorded": recorded, "followed": followed}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_built_in_workloads(name: str, way: str) -> None:
    package = built_in_workloads()[name.partition("@")[0]].package
    if package:
        pytest.importorskip(package)

    def step(watched: bool) -> list[Tensor]:
        workload = load_workload(name)
        model = workload.model
        torch.manual_seed(1)
        if watched:
            with WAYS[way](model):
                loss = workload.forward()
        else:
            loss = workload.forward()
        loss.backward()
        return _results(model, loss)

    assert all(map(is_same, step(watched=False), step(watched=True)))


@pytest.mark.parametrize("budget_bytes", [EVERYTHING_STAYS, NOTHING_STAYS], ids=["in-core", "under pressure"])
def test_a_recorded_step_leaves_the_bits_of_its_gradients(budget_bytes: int) -> None:
    model, forward = taught()
    plain = bits(model, forward)
    model.zero_grad()
    torch.manual_seed(1)
    with evicting(torch.device("cpu"), budget_bytes) as evictor:
        record_step(forward, model, evictor)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(is_same, plain[1:], gradients))

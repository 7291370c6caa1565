"""The forward pass without gradients: values die where the program lets go of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import pooch
from pooch.analysis.inference import inference_of
from pooch.api.step_layouts import layout_of
from pooch.ir import Profile
from pooch.packing import bound_of
from pooch.torchtools.memory_trace import MemoryTracer, quiet_collector
from tests import toys


def test_what_is_saved_for_the_backward_pass_dies_at_its_release() -> None:
    step = toys.ToyStep()
    weight, rows = step.parameter(100), step.external(5)
    (first,) = step.op([weight, rows], [16], saves=[rows], gradient_bytes=50)
    (second,) = step.op([first], [32], saves=[first], workspace_bytes=7)
    (third,) = step.op([second], [64], saves=[second])
    step.hold(third)
    profile = step.build(persistent_bytes=1000)
    found = layout_of(inference_of(profile))
    lives = {
        block.target: (block.lower, block.upper, block.size_bytes) for block in found.blocks if block.kind == "fixed"
    }
    assert {target: size for target, (_, _, size) in lives.items()} == {first: 16, second: 32, third: 64}
    assert lives[first][1] <= lives[third][0] < lives[second][1], "the first is gone before the third is made"
    assert found.bound_bytes == 32 + 64
    assert found.outside_bytes == 105, "what the step has besides, such as optimizer state, is not there"
    assert layout_of(profile).bound_bytes > found.bound_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(toys.profiles())
def test_a_forward_pass_is_a_profile_and_takes_no_more_than_the_step(profile: Profile) -> None:
    found = inference_of(profile)
    assert found.fault() is None
    layout = layout_of(found, policy="sekiyama")
    assert layout.bound_bytes == bound_of([block.block for block in layout.blocks])
    assert layout.bound_bytes + layout.outside_bytes == found.peak_bytes <= profile.peak_bytes
    assert inference_of(found).peak_bytes == found.peak_bytes, "nothing is saved in it, so nothing changes"


class Branches(nn.Module):
    """Values that live for long, and some in place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = torch.relu_(self.norm(self.down[0](images)))
        second = torch.tanh(self.down[1](first)) * 2
        return self.up(torch.cat([first, second], 1)).sigmoid()


@pytest.mark.parametrize("batch", [2, 5])
def test_the_live_bytes_are_those_of_a_forward_pass_without_gradients(batch: int) -> None:
    torch.manual_seed(0)
    model, images = Branches(), torch.randn(batch, 4, 64, 64)
    profile = pooch.profile(lambda: model(images).square().mean(), model, warmup=1, repeats=1)
    tracer = MemoryTracer(torch.device("cpu"))
    with torch.no_grad(), quiet_collector():
        model(images)
        tracer.start()
        result = model(images)
        measured_bytes = tracer.stop().peak_bytes
    predicted = layout_of(inference_of(profile))
    assert result.shape == images.shape
    assert predicted.bound_bytes == pytest.approx(measured_bytes, rel=0.001)
    assert predicted.arena_bytes <= 1.01 * measured_bytes
    assert predicted.bound_bytes < 0.7 * layout_of(profile).bound_bytes

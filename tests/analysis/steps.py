"""Profiles of small models at many shapes, for comparing predictions with what a profile of that shape says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from pooch.analysis.interpolation import KnownStep
from pooch.devices import find_device
from pooch.ir import Profile
from pooch.profiler import ProfileOptions
from pooch.profiler.fake.costs import OpCost
from pooch.profiler.fake.profiler import FakeSetting, profile_fake_step
from pooch.profiler.hardware import describe_device
from pooch.torchtools.tensors import find_tensors, storage_bytes
from pooch.workloads import Workload
from tests.executor.nets import ConvNet
from tests.executor.support import LINK

Shapes = tuple[int, ...]


class BytesCost:
    """An operator takes as long as its results are large, and no memory besides them: no noise, nothing is run."""

    def cost(self, func: object, args: object, kwargs: object, result: object) -> OpCost:
        return OpCost(1e-3 + storage_bytes(find_tensors(result)) / 1e6, 0)

    def corrected(self, func: object, args: object, kwargs: object, result: object) -> object:
        return result

    def notes(self) -> list[str]:
        return []


def language_model(shapes: Shapes) -> Workload:
    """Two layers of GPT-2 on tokens of shape (batch, length)."""
    pytest.importorskip("transformers")
    from pooch.workloads.models.gpt2 import build

    return build(shapes[0], sequence_length=shapes[1], layers=2, width=64, heads=4, vocabulary=500)


def image_model(shapes: Shapes) -> Workload:
    """A small convolutional network on images of shape (batch, 3, height, width)."""
    torch.manual_seed(0)
    return _workload(ConvNet(8), torch.randn(shapes))


def _workload(model: nn.Module, inputs: Tensor) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, lambda: model(inputs).square().mean(), optimizer, batch_size=len(inputs))


class Branching(nn.Module):
    """Takes another path for more than 100 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.linear(inputs)
        return made.tanh().exp() if len(inputs) > 100 else made.tanh()


def branching_model(shapes: Shapes) -> Workload:
    """A model whose path depends on its batch size."""
    return _workload(Branching(), torch.randn(shapes))


@cache
def fake_profile(build: Callable[[Shapes], Workload], shapes: Shapes, device_model: str = "") -> Profile:
    """What a profile in mode "fake" says, of this CPU or of a modelled device."""
    job = build(shapes)
    device = find_device(device_model).as_device({}) if device_model else describe_device(torch.device("cpu"))
    setting = FakeSetting(device, LINK, BytesCost())
    options = ProfileOptions(batch_size=job.batch_size)
    return profile_fake_step(job.forward, job.model, job.optimizer, setting, options)


def known_steps(build: Callable[[Shapes], Workload], *shapes: Shapes) -> list[KnownStep]:
    """Steps that were profiled at these shapes."""
    return [KnownStep(each, fake_profile(build, each)) for each in shapes]


def without_times(profile: Profile) -> Profile:
    """Everything that has to be predicted exactly. What outlives the step is not predicted."""
    ops = tuple(replace(op, time_ms=0.0, host_ms=0.0) for op in profile.ops)
    return replace(profile, ops=ops, step_ms=0.0, time_factor=1.0, notes=(), reserved_bytes=0, persistent=())


def points(profile: Profile) -> list[int]:
    """Bytes at every point."""
    return [size for op in profile.ops for size in (op.entry_bytes, op.peak_bytes)]

"""Memory that runs out in the plain step: what it held is free before the step is recorded with saved tensors away."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.profiler import ProfileOptions, profile_step, profiler
from pooch.torchtools.device_memory import give_memory_back
from tests.executor.support import LINK


class Cycle:
    """Only a collection lets go of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.itself = tensor, self


def test_a_failed_plain_step_is_collected_and_its_blocks_returned_before_the_next_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows = nn.Linear(64, 64), torch.rand(256, 64)
    events: list[str] = []
    held: list[weakref.ref[Cycle]] = []

    def forward() -> Tensor:
        events.append("forward")
        if len(events) == 2:  # the first plain step; the one before is recorded
            cycle = Cycle(model(rows))
            held.append(weakref.ref(cycle))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        events[-1] += " beside what failed" if any(ref() is not None for ref in held) else ""
        return model(rows).tanh().sum()

    def returned(device: Any) -> None:
        give_memory_back(device)
        events.append("memory given back" if held[0]() is None else "memory still held")

    monkeypatch.setattr(profiler, "give_memory_back", returned)
    profile = profile_step(forward, model, None, LINK, ProfileOptions(mode="auto")).profile
    assert profile.mode == "offload"
    assert events == ["forward", "forward", "memory given back", "forward", "forward"]

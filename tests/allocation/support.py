"""Training of small models on arenas, beside the same training without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pooch.allocation import ArenaOptions, StepArena, open_arena

WATCHED = ArenaOptions(canary_bytes=64, pack_limit_s=0.3)
Step = Callable[[], Tensor]


@contextmanager
def an_arena(options: ArenaOptions = WATCHED) -> Iterator[StepArena]:
    """An arena that is closed afterwards, and none of whose blocks was written beyond its end."""
    arena = open_arena(torch.device("cpu"), options)
    assert isinstance(arena, StepArena), arena
    try:
        yield arena
    finally:
        arena.close()
    assert arena.stats.counters.broken_canaries == 0


@dataclass(eq=False)
class Training:
    """A model with an optimizer and what every step left: losses, and all gradients as bytes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Tensor
    trace: list[bytes] = field(default_factory=list)

    def step(self, rows: int | None = None) -> None:
        loss = self.model(self.data[:rows]).square().mean()
        loss.backward()
        self.finish(loss)

    def finish(self, loss: Tensor) -> None:
        self.trace.append(loss.detach().numpy().tobytes())
        self.trace += [p.grad.numpy().tobytes() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()


def a_training(seed: int = 0) -> Training:
    """A small convolutional net with batch statistics and dropout, under Adam."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU(),
        nn.Dropout(0.2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8),
    )  # fmt: skip
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-3), torch.randn(8, 3, 24, 24))

"""What a hostile case is: a small model that does something on which a replay may depend, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 64
ROWS = 32


class Hostile(nn.Module):
    """A chain of two linear layers, passed three times. A case overrides what is hostile about it.

    Attributes:
        steps: Number of training steps.
        lr: Learning rate.
        accumulated: Number of steps whose gradients are added up before the optimizer's.
    """

    steps = 4
    lr = 0.1
    accumulated = 1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.number = 0  # of the training step
        self.add_parts()

    def add_parts(self) -> None:
        """Add what the case needs beside the two layers."""

    def layer(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.second(functional.gelu(self.first(rows))))

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(3):
            rows = self.layer(rows)
        return rows.square().mean()

    def batch(self, number: int) -> Tensor:
        """Return the input of a step."""
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 + number))

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of step `self.number`."""
        return torch.optim.SGD(self.parameters(), self.lr)

    def around(self) -> AbstractContextManager[object]:
        """Return what is entered around the call of the model."""
        return nullcontext()

    def before_step(self) -> None:
        """Change something before the forward pass of step `self.number`."""

    def between(self) -> None:
        """Change something between the forward and the backward pass."""

    def after_step(self) -> None:
        """Change something after the optimizer's step."""

    def other_models(self) -> list[nn.Module]:
        """Return models beside this one that a budget governs as well."""
        return []


@dataclass(frozen=True)
class Case:
    """A hostile model.

    Attributes:
        name: Its name, which is that of its class.
        why: What a replay may get wrong, in one line.
        build: Makes the model. The random state is set before.
        raises: Whether plain training raises an error, so that governed training has to raise one too.
        is_alone: Whether it runs in a process of its own, since it has ended the process before, or disturbed others.
        may_stop: Whether `ReplayDiffers` is right as well where a plan is applied: the hostile act begins late, when
            copies of what is replayed are no longer taken.
        moves_nothing: Whether nothing can be swapped nor replayed in it, since the steps cannot be governed at all.
    """

    name: str
    why: str
    build: Callable[[], Hostile]
    raises: bool = False
    is_alone: bool = False
    may_stop: bool = False
    moves_nothing: bool = False


CASES: dict[str, Case] = {}


def hostile(why: str, **options: bool) -> Callable[[type[Hostile]], type[Hostile]]:
    """Decorate a class to make it a case."""

    def register(kind: type[Hostile]) -> type[Hostile]:
        assert kind.__name__ not in CASES, f"two cases are named {kind.__name__}"
        CASES[kind.__name__] = Case(kind.__name__, why, kind, **options)
        return kind

    return register

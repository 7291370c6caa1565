"""What there is to train: a model, a function that gives its loss, and perhaps an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Workload:
    """One training step's ingredients.

    Attributes:
        model: the network; its `forward` is what a plan of region "model" covers.
        forward: takes nothing, runs the model on the workload's own data, returns the scalar loss.
        optimizer: its state counts as persistent bytes; also what steps in `pooch run`. None: no step is taken.
        name: for people and for file names.
        batch_size: items per step, 0 where unknown.
    """

    model: torch.nn.Module
    forward: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    name: str = ""
    batch_size: int = 0

"""A workload: a model, a function that returns its loss, and an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Workload:
    """What a training step consists of.

    Attributes:
        model: the network; its `forward` is what a plan of region "model" covers.
        forward: () -> scalar loss of the model on the workload's data.
        optimizer: its state counts as persistent bytes. None: training takes no optimizer steps.
        name: for the reader.
        batch_size: items per step (0: unknown).
    """

    model: torch.nn.Module
    forward: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer | None = None
    name: str = ""
    batch_size: int = 0

"""A network of others, as the sweep takes it: the model, the arguments of its calls, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Arguments = Mapping[str, Any] | tuple[Any, ...]


def mean_square(output: Any) -> Tensor:
    """The loss that the model computed, or else one that every number of the output that can be trained is part of.

    Raises:
        ValueError: nothing in the output can be trained.
    """
    if isinstance(given := getattr(output, "loss", None), Tensor) and given.requires_grad:
        return given.mean()
    parts = [
        (each.abs() if each.is_complex() else each).float().square().mean()
        for each in _tensors(output)
        if each.requires_grad and each.numel()
    ]
    if not parts:
        raise ValueError("nothing in the output of the model can be trained")
    return torch.stack(parts).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an output, each once for each place."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


@dataclass(frozen=True, slots=True)
class Network:
    """A network with random weights.

    Attributes:
        model: in training mode.
        batch: makes random arguments of one call for a number of samples.
        loss: of what the call returned.
        fixed_size: whether the number of samples makes no difference, as for a graph or a Gaussian process.
    """

    model: nn.Module
    batch: Callable[[int], Arguments]
    loss: Callable[[Any], Tensor] = mean_square
    fixed_size: bool = False

    def step_loss(self, arguments: Arguments) -> Tensor:
        """Call the model, and return the loss."""
        if isinstance(arguments, Mapping):
            return self.loss(self.model(**arguments))
        return self.loss(self.model(*arguments))

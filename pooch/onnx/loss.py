"""The loss to train with: given, or chosen by the shape of the model's output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from ..ground.errors import UsageError

LOSSES = ("auto", "cross_entropy", "mse", "sum")
Loss = Callable[[torch.Tensor], torch.Tensor]


def loss_for(kind: str, output: torch.Tensor, takes_tokens: bool, seed: int, device: torch.device) -> Loss:
    """Return a loss with random targets.

    Args:
        kind: one of `LOSSES`. "auto": the output itself if it is a single number, cross entropy if it looks like
            classes, otherwise the mean squared error.
        output: a tensor with the shape and type of the model's output; may be a meta tensor.
        takes_tokens: whether the inputs index a table, as in language models. Classes are then the last dimension of a
            three-dimensional output; otherwise they are the second dimension.
        seed: seed of the random targets.
        device: device of the targets.

    Raises:
        UsageError: the loss is unknown, or does not fit the output.
    """
    if kind not in LOSSES:
        raise UsageError(f"there is no loss {kind!r}: --set loss= takes {', '.join(LOSSES)}")
    axis = -1 if takes_tokens and output.dim() == 3 else 1
    chosen = _by_shape(output, axis) if kind == "auto" else kind
    generator = torch.Generator().manual_seed(seed + 1)
    if chosen == "sum":
        return torch.sum
    if chosen == "mse":
        target = torch.randn(output.shape, generator=generator).to(device, output.dtype)
        return lambda result: functional.mse_loss(result, target)
    if output.dim() < 2 or not output.is_floating_point():
        raise UsageError(f"an output of shape {tuple(output.shape)} has no classes: give --set loss=mse or loss=sum")
    classes = output.shape[axis]
    places = [size for dimension, size in enumerate(output.shape) if dimension != axis % output.dim()]
    labels = torch.randint(classes, places, generator=generator).to(device)
    if axis == -1:
        return lambda result: functional.cross_entropy(result.flatten(0, -2), labels.flatten())
    return lambda result: functional.cross_entropy(result, labels)


def _by_shape(output: torch.Tensor, axis: int) -> str:
    if output.numel() == 1:
        return "sum"
    has_classes = output.dim() >= 2 and output.is_floating_point() and output.shape[axis] > 1
    is_image = output.dim() == 3 and axis == 1  # three dimensions but no tokens: features, not classes
    return "cross_entropy" if has_classes and not is_image else "mse"

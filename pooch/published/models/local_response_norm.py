"""Local response normalization as one operator, as in the framework of the PoocH paper and in cuDNN.

PyTorch composes it of plain operators, of which the gradient of the division alone holds about seven maps at once. The
operator here saves its input alone, and both of its passes work item by item, so that they hold little beside their
results.
"""

from __future__ import annotations

import torch
from torch import nn

from ...torchtools.operators import allow_replay

allow_replay("pooch_published::local_response_norm", "pooch_published::local_response_norm_backward")

Settings = tuple[int, float, float, float]  # channels of the window, alpha per channel, beta, k


@torch.library.custom_op("pooch_published::local_response_norm", mutates_args=())
def local_response_norm(inputs: torch.Tensor, channels: int, alpha: float, beta: float, k: float) -> torch.Tensor:
    """Divide each element by (k + alpha * the sum of squares over a window of channels) ** beta.

    Args:
        inputs: (N, C, H, W).
        channels: of the window, which is centred; odd.
        alpha: factor of each square.
        beta: exponent.
        k: added to the sum.
    """
    outputs = torch.empty_like(inputs)
    for item, output in zip(inputs, outputs, strict=True):
        output.copy_(item * _scale(item, channels, alpha, k).pow_(-beta))
    return outputs


@torch.library.custom_op("pooch_published::local_response_norm_backward", mutates_args=())
def local_response_norm_backward(
    gradients: torch.Tensor, inputs: torch.Tensor, channels: int, alpha: float, beta: float, k: float
) -> torch.Tensor:
    """Return the gradient with respect to `inputs`, given that of the outputs (both (N, C, H, W))."""
    found = torch.empty_like(inputs)
    for gradient, item, result in zip(gradients, inputs, found, strict=True):
        scale = _scale(item, channels, alpha, k)
        divided = gradient * scale.pow(-beta)
        across = _window_sum((divided * item).div_(scale), channels)
        result.copy_(divided.sub_(across.mul_(item).mul_(2 * alpha * beta)))
    return found


def _scale(item: torch.Tensor, channels: int, alpha: float, k: float) -> torch.Tensor:
    return _window_sum(item * item, channels).mul_(alpha).add_(k)


def _window_sum(values: torch.Tensor, channels: int) -> torch.Tensor:
    """Sum over a centred window along the first dimension."""
    total = values.clone()
    for distance in range(1, min(channels // 2, len(values) - 1) + 1):
        total[distance:] += values[:-distance]
        total[:-distance] += values[distance:]
    return total


@local_response_norm.register_fake
def _(inputs: torch.Tensor, channels: int, alpha: float, beta: float, k: float) -> torch.Tensor:
    return torch.empty_like(inputs)


@local_response_norm_backward.register_fake
def _(
    gradients: torch.Tensor, inputs: torch.Tensor, channels: int, alpha: float, beta: float, k: float
) -> torch.Tensor:
    return torch.empty_like(inputs)


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    tensor, *settings = inputs
    assert isinstance(tensor, torch.Tensor)
    ctx.save_for_backward(tensor)
    ctx.settings = settings  # type: ignore[attr-defined]


def _gradients(
    ctx: torch.autograd.function.FunctionCtx, gradients: torch.Tensor
) -> tuple[torch.Tensor, None, None, None, None]:
    (inputs,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return local_response_norm_backward(gradients, inputs, *ctx.settings), None, None, None, None  # type: ignore[attr-defined]


local_response_norm.register_autograd(_gradients, setup_context=_remember)


class LocalResponseNorm(nn.Module):
    """`nn.LocalResponseNorm` as one operator; `alpha` is per channel, as in the papers.

    Args:
        channels: of the window; odd.
        alpha: factor of each square.
        beta: exponent.
        k: added to the sum.
    """

    def __init__(self, channels: int, alpha: float, beta: float, k: float) -> None:
        super().__init__()
        self.settings: Settings = (channels, alpha, beta, k)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images (N, C, H, W) to images."""
        normalized: torch.Tensor = local_response_norm(inputs, *self.settings)
        return normalized

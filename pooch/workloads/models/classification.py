"""Shared by image and video classifiers: random inputs and labels, cross entropy, SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..base import Workload

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def _cross_entropy(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs), labels)


def classification(
    name: str,
    model: nn.Module,
    input_shape: tuple[int, ...],
    classes: int,
    device: str,
    seed: int,
    loss: Loss = _cross_entropy,
    optimizer: torch.optim.Optimizer | None = None,
) -> Workload:
    """The training step of a classifier on random inputs of shape (N, channels, extents...), drawn from the seed.

    Without an optimizer, it is SGD with momentum.
    """
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*input_shape, generator=generator).to(device)
    labels = torch.randint(classes, (input_shape[0],), generator=generator).to(device)

    def forward() -> torch.Tensor:
        return loss(model, inputs, labels)

    return Workload(model, forward, optimizer, name, input_shape[0])


def initialize_convolutions(model: nn.Module) -> None:
    """He et al.'s initialization for networks whose convolutions feed ReLUs."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ConvNormRelu(nn.Module):
    """A convolution without bias, batch norm, ReLU: the building block of Inception networks.

    If padded, the image keeps its size at stride 1.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: tuple[int, int],
        stride: int = 1,
        padded: bool = True,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if padded else (0, 0)
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(channels_out, eps=eps)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images (N, C, H, W) to images."""
        return torch.relu(self.bn(self.conv(inputs)))

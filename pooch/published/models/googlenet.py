"""GoogLeNet with batch norm (Ioffe and Szegedy 2015), in the sizes of Chainer's example, which the PoocH paper trains.

Like Chainer's, pooling covers the last row and column, so 224 pixels become 57, 29, 15 and 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ...workloads.base import Workload
from ...workloads.models.classification import ConvNormRelu, classification

_AUXILIARY_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class BranchSizes:
    """Channels of one Inception block; 0 means no such branch. "double" is the branch with two 3x3 convolutions."""

    single: int
    reduced_3x3: int
    out_3x3: int
    reduced_double: int
    out_double: int
    pooling: Literal["avg", "max"]
    projected: int
    stride: int = 1


_BLOCKS = {
    "3a": BranchSizes(64, 64, 64, 64, 96, "avg", 32),
    "3b": BranchSizes(64, 64, 96, 64, 96, "avg", 64),
    "3c": BranchSizes(0, 128, 160, 64, 96, "max", 0, 2),
    "4a": BranchSizes(224, 64, 96, 96, 128, "avg", 128),
    "4b": BranchSizes(192, 96, 128, 96, 128, "avg", 128),
    "4c": BranchSizes(160, 128, 160, 128, 160, "avg", 128),
    "4d": BranchSizes(96, 128, 192, 160, 192, "avg", 128),
    "4e": BranchSizes(0, 128, 192, 192, 256, "max", 0, 2),
    "5a": BranchSizes(352, 192, 320, 160, 224, "avg", 128),
    "5b": BranchSizes(352, 192, 320, 192, 224, "max", 128),
}
_AUXILIARY_AFTER = ("4a", "4d")


class InceptionBlock(nn.Module):
    """Up to four branches side by side, concatenated."""

    def __init__(self, channels_in: int, sizes: BranchSizes, scale: float) -> None:
        super().__init__()

        def unit(before: int, after: int, extent: int, stride: int = 1) -> ConvNormRelu:
            return ConvNormRelu(before, after, (extent, extent), stride)

        def of(channels: int) -> int:
            return round(channels * scale)

        reduced, double = of(sizes.reduced_3x3), of(sizes.reduced_double)
        out, out_double = of(sizes.out_3x3), of(sizes.out_double)
        branches: list[nn.Module] = [unit(channels_in, of(sizes.single), 1)] if sizes.single else []
        branches.append(nn.Sequential(unit(channels_in, reduced, 1), unit(reduced, out, 3, sizes.stride)))
        branches.append(
            nn.Sequential(
                unit(channels_in, double, 1), unit(double, out_double, 3), unit(out_double, out_double, 3, sizes.stride)
            )
        )
        pool: nn.Module = (
            nn.AvgPool2d(3, sizes.stride, 1) if sizes.pooling == "avg" else nn.MaxPool2d(3, sizes.stride, 1)
        )
        branches.append(nn.Sequential(pool, unit(channels_in, of(sizes.projected), 1)) if sizes.projected else pool)
        self.branches = nn.ModuleList(branches)
        self.channels_out = of(sizes.single) + out + out_double + (of(sizes.projected) or channels_in)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images to images with `channels_out` channels."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


class AuxiliaryHead(nn.Module):
    """A classifier on a middle layer.

    Args:
        channels_in: of the layer.
        side: extent of the images there.
        classes: number of classes.
        scale: share of the published number of channels.
    """

    def __init__(self, channels_in: int, side: int, classes: int, scale: float) -> None:
        super().__init__()
        channels, hidden = round(128 * scale), round(1024 * scale)
        self.pool = nn.AvgPool2d(5, stride=3)
        self.unit = ConvNormRelu(channels_in, channels, (1, 1))
        self.hidden = nn.Linear(channels * ((side - 5) // 3 + 1) ** 2, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images to logits (N, classes)."""
        hidden = torch.flatten(self.unit(self.pool(inputs)), 1)
        logits: torch.Tensor = self.out(torch.relu(self.norm(self.hidden(hidden))))
        return logits


class GoogLeNetBN(nn.Module):
    """Stem, ten Inception blocks, classifier, and two auxiliary classifiers.

    Args:
        image_size: pixels of a side, which determines the size of the auxiliary classifiers.
        classes: number of classes.
        scale: share of the published number of channels.
    """

    def __init__(self, image_size: int, classes: int, scale: float) -> None:
        super().__init__()
        first, second = round(64 * scale), round(192 * scale)
        self.stem = nn.Sequential(
            ConvNormRelu(3, first, (7, 7), 2),
            nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
            ConvNormRelu(first, second, (3, 3)),
            nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True),
        )
        side = _halved(_halved((image_size + 1) // 2, covering=True), covering=True)
        channels = second
        self.blocks = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for name, sizes in _BLOCKS.items():
            block = InceptionBlock(channels, sizes, scale)
            channels = block.channels_out
            side = _halved(side) if sizes.stride == 2 else side
            self.blocks[name] = block
            if name in _AUXILIARY_AFTER:
                self.heads[name] = AuxiliaryHead(channels, side, classes, scale)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.out = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Images (N, 3, H, W) to logits (N, classes): of the auxiliary classifiers, then of the last layer."""
        hidden = self.stem(images)
        logits: list[torch.Tensor] = []
        for name, block in self.blocks.items():
            hidden = block(hidden)
            if name in self.heads:
                logits.append(self.heads[name](hidden))
        logits.append(self.out(torch.flatten(self.pool(hidden), 1)))
        return logits


def _halved(side: int, covering: bool = False) -> int:
    """Extent after a 3x3 window of stride 2 with padding 1; `covering`: the last window may reach over the edge."""
    return (side + covering - 1) // 2 + 1


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first, second, last = (nn.functional.cross_entropy(logits, labels) for logits in model(images))
    return last + _AUXILIARY_WEIGHT * (first + second)


def build(
    batch_size: int = 32,
    device: str = "cpu",
    image_size: int = 224,
    classes: int = 1000,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """GoogLeNet-BN with random weights on random images; three cross entropies, the auxiliary ones at 0.3; SGD."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GoogLeNetBN(image_size, classes, scale)
    shape = (batch_size, 3, image_size, image_size)
    return classification("googlenet", model, shape, classes, device, seed, _loss)

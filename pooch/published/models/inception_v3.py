"""Inception-V3 (Szegedy et al. 2016), with its auxiliary classifier, at 299 pixels."""

from __future__ import annotations

import torch
from torch import nn

from ...workloads.base import Workload
from ...workloads.models.classification import ConvNormRelu, classification

_AUXILIARY_WEIGHT = 0.4
_EPSILON = 1e-3


class Branches(nn.Module):
    """Branches side by side, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images to images with all branches' channels."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


class Sizes:
    """Makes units and blocks with a share of the published number of channels."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def of(self, channels: int) -> int:
        """Scale a number of channels."""
        return round(channels * self.scale)

    def unit(
        self, before: int, after: int, height: int = 1, width: int = 0, stride: int = 1, padded: bool = True
    ) -> ConvNormRelu:
        """Make a convolution unit; a `width` of 0 makes it square."""
        channels = (before if before == 3 else self.of(before), self.of(after))
        return ConvNormRelu(*channels, (height, width or height), stride, padded, _EPSILON)

    def pooled(self, before: int, after: int) -> nn.Sequential:
        """Average pooling that keeps the extents, then a 1x1 unit."""
        return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), self.unit(before, after))

    def block_35(self, before: int, pooled: int) -> Branches:
        """At 35x35: 1x1, 5x5, two 3x3, pooling."""
        return Branches(
            self.unit(before, 64),
            nn.Sequential(self.unit(before, 48), self.unit(48, 64, 5)),
            nn.Sequential(self.unit(before, 64), self.unit(64, 96, 3), self.unit(96, 96, 3)),
            self.pooled(before, pooled),
        )

    def reduction_17(self) -> Branches:
        """From 35x35 to 17x17."""
        return Branches(
            self.unit(288, 384, 3, stride=2, padded=False),
            nn.Sequential(self.unit(288, 64), self.unit(64, 96, 3), self.unit(96, 96, 3, stride=2, padded=False)),
            nn.MaxPool2d(3, stride=2),
        )

    def block_17(self, inner: int) -> Branches:
        """At 17x17: convolutions of 7x7 in two parts."""
        return Branches(
            self.unit(768, 192),
            nn.Sequential(self.unit(768, inner), self.unit(inner, inner, 1, 7), self.unit(inner, 192, 7, 1)),
            nn.Sequential(
                self.unit(768, inner),
                self.unit(inner, inner, 7, 1),
                self.unit(inner, inner, 1, 7),
                self.unit(inner, inner, 7, 1),
                self.unit(inner, 192, 1, 7),
            ),
            self.pooled(768, 192),
        )

    def reduction_8(self) -> Branches:
        """From 17x17 to 8x8."""
        return Branches(
            nn.Sequential(self.unit(768, 192), self.unit(192, 320, 3, stride=2, padded=False)),
            nn.Sequential(
                self.unit(768, 192),
                self.unit(192, 192, 1, 7),
                self.unit(192, 192, 7, 1),
                self.unit(192, 192, 3, stride=2, padded=False),
            ),
            nn.MaxPool2d(3, stride=2),
        )

    def block_8(self, before: int) -> Branches:
        """At 8x8: the 3x3 convolutions fan out into 1x3 and 3x1."""
        return Branches(
            self.unit(before, 320),
            nn.Sequential(self.unit(before, 384), self._fan()),
            nn.Sequential(self.unit(before, 448), self.unit(448, 384, 3), self._fan()),
            self.pooled(before, 192),
        )

    def _fan(self) -> Branches:
        return Branches(self.unit(384, 384, 1, 3), self.unit(384, 384, 3, 1))


class InceptionV3(nn.Module):
    """Stem, eleven blocks, classifier, and optionally an auxiliary classifier.

    Args:
        classes: number of classes.
        scale: share of the published number of channels.
        auxiliary: whether there is an auxiliary classifier.
    """

    def __init__(self, classes: int, scale: float, auxiliary: bool) -> None:
        super().__init__()
        make = Sizes(scale)
        self.stem = nn.Sequential(
            make.unit(3, 32, 3, stride=2, padded=False),
            make.unit(32, 32, 3, padded=False),
            make.unit(32, 64, 3),
            nn.MaxPool2d(3, stride=2),
            make.unit(64, 80),
            make.unit(80, 192, 3, padded=False),
            nn.MaxPool2d(3, stride=2),
        )
        self.blocks_35 = nn.Sequential(make.block_35(192, 32), make.block_35(256, 64), make.block_35(288, 64))
        self.blocks_17 = nn.Sequential(make.reduction_17(), *(make.block_17(inner) for inner in (128, 160, 160, 192)))
        self.head: nn.Module | None = (
            None
            if not auxiliary
            else nn.Sequential(
                nn.AvgPool2d(5, stride=3),
                make.unit(768, 128),
                make.unit(128, 768, 5, padded=False),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(make.of(768), classes),
            )
        )
        self.blocks_8 = nn.Sequential(make.reduction_8(), make.block_8(1280), make.block_8(2048))
        self.last = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(make.of(2048), classes)
        )

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Images (N, 3, H, W) to logits (N, classes): of the last layer, then of the auxiliary classifier if any."""
        hidden = self.blocks_17(self.blocks_35(self.stem(images)))
        auxiliary = [self.head(hidden)] if self.head is not None else []
        return [self.last(self.blocks_8(hidden)), *auxiliary]


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    last, *auxiliary = (nn.functional.cross_entropy(logits, labels) for logits in model(images))
    return last + _AUXILIARY_WEIGHT * auxiliary[0] if auxiliary else last


def build(
    batch_size: int = 16,
    device: str = "cpu",
    image_size: int = 299,
    classes: int = 1000,
    scale: float = 1.0,
    auxiliary: bool = True,
    seed: int = 0,
) -> Workload:
    """Inception-V3 with random weights on random images; two cross entropies, the auxiliary one at 0.4; SGD.

    The auxiliary classifier needs images of at least 299 pixels; without it, 75 suffice.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = InceptionV3(classes, scale, auxiliary)
    return classification("inception_v3", model, (batch_size, 3, image_size, image_size), classes, device, seed, _loss)

"""AlexNet with local response normalization in a single column, as in Chainer and the PoocH paper."""

from __future__ import annotations

import torch
from torch import nn

from ...workloads.base import Workload
from ...workloads.models.classification import classification
from .local_response_norm import LocalResponseNorm

_CHANNELS = (96, 256, 384, 384, 256)
_HIDDEN = 4096


class AlexNet(nn.Module):
    """Five convolutions, three with pooling and two of these with normalization across channels; three linear layers.

    Args:
        image_size: pixels of a side, which determines the size of the first linear layer.
        classes: number of classes.
        scale: share of the published number of channels.
    """

    def __init__(self, image_size: int, classes: int, scale: float) -> None:
        super().__init__()
        first, second, third, fourth, fifth = (max(1, round(channels * scale)) for channels in _CHANNELS)
        hidden = max(1, round(_HIDDEN * scale))
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 11, stride=4), nn.ReLU(), _normalization(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), _normalization(), nn.MaxPool2d(3, stride=2),
            nn.Conv2d(second, third, 3, padding=1), nn.ReLU(),
            nn.Conv2d(third, fourth, 3, padding=1), nn.ReLU(),
            nn.Conv2d(fourth, fifth, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(fifth * _side_of_features(image_size) ** 2, hidden), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        logits: torch.Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return logits


def _normalization() -> LocalResponseNorm:
    return LocalResponseNorm(5, alpha=1e-4, beta=0.75, k=2.0)


def _side_of_features(image_size: int) -> int:
    side = (image_size - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def build(
    batch_size: int = 64,
    device: str = "cpu",
    image_size: int = 227,
    classes: int = 1000,
    scale: float = 1.0,
    seed: int = 0,
) -> Workload:
    """AlexNet with random weights on random images; cross entropy; SGD with momentum."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AlexNet(image_size, classes, scale)
    return classification("alexnet", model, (batch_size, 3, image_size, image_size), classes, device, seed)

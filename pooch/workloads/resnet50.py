"""ResNet-50 in plain PyTorch: bottleneck blocks of "version 1.5" (the stride sits in the 3x3 convolution).

Written out here, so that the most usual convolutional network needs no extra package. In-place ReLUs as in the
widely used definition: they are what a planner of single activations has to get right.
"""

from __future__ import annotations

import torch
from torch import nn

from pooch.workloads.base import Workload

_BLOCKS_PER_STAGE = (3, 4, 6, 3)
_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Three convolutions, then the shortcut is added."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        hidden += inputs if self.downsample is None else self.downsample(inputs)
        output: torch.Tensor = self.relu(hidden)
        return output


class ResNet50(nn.Module):
    """Stem, four stages of bottlenecks, average pooling, classifier."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(64, 64, _BLOCKS_PER_STAGE[0], stride=1)
        self.layer2 = self._stage(256, 128, _BLOCKS_PER_STAGE[1], stride=2)
        self.layer3 = self._stage(512, 256, _BLOCKS_PER_STAGE[2], stride=2)
        self.layer4 = self._stage(1024, 512, _BLOCKS_PER_STAGE[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * _EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(channels_in, channels, stride)
        rest = [Bottleneck(channels * _EXPANSION, channels, 1) for _ in range(blocks - 1)]
        return nn.Sequential(first, *rest)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = stage(hidden)
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return logits


def build(
    batch_size: int = 16, device: str = "cpu", image_size: int = 224, classes: int = 1000, seed: int = 0
) -> Workload:
    """ResNet-50 with random weights on random images; cross entropy; SGD with momentum."""
    torch.manual_seed(seed)
    model = ResNet50(classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator).to(device)
    labels = torch.randint(classes, (batch_size,), generator=generator).to(device)

    def forward() -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return Workload(model, forward, optimizer, "resnet50", batch_size)

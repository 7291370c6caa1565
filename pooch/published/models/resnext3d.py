"""ResNeXt for volumes and clips (Hara et al. 2018), in the sizes that the PoocH paper trains.

The paper calls the network ResNeXt101-3D and gives it 3/24/36/3 blocks, which are 200 layers; we keep sizes and name.
"""

from __future__ import annotations

import torch
from torch import nn

from ...errors import UsageError
from ...workloads.base import Workload
from ...workloads.models.classification import classification, initialize_convolutions

_EXPANSION = 2


class GroupedBottleneck(nn.Module):
    """1x1x1, grouped 3x3x3, 1x1x1 convolutions with a shortcut around them."""

    def __init__(self, channels_in: int, channels: int, groups: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.conv1 = nn.Conv3d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(channels)
        self.conv2 = nn.Conv3d(channels, channels, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm3d(channels)
        self.conv3 = nn.Conv3d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm3d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv3d(channels_in, channels_out, 1, stride=stride, bias=False), nn.BatchNorm3d(channels_out)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply three convolutions, then add the shortcut."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        hidden += inputs if self.shortcut is None else self.shortcut(inputs)
        output: torch.Tensor = self.relu(hidden)
        return output


class ResNeXt3d(nn.Module):
    """Stem of 7x7x7 with stride (1, 2, 2), four stages of grouped bottlenecks, classifier.

    Args:
        blocks: number of bottlenecks in each stage.
        groups: of the grouped convolutions.
        classes: number of classes.
        inner_channels: inside the bottlenecks of the first stage, 128 as published; the stem has half as many.
    """

    def __init__(self, blocks: tuple[int, ...], groups: int, classes: int, inner_channels: int) -> None:
        super().__init__()
        channels = inner_channels // 2
        self.stem = nn.Sequential(
            nn.Conv3d(3, channels, 7, stride=(1, 2, 2), padding=3, bias=False),
            nn.BatchNorm3d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool3d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        for number, count in enumerate(blocks):
            inner = inner_channels * 2**number
            for block in range(count):
                stages.append(GroupedBottleneck(channels, inner, groups, 2 if number > 0 and block == 0 else 1))
                channels = inner * _EXPANSION
        self.stages = nn.Sequential(*stages)
        self.last = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(channels, classes))
        initialize_convolutions(self)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        """Clips (N, 3, D, H, W) to logits (N, classes)."""
        logits: torch.Tensor = self.last(self.stages(self.stem(clips)))
        return logits


def build(
    batch_size: int = 1,
    device: str = "cpu",
    frames: int = 128,
    height: int = 224,
    width: int = 224,
    blocks: str = "3-24-36-3",
    groups: int = 32,
    inner_channels: int = 128,
    classes: int = 400,
    seed: int = 0,
) -> Workload:
    """A 3D ResNeXt with random weights on random clips; cross entropy; SGD with momentum.

    Raises:
        UsageError: the blocks are not four numbers.
    """
    counts = tuple(int(text) for text in blocks.split("-") if text.isdecimal())
    if len(counts) != 4 or min(counts) < 1:
        raise UsageError(f"blocks={blocks!r} is not four numbers of blocks: write 3-24-36-3, for example")
    torch.manual_seed(seed)
    with torch.device(device):
        model = ResNeXt3d(counts, groups, classes, inner_channels)
    return classification("resnext101_3d", model, (batch_size, 3, frames, height, width), classes, device, seed)

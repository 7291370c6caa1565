"""ResNeXt for volumes and clips (Hara et al. 2018), in the sizes that the PoocH paper trains.

The paper calls the network ResNeXt101-3D and gives it 3/24/36/3 blocks, which are 200 layers; we keep sizes and name.
"""

from __future__ import annotations

import torch
from torch import nn

from ...ground.errors import UsageError
from ...workloads.base import Workload
from ...workloads.models.classification import classification, initialize_convolutions
from ...workloads.models.resnet import Bottleneck


class GroupedBottleneck(Bottleneck):
    """1x1x1, grouped 3x3x3, 1x1x1 convolutions with a shortcut around them."""

    expansion = 2
    convolution = nn.Conv3d
    norm = nn.BatchNorm3d
    shortcut_name = "shortcut"


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
                stages.append(GroupedBottleneck(channels, inner, 2 if number > 0 and block == 0 else 1, groups))
                channels = inner * GroupedBottleneck.expansion
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

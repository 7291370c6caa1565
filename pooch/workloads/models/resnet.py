"""ResNets of any depth in plain PyTorch: bottleneck blocks of "version 1.5" (the stride sits in the 3x3 convolution).

Defined here so that the most common convolutional network needs no extra package. ReLUs are in-place, as in
torchvision.
"""

from __future__ import annotations

import torch
from torch import nn

from ...ground.errors import UsageError
from ..base import Workload
from .classification import classification, initialize_convolutions

_PUBLISHED_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
_SMALLEST_DEPTH = 26


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with a shortcut around them.

    Attributes:
        expansion: channels behind it, in multiples of those inside.
        convolution: over two or three axes.
        norm: the batch norm that goes with it.
        shortcut_name: of the module that changes the shape on the way around.
    """

    expansion = 4
    convolution: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d
    norm: type[nn.BatchNorm2d | nn.BatchNorm3d] = nn.BatchNorm2d
    shortcut_name = "downsample"

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int = 1) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.conv1 = self.convolution(channels_in, channels, 1, bias=False)
        self.bn1 = self.norm(channels)
        self.conv2 = self.convolution(channels, channels, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn2 = self.norm(channels)
        self.conv3 = self.convolution(channels, channels_out, 1, bias=False)
        self.bn3 = self.norm(channels_out)
        self.relu = nn.ReLU(inplace=True)
        around: nn.Module | None = None
        if stride != 1 or channels_in != channels_out:
            changing = self.convolution(channels_in, channels_out, 1, stride=stride, bias=False)
            around = nn.Sequential(changing, self.norm(channels_out))
        self.add_module(self.shortcut_name, around)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply three convolutions, then add the shortcut."""
        hidden = self.relu(self.bn1(self.conv1(inputs)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        around = getattr(self, self.shortcut_name)
        hidden += inputs if around is None else around(inputs)
        output: torch.Tensor = self.relu(hidden)
        return output


def blocks_of(depth: int) -> tuple[int, int, int, int]:
    """Bottleneck blocks per stage of a ResNet (three convolutions per block, the stem, the classifier).

    Depths up to 200 are as published for ImageNet. No publication gives the stages of ImageNet ResNets with 1001 or
    2000 layers (ResNet-1001 of He et al. is for images of 32 pixels and has three stages). Both depths are 3 n + 2, so
    their stages follow from ResNet-200 as those of ResNet-200 from ResNet-152: only the two middle stages grow, in the
    proportion 2 to 3 of ResNet-200, which gives 3/131/196/3 and 3/264/396/3.

    Raises:
        UsageError: no bottleneck ResNet has that depth.
    """
    if depth in _PUBLISHED_BLOCKS:
        return _PUBLISHED_BLOCKS[depth]
    if depth < _SMALLEST_DEPTH or depth % 3 != 2:
        near = max(_SMALLEST_DEPTH, depth - (depth - 2) % 3)
        raise UsageError(f"there is no ResNet of depth {depth}: it must be 3 n + 2, such as {near}")
    middle = (depth - 2) // 3 - 6
    second = round(middle * 2 / 5)
    return 3, second, middle - second, 3


class ResNet(nn.Module):
    """Stem, four stages of bottlenecks, average pooling, classifier.

    Args:
        blocks: bottlenecks per stage.
        classes: number of classes.
        width: channels of the stem; 64 as published.
    """

    def __init__(self, blocks: tuple[int, int, int, int], classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._stage(width, width, blocks[0], stride=1)
        self.layer2 = self._stage(4 * width, 2 * width, blocks[1], stride=2)
        self.layer3 = self._stage(8 * width, 4 * width, blocks[2], stride=2)
        self.layer4 = self._stage(16 * width, 8 * width, blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width * Bottleneck.expansion, classes)
        initialize_convolutions(self)

    @staticmethod
    def _stage(channels_in: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(channels_in, channels, stride)
        rest = [Bottleneck(channels * Bottleneck.expansion, channels, 1) for _ in range(blocks - 1)]
        return nn.Sequential(first, *rest)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            hidden = stage(hidden)
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return logits


def build(
    batch_size: int = 16,
    device: str = "cpu",
    depth: int = 50,
    image_size: int = 224,
    classes: int = 1000,
    width: int = 64,
    seed: int = 0,
) -> Workload:
    """A ResNet with random weights on random images; cross entropy; SGD with momentum."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = ResNet(blocks_of(depth), classes, width)
    name = f"resnet{depth}" if depth in _PUBLISHED_BLOCKS else "resnet"
    return classification(name, model, (batch_size, 3, image_size, image_size), classes, device, seed)

"""3D U-Nets for the segmentation of medical volumes.

There are two: the residual U-Net of the MONAI package, which halves the resolution in its first layer, and the original
one (Cicek et al. 2016) as the swapping papers train it: full resolution at the top, pooling, nearest-neighbor
upsampling. The activations of their long skip connections are the largest, and the program holds them during the
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from monai.losses import DiceCELoss, DiceLoss
from monai.networks.nets import UNet
from torch import nn

from ...ground.errors import UsageError
from ..base import Workload

_STRIDES = (2, 2, 2, 2)
_DEPTH = 4


def _convolutions(channels_in: int, between: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels_in, between, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv3d(between, channels_out, 3, padding=1), nn.ReLU(inplace=True),
    )  # fmt: skip


class OriginalUNet3d(nn.Module):
    """Four levels of two convolutions; channels double on the way down, skips are concatenated on the way up.

    As published, the first convolution has 32 channels.
    """

    def __init__(self, channels_in: int, channels_out: int, first_channels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        for level in range(_DEPTH):
            inner = first_channels * 2**level
            self.down.append(_convolutions(channels_in, inner, 2 * inner))
            channels_in = 2 * inner
        for level in reversed(range(_DEPTH - 1)):
            outer = first_channels * 2 ** (level + 1)
            self.up.append(_convolutions(channels_in + outer, outer, outer))
            channels_in = outer
        self.pool = nn.MaxPool3d(2)
        self.upsample = nn.Upsample(scale_factor=2)
        self.last = nn.Conv3d(channels_in, channels_out, 1)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        """Volumes (N, channels_in, D, H, W) to logits (N, channels_out, D, H, W)."""
        hidden, skips = volumes, []
        for level, block in enumerate(self.down):
            hidden = block(hidden if level == 0 else self.pool(hidden))
            skips.append(hidden)
        skips.pop()
        for block in self.up:
            hidden = block(torch.cat([self.upsample(hidden), skips.pop()], dim=1))
        logits: torch.Tensor = self.last(hidden)
        return logits


def build(
    batch_size: int = 2,
    device: str = "cpu",
    volume_size: int = 96,
    input_channels: int = 4,
    classes: int = 3,
    first_channels: int = 16,
    residual_units: int = 2,
    dropout: float = 0.1,
    network: str = "residual",
    seed: int = 0,
) -> Workload:
    """A 3D U-Net with random weights on cubic random volumes; Adam.

    The network is "residual" (MONAI's, with exclusive classes: softmax, Dice and cross entropy) or "original" (with
    classes that may overlap, as in brain tumors: sigmoid, Dice), which has neither residual units nor dropout.

    Raises:
        UsageError: there is no such network.
    """
    if network not in ("residual", "original"):
        raise UsageError(f"there is no U-Net {network!r}: choose network=residual or network=original")
    torch.manual_seed(seed)
    with torch.device(device):
        model: nn.Module = (
            OriginalUNet3d(input_channels, classes, first_channels)
            if network == "original"
            else UNet(
                spatial_dims=3,
                in_channels=input_channels,
                out_channels=classes,
                channels=tuple(first_channels * 2**level for level in range(len(_STRIDES) + 1)),
                strides=_STRIDES,
                num_res_units=residual_units,
                dropout=dropout,
            )
        )
    criterion: Callable[..., torch.Tensor] = (
        DiceLoss(sigmoid=True) if network == "original" else DiceCELoss(to_onehot_y=True, softmax=True)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(seed)
    extent = (volume_size,) * 3
    volumes = torch.randn(batch_size, input_channels, *extent, generator=generator).to(device)
    highest, channels = (2, classes) if network == "original" else (classes, 1)
    labels = torch.randint(highest, (batch_size, channels, *extent), generator=generator).to(device)
    if network == "original":
        labels = labels.to(torch.float32)

    def forward() -> torch.Tensor:
        return criterion(model(volumes), labels)

    return Workload(model, forward, optimizer, "unet3d", batch_size)

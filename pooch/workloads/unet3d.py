"""The 3D U-Net of the MONAI package, the usual network for the segmentation of medical volumes.

Its long skip connections are the largest activations, and the program itself holds them through the forward pass.
"""

from __future__ import annotations

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet

from pooch.workloads.base import Workload

_STRIDES = (2, 2, 2, 2)


def build(
    batch_size: int = 2,
    device: str = "cpu",
    volume_size: int = 96,
    input_channels: int = 4,
    classes: int = 3,
    first_channels: int = 16,
    residual_units: int = 2,
    dropout: float = 0.1,
    seed: int = 0,
) -> Workload:
    """A residual 3D U-Net with random weights on random volumes; Dice plus cross entropy; Adam."""
    torch.manual_seed(seed)
    model = UNet(
        spatial_dims=3,
        in_channels=input_channels,
        out_channels=classes,
        channels=tuple(first_channels * 2**level for level in range(len(_STRIDES) + 1)),
        strides=_STRIDES,
        num_res_units=residual_units,
        dropout=dropout,
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    generator = torch.Generator().manual_seed(seed)
    extent = (volume_size,) * 3
    volumes = torch.randn(batch_size, input_channels, *extent, generator=generator).to(device)
    labels = torch.randint(classes, (batch_size, 1, *extent), generator=generator).to(device)

    def forward() -> torch.Tensor:
        loss: torch.Tensor = criterion(model(volumes), labels)
        return loss

    return Workload(model, forward, optimizer, "unet3d", batch_size)

"""TFLMS (Le et al. 2018): the largest batch in 16 GB, and its throughput."""

from __future__ import annotations

from collections.abc import Mapping

from ...workloads import Setting
from ..rows import Claim, Experiment, Row
from .hardware import OF_16_GB, V100_NVLINK

_METHODS = ("tflms", "tflms_auto", "ilp")


def _unet(key: str, title: str, size: int, settings: Mapping[str, Setting], *, quick: bool = False) -> Row:
    return Row(
        key, f"{title}, {size}^3, {V100_NVLINK}", "largest", "unet3d", _METHODS, OF_16_GB, V100_NVLINK,
        settings={"volume_size": size, **settings}, quick=quick,
    )  # fmt: skip


_RESNET_OBSTACLE = (
    "the gradients of the first stage's batch norms and convolutions hold two maps of 256 x 56 x 56 and read a third, "
    "in addition to the image: a seventh of what an image takes in-core, which no decision on activations changes"
)
_UNET_OBSTACLE = (
    "the gradient of the convolution over the concatenated skip reads and writes all of it (three times the maps of "
    "the first level, at full resolution), and no decision on activations makes a single operator smaller"
)

_ORIGINAL: dict[str, Setting] = {"network": "original", "input_channels": 4, "classes": 3}

TFLMS = Experiment(
    name="tflms",
    title="TFLMS: the largest batch by swapping (Le et al. 2018)",
    about=(
        "The largest batch that fits in 16 GB (15 GiB of them for a step) relative to the largest in-core batch, and "
        "the throughput of the one relative to that of the other, on a V100 with NVLink to the host (60 GB/s), the "
        "paper's machine. The text that we have does not give the channels of the paper's 3D U-Net. We try the "
        "published network (Cicek et al. 2016, which begins with 32 channels), the same network with 16 and with 8, "
        "and MONAI's residual network, which halves the volume in its first layer."
    ),
    rows=(
        Row(
            "resnet50-batch", f"ResNet-50, {V100_NVLINK}", "largest", "resnet50", _METHODS, OF_16_GB, V100_NVLINK,
            start=100, quick=True,
        ),
        _unet("unet3d-144-batch", "3D U-Net (original, 32 channels)", 144, {**_ORIGINAL, "first_channels": 32}),
        _unet(
            "unet3d-192-batch", "3D U-Net (original, 32 channels)", 192, {**_ORIGINAL, "first_channels": 32},
            quick=True,
        ),
        _unet("unet3d-16-192-batch", "3D U-Net (original, 16 channels)", 192, {**_ORIGINAL, "first_channels": 16}),
        _unet("unet3d-8-192-batch", "3D U-Net (original, 8 channels)", 192, {**_ORIGINAL, "first_channels": 8}),
        _unet("unet3d-residual-192-batch", "3D U-Net (residual)", 192, {}),
    ),
    measured=(
        Row(
            "resnet50-batch-here", "ResNet-50, a quarter as wide, images 64x64, 96 MiB", "largest", "resnet50",
            ("tflms", "ilp"), "96MiB", settings={"image_size": 64, "width": 16, "classes": 100}, start=16, quick=True,
        ),
    ),
    claims=(
        Claim("resnet50-batch", "multiple", 8.0, throughput=0.6, obstacle=_RESNET_OBSTACLE),
        Claim("unet3d-192-batch", "largest", 4, obstacle=_UNET_OBSTACLE),
        Claim("unet3d-16-192-batch", "largest", 4, obstacle=_UNET_OBSTACLE),
        Claim("unet3d-8-192-batch", "largest", 4),
        Claim("unet3d-residual-192-batch", "largest", 4),
    ),
)  # fmt: skip

"""TFLMS (Le et al. 2018): the largest batch in 16 GB, and its throughput."""

from __future__ import annotations

from collections.abc import Mapping

from ...workloads import Setting
from ..rows import Claim, Experiment, Row
from .hardware import OF_16_GB, P100_NVLINK

_METHODS = ("tflms", "tflms_auto", "ilp")


def _unet(key: str, title: str, size: int, settings: Mapping[str, Setting], *, quick: bool = False) -> Row:
    return Row(
        key, f"{title}, {size}^3, {P100_NVLINK}", "largest", "unet3d", _METHODS, OF_16_GB, P100_NVLINK,
        settings={"volume_size": size, **settings}, quick=quick,
    )  # fmt: skip


_RESNET_OBSTACLE = (
    "the gradients of the first stage's batch norms and convolutions hold two maps of 256 x 56 x 56 and read a third, "
    "in addition to the image: a seventh of what an image takes in-core, which no decision on activations changes"
)
_ORIGINAL: dict[str, Setting] = {"network": "original", "input_channels": 4, "classes": 3}

TFLMS = Experiment(
    name="tflms",
    title="TFLMS: the largest batch by swapping (Le et al. 2018)",
    about=(
        "The largest batch that fits in 16 GB (15 GiB of them for a step) relative to the largest in-core batch, and "
        "the throughput of the one relative to that of the other, on the paper's machine: a P100 in a POWER8, whose "
        "two NVLinks carry 40 GB/s each way, 80 both ways. The text that we have does not describe the paper's 3D "
        "U-Net. Its in-core point is a volume of 144^3 at batch 1, and it trains twice that batch. The published "
        "network (Cicek et al. 2016, which begins with 32 channels) has that in-core point and that multiple. The "
        "paper also trains volumes of 192^3 at batch 4. On one GPU that is 9.5 times the voxels of the in-core point, "
        "which does not go with twice the batch; shared by four GPUs it is one volume each, 2.4 times the voxels. "
        "Which one it was cannot be known from the abstract. A network half as wide is shown beside it."
    ),
    rows=(
        Row(
            "resnet50-batch", f"ResNet-50, {P100_NVLINK}", "largest", "resnet50", _METHODS, OF_16_GB, P100_NVLINK,
            start=100, quick=True,
        ),
        _unet("unet3d-144-batch", "3D U-Net (original, 32 channels)", 144, {**_ORIGINAL, "first_channels": 32}),
        _unet(
            "unet3d-192-batch", "3D U-Net (original, 32 channels)", 192, {**_ORIGINAL, "first_channels": 32},
            quick=True,
        ),
        _unet("unet3d-16-192-batch", "3D U-Net (original, 16 channels)", 192, {**_ORIGINAL, "first_channels": 16}),
    ),
    measured=(
        Row(
            "resnet50-batch-here", "ResNet-50, a quarter as wide, images 64x64, 96 MiB", "largest", "resnet50",
            ("tflms", "ilp"), "96MiB", settings={"image_size": 64, "width": 16, "classes": 100}, start=16, quick=True,
        ),
    ),
    claims=(
        Claim("resnet50-batch", "multiple", 8.0, throughput=0.6, obstacle=_RESNET_OBSTACLE),
        Claim("unet3d-144-batch", "multiple", 2.0),
        Claim("unet3d-192-batch", "largest", 1),
    ),
)  # fmt: skip

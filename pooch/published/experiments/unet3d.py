"""3D U-Net without patches (Imai et al. 2018/19): tuned swap parameters, and swaps within the forward pass."""

from __future__ import annotations

from collections.abc import Mapping

from ...workloads import Setting
from ..methods import WITHIN_BACKWARD
from ..rows import Course, Experiment, Row, Saving
from .hardware import OF_16_GB, V100_NVLINK, V100_PCIE

_METHODS = ("tflms", "tflms_auto", "tflms_tuned", WITHIN_BACKWARD, "ilp")

_VOLUMES, _EPOCHS, _PATCHES = 285, 300, 8


def _original(channels: int) -> Mapping[str, Setting]:
    return {"network": "original", "volume_size": 192, "first_channels": channels}


def _row(key: str, title: str, batch: int, settings: Mapping[str, Setting], hardware: str) -> Row:
    return Row(
        key, f"3D U-Net ({title}), 192^3, batch {batch}, {hardware}", "slowdown", "unet3d", _METHODS, OF_16_GB,
        hardware, batch, settings, quick=key == "unet3d-192-residual-16",
    )  # fmt: skip


def _rows(key: str, hardware: str) -> tuple[Row, ...]:
    return (
        *(
            _row(f"unet3d-192-residual-{batch}{key}", "residual", batch, {"volume_size": 192}, hardware)
            for batch in (16, 28)
        ),
        _row(f"unet3d-192-32-1{key}", "original, 32 channels", 1, _original(32), hardware),
        _row(f"unet3d-192-16-2{key}", "original, 16 channels", 2, _original(16), hardware),
        _row(f"unet3d-192-8-4{key}", "original, 8 channels", 4, _original(8), hardware),
    )


UNET3D = Experiment(
    name="unet3d",
    title="3D U-Net without patches: tuned swaps (Imai et al. 2018/19)",
    about=(
        "Volumes of 192^3. `tflms` swaps as few tensors as possible, one level ahead. `tflms_auto` finds its "
        "parameters in a simulation that ignores times. `tflms_tuned` sweeps the number of tensors (the analysis path "
        "alone among them), the levels ahead and how they are counted, and swaps between two reads of the forward "
        "pass, and takes the combination that is fastest in the simulator; the paper does so on its machine. The "
        "paper's figure is the share of the communication overhead that tuning removed; it is not given where `tflms` "
        "loses less than 1%, since there is nothing to save. Not all of these networks lose anything over NVLink: the "
        "residual one at batches far beyond the in-core one (7) does. `ilp_backward_only` keeps whatever the forward "
        "pass still holds; `ilp` may empty and refill it, as it does with the long skips. The hours are those of "
        f"{_VOLUMES} volumes and {_EPOCHS} epochs, which are assumed and do not change the ratio. A volume of 192^3 is "
        f"one step, or {_PATCHES} steps with patches of 128^3 that cover it, in-core; how many patches of a volume the "
        "paper trains on is not in the abstract, and its ratio needs about twelve."
    ),
    rows=(
        *_rows("", V100_NVLINK),
        *_rows("-pcie", V100_PCIE),
        Row(
            "unet3d-128-patch", f"3D U-Net (original, 32 channels), patch of 128^3, {V100_NVLINK}", "slowdown",
            "unet3d", ("ilp",), OF_16_GB, V100_NVLINK, 1, {**_original(32), "volume_size": 128},
        ),
    ),
    measured=(
        Row(
            "unet3d-here", "3D U-Net (original, 8 channels), 64^3, batch 2, 80% of its memory", "slowdown", "unet3d",
            _METHODS,
            "80%", batch_size=2, settings={"network": "original", "volume_size": 64, "first_channels": 8}, quick=True,
        ),
    ),
    saving=Saving("tflms", "tflms_tuned", "overhead"),
    courses=(
        Course("patches of 128^3", "unet3d-128-patch", _VOLUMES * _EPOCHS * _PATCHES, 164.0, "abstract"),
        Course("whole volumes of 192^3", "unet3d-192-32-1", _VOLUMES * _EPOCHS, 47.0, "abstract"),
    ),
)  # fmt: skip

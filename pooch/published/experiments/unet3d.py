"""3D U-Net without patches (Imai et al. 2018/19): tuned swap parameters, and swaps within the forward pass."""

from __future__ import annotations

from ..methods import WITHIN_BACKWARD
from ..rows import Experiment, Row, Saving
from .hardware import OF_16_GB, V100_NVLINK, V100_PCIE

_METHODS = ("tflms", "tflms_auto", "tflms_tuned", WITHIN_BACKWARD, "ilp")

UNET3D = Experiment(
    name="unet3d",
    title="3D U-Net without patches: tuned swaps (Imai et al. 2018/19)",
    about=(
        "Volumes of 192^3. `tflms` swaps as few tensors as possible, one level ahead. `tflms_auto` finds its "
        "parameters in a simulation that ignores times. `tflms_tuned` sweeps the number of tensors and of levels ahead "
        "and takes the combination that is fastest in the simulator; the paper does so on its machine. The paper's "
        "figure is the share of the communication overhead that tuning removed. `ilp_backward_only` keeps whatever the "
        "forward pass still holds; `ilp` may empty and refill it, as it does with the long skips."
    ),
    rows=tuple(
        Row(
            f"unet3d-192-{channels}-{batch}{key}",
            f"3D U-Net (original, {channels} channels), 192^3, batch {batch}, {hardware}",
            "slowdown", "unet3d", _METHODS, OF_16_GB, hardware, batch,
            {"network": "original", "volume_size": 192, "first_channels": channels}, quick=channels == 32,
        )
        for channels, batch in ((32, 1), (16, 2), (8, 4))
        for key, hardware in (("", V100_NVLINK), ("-pcie", V100_PCIE))
    ),
    measured=(
        Row(
            "unet3d-here", "3D U-Net (original, 8 channels), 64^3, batch 2, 80% of its memory", "slowdown", "unet3d",
            _METHODS,
            "80%", batch_size=2, settings={"network": "original", "volume_size": 64, "first_channels": 8}, quick=True,
        ),
    ),
    saving=Saving("tflms", "tflms_tuned", "overhead"),
)  # fmt: skip

"""Every policy there is on networks of the papers: methods whose own experiments are not reproduced, too."""

from __future__ import annotations

from ...planner import policy_names
from ..rows import Experiment, Row
from .hardware import OF_16_GB, V100_NVLINK, V100_PCIE

_METHODS = tuple(name for name in policy_names() if name != "keep_all")

POLICIES = Experiment(
    name="policies",
    title="Every policy, on networks of the papers",
    about=(
        "The networks are those of the experiments above, each far larger than the 15 GiB that a step may use; the "
        "policies are all that there are. A method may have been made for something else: for a fast link, or for "
        "networks of another kind."
    ),
    rows=(
        *(
            Row(
                f"resnet50-640-{key}", f"ResNet-50, batch 640, {hardware}", "slowdown", "resnet50", _METHODS, OF_16_GB,
                hardware, 640, quick=key == "nvlink",
            )
            for key, hardware in (("nvlink", V100_NVLINK), ("pcie", V100_PCIE))
        ),
        Row(
            "unet3d-192-residual-16-pcie", f"3D U-Net (residual), 192^3, batch 16, {V100_PCIE}", "slowdown", "unet3d",
            _METHODS, OF_16_GB, V100_PCIE, 16, {"volume_size": 192},
        ),
    ),
    measured=(),
)  # fmt: skip

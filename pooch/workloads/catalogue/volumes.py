"""Networks for volumes and clips: sizes of the PoocH paper, of TFLMS (Le et al. 2018) and of Imai et al. 2018/19."""

from __future__ import annotations

from ..registry import BATCH_SIZE, BuiltIn, Growth, Preset, small
from ..settings import Setting

_MODELS = __package__.replace("catalogue", "models")
_BRAIN: dict[str, Setting] = {"network": "original", "first_channels": 32, "input_channels": 4, "classes": 3}

VOLUMES = (
    BuiltIn(
        "unet3d",
        "3D U-Net for volumes 96x96x96, Adam",
        f"{_MODELS}.unet3d",
        "monai",
        source="residual: MONAI; network=original: Cicek et al. 2016",
        growths=(BATCH_SIZE, Growth("volume_size", step=16, smallest=32)),
        presets=(
            small(batch_size=4, volume_size=32, first_channels=4, residual_units=1),
            Preset(
                "small-original",
                {"batch_size": 1, "volume_size": 32, "network": "original", "first_channels": 8},
                "for tests",
            ),
            Preset("tflms-144", {"batch_size": 1, "volume_size": 144, **_BRAIN}, "Le et al. 2018: in-core"),
            Preset("tflms-192", {"batch_size": 1, "volume_size": 192, **_BRAIN}, "Le et al. 2018; Imai et al."),
            Preset("residual-144", {"batch_size": 1, "volume_size": 144}, "the same volumes, MONAI's network"),
            Preset("residual-192", {"batch_size": 4, "volume_size": 192}, "the same volumes, MONAI's network"),
        ),
    ),
)

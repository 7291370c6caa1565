"""Networks for volumes and clips: sizes of the PoocH paper, of TFLMS (Le et al. 2018) and of Imai et al. 2018/19."""

from __future__ import annotations

from pooch.workloads.registry import BATCH_SIZE, SMALL, BuiltIn, Growth, Preset
from pooch.workloads.settings import Setting

_MODELS = "pooch.workloads.models"
_BRAIN: dict[str, Setting] = {"network": "original", "first_channels": 32, "input_channels": 4, "classes": 3}
_CLIP = "PoocH paper, batch 1"

VOLUMES = (
    BuiltIn(
        "unet3d",
        "3D U-Net for volumes 96x96x96, Adam",
        f"{_MODELS}.unet3d",
        "monai",
        source="residual: MONAI; network=original: Cicek et al. 2016",
        growths=(BATCH_SIZE, Growth("volume_size", step=16, smallest=32)),
        presets=(
            Preset(SMALL, {"batch_size": 4, "volume_size": 32, "first_channels": 4, "residual_units": 1}, "for tests"),
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
    BuiltIn(
        "resnext101_3d",
        "ResNeXt101-3D of the PoocH paper, clips of 128 images 224x224, SGD with momentum",
        f"{_MODELS}.resnext3d",
        source="Hara et al. 2018, blocks 3/24/36/3",
        growths=(
            BATCH_SIZE,
            Growth("frames", step=16, smallest=16),
            Growth("height", step=32, smallest=32),
            Growth("width", step=32, smallest=32),
        ),
        presets=(
            Preset(
                SMALL,
                {
                    "batch_size": 2,
                    "frames": 16,
                    "height": 64,
                    "width": 64,
                    "blocks": "1-2-2-1",
                    "groups": 2,
                    "inner_channels": 8,
                    "classes": 10,
                },
                "for tests",
            ),
            Preset("224x224x128", {"batch_size": 1}, f"{_CLIP}: fits in-core"),
            Preset("224x224x256", {"batch_size": 1, "frames": 256}, _CLIP),
            Preset("448x224x128", {"batch_size": 1, "height": 448}, _CLIP),
            Preset("448x224x256", {"batch_size": 1, "height": 448, "frames": 256}, _CLIP),
        ),
    ),
)

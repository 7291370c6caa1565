"""Workloads that only the published experiments need, with their published sizes. Does not import torch."""

from __future__ import annotations

from ..workloads.registry import BATCH_SIZE, SMALL, BuiltIn, Growth, Preset

_MODELS = f"{__package__}.models"
_PIXELS = Growth("image_size", step=32, smallest=32)
_LENGTH = Growth("sequence_length")
_LAYERS = Growth("layers")
_CLIP = "PoocH paper, batch 1"


def _meng_nmt(length: int, batch_size: int, stock: int) -> Preset:
    settings = {"batch_size": batch_size, "sequence_length": length, "width": 1024, "vocabulary": 10000}
    note = f"Meng et al. 2017: largest batch in 12 GB (stock: {stock}); width and vocabulary assumed"
    return Preset(f"meng-{length}", settings, note)


WORKLOADS = (
    BuiltIn(
        "alexnet",
        "AlexNet with local response normalization, images 227x227, SGD with momentum",
        f"{_MODELS}.alexnet",
        source="Krizhevsky et al. 2012, in one column",
        growths=(BATCH_SIZE, Growth("image_size", smallest=67)),
        presets=(
            Preset(SMALL, {"batch_size": 32, "image_size": 99, "classes": 10, "scale": 0.0625}, "for tests"),
            Preset("pooch", {"batch_size": 2688}, "PoocH paper: the largest batch of its grid 2304, 2432, 2560, 2688"),
        ),
    ),
    BuiltIn(
        "googlenet",
        "GoogLeNet with batch norm, images 224x224, SGD with momentum",
        f"{_MODELS}.googlenet",
        source="Ioffe and Szegedy 2015, sizes of Chainer's example",
        growths=(BATCH_SIZE, _PIXELS),
        presets=(
            Preset(SMALL, {"batch_size": 8, "image_size": 64, "classes": 10, "scale": 0.125}, "for tests"),
            Preset("pooch", {"batch_size": 896}, "PoocH paper: the largest batch of its grid 256, 384, ..., 896"),
        ),
    ),
    BuiltIn(
        "inception_v3",
        "Inception-V3, images 299x299, SGD with momentum",
        f"{_MODELS}.inception_v3",
        source="Szegedy et al. 2016",
        growths=(BATCH_SIZE, Growth("image_size", smallest=299)),
        presets=(
            Preset(
                SMALL,
                {"batch_size": 8, "image_size": 107, "classes": 10, "scale": 0.0625, "auxiliary": False},
                "for tests",
            ),
            Preset("meng", {"batch_size": 548}, "Meng et al. 2017: largest batch in 12 GB (stock: 208)"),
        ),
    ),
    BuiltIn(
        "gan",
        "DCGAN, images 64x64, generator and discriminator in one step, Adam",
        f"{_MODELS}.gan",
        source="Radford et al. 2016",
        growths=(BATCH_SIZE,),
        presets=(
            Preset(SMALL, {"batch_size": 16, "image_size": 32, "width": 8, "noise_size": 16}, "for tests"),
            Preset("published", {"batch_size": 128}, "Radford et al. 2016"),
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
    BuiltIn(
        "nmt",
        "sequence to sequence with additive attention, Adam",
        f"{_MODELS}.nmt",
        source="Bahdanau et al. 2015",
        growths=(BATCH_SIZE, _LENGTH, _LAYERS),
        presets=(
            Preset(
                SMALL,
                {"batch_size": 128, "sequence_length": 12, "vocabulary": 50, "width": 32, "layers": 1},
                "for tests",
            ),
            _meng_nmt(50, 1100, 350),
            _meng_nmt(100, 550, 90),
            _meng_nmt(200, 230, 20),
            _meng_nmt(400, 60, 2),
        ),
    ),
    BuiltIn(
        "char_rnn",
        "LSTM over characters, unrolled, Adam",
        f"{_MODELS}.char_rnn",
        source="Karpathy 2015",
        growths=(BATCH_SIZE, _LENGTH, _LAYERS),
        presets=(
            Preset(
                SMALL,
                {"batch_size": 128, "sequence_length": 10, "characters": 32, "width": 32, "layers": 2},
                "for tests",
            ),
            Preset(
                "long",
                {"batch_size": 50, "sequence_length": 500},
                "long text, for swapping inside a while loop",
            ),
        ),
    ),
)

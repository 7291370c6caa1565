"""Image classifiers and the GAN: sizes of the PoocH paper (Ito et al. 2019) and of Meng et al. 2017."""

from __future__ import annotations

from ..registry import BATCH_SIZE, SMALL, BuiltIn, Growth, Preset, small

_MODELS = __package__.replace("catalogue", "models")
_RESNET = f"{_MODELS}.resnet"
_HE = "He et al. 2016"
_PIXELS = Growth("image_size", step=32, smallest=32)
_SMALL_RESNET = small(batch_size=16, image_size=64, classes=10, width=8)


def _meng(batch_size: int, note: str) -> Preset:
    return Preset("meng", {"batch_size": batch_size}, f"Meng et al. 2017: {note}")


IMAGES = (
    BuiltIn(
        "resnet50",
        "ResNet-50, images 224x224, SGD with momentum",
        _RESNET,
        source=_HE,
        growths=(BATCH_SIZE, _PIXELS),
        presets=(
            _SMALL_RESNET,
            Preset("pooch", {"batch_size": 640}, "PoocH paper: the largest batch of its grid 128, 256, 384, 512, 640"),
            _meng(664, "largest batch in 12 GB (stock: 144)"),
        ),
    ),
    BuiltIn(
        "resnet101",
        "ResNet-101, images 224x224, SGD with momentum",
        _RESNET,
        source=_HE,
        defaults={"depth": 101},
        growths=(BATCH_SIZE, _PIXELS),
        presets=(_SMALL_RESNET, _meng(32, "peak at batch 32")),
    ),
    BuiltIn(
        "resnet200",
        "ResNet-200, images 224x224, SGD with momentum",
        _RESNET,
        source=_HE,
        defaults={"depth": 200},
        growths=(BATCH_SIZE, _PIXELS),
        presets=(_SMALL_RESNET, _meng(32, "peak at batch 32")),
    ),
    BuiltIn(
        "resnet",
        "ResNet of any depth 3 n + 2 (--set depth=1001), images 224x224, SGD with momentum",
        _RESNET,
        source=_HE,
        growths=(BATCH_SIZE, _PIXELS, Growth("depth", step=3, smallest=26)),
        presets=(
            Preset(SMALL, {**_SMALL_RESNET.settings, "depth": 26}, "for tests"),
            Preset("meng-1001", {"batch_size": 32, "depth": 1001}, "Meng et al. 2017: peak at batch 32"),
            Preset("meng-2000", {"batch_size": 32, "depth": 2000}, "Meng et al. 2017: peak at batch 32"),
        ),
    ),
    BuiltIn(
        "vit",
        "Vision transformer ViT-B/16, images 224x224, AdamW",
        f"{_MODELS}.vit",
        "transformers",
        source="Dosovitskiy et al. 2021",
        growths=(BATCH_SIZE, Growth("image_size", step=16, smallest=16), Growth("layers")),
        presets=(
            small(batch_size=4, image_size=64, patch_size=8, layers=3, width=64, inner_width=256, heads=4, classes=10),
            Preset(
                "large",
                {"batch_size": 32, "layers": 24, "width": 1024, "inner_width": 4096, "heads": 16},
                "Dosovitskiy et al. 2021: ViT-L/16",
            ),
        ),
    ),
)

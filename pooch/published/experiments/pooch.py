"""PoocH (Ito et al. 2019): slowdown compared with in-core training, by network, size and link."""

from __future__ import annotations

from collections.abc import Iterator

from ..rows import Claim, Experiment, Row
from .hardware import OF_16_GB, V100_NVLINK, V100_PCIE

_METHODS = (
    "keep_all", "recompute_all", "swap_all_no_scheduling", "swap_all", "swap_opt", "superneurons", "pooch_2018",
    "pooch_exhaustive", "ilp",
)  # fmt: skip
_MEASURED = ("swap_all_no_scheduling", "swap_all", "superneurons", "pooch_2018", "pooch_exhaustive", "ilp")
_LINKS = (("nvlink", V100_NVLINK), ("pcie", V100_PCIE))


def _images(key: str, title: str, workload: str, batches: range, quick: int) -> Iterator[Row]:
    for batch in batches:
        for link, hardware in _LINKS:
            yield Row(
                f"{key}-{batch}-{link}", f"{title}, batch {batch}, {hardware}", "slowdown", workload, _METHODS,
                OF_16_GB, hardware, batch, quick=batch == quick,
            )  # fmt: skip


def _clips() -> Iterator[Row]:
    for size in ("224x224x128", "224x224x256", "448x224x128", "448x224x256"):
        for link, hardware in _LINKS:
            yield Row(
                f"resnext101-3d-{size}-{link}", f"ResNeXt101-3D, {size}, {hardware}", "slowdown",
                f"resnext101_3d@{size}", _METHODS, OF_16_GB, hardware,
            )  # fmt: skip


POOCH = Experiment(
    name="pooch",
    title="PoocH: slowdown out of core (Ito et al. 2019)",
    about=(
        "Time of a forward and backward pass without the optimizer's step, relative to the same pass with unlimited "
        "memory, in single precision. Networks and sizes are those of the authors' experiments (read in their code). "
        "The two figures of the paper are for a network that needs 50 GB; ResNet-50 at batch 640 needs about as "
        "much. The GPU is a V100 with 16 GB, of which a step may use 15 GiB, with the host link of an x86 machine "
        "(12 GB/s) or of a POWER9 machine (60 GB/s). AlexNet's normalization is one operator, as in the authors' "
        "framework, and saves its input alone. Slowdowns measured here are medians over turns of a plain and a planned "
        "step."
    ),
    rows=(
        *_images("resnet50", "ResNet-50", "resnet50", range(640, 127, -128), 640),
        *_images("alexnet", "AlexNet", "alexnet", range(2688, 2303, -128), 2688),
        *_images("googlenet", "GoogLeNet-BN", "googlenet", range(896, 255, -128), 896),
        *_clips(),
    ),
    measured=(
        Row(
            "resnet50-here", "ResNet-50, batch 8, 50% of its memory", "slowdown", "resnet50", _MEASURED, "50%",
            batch_size=8, quick=True,
        ),
    ),
    claims=(
        Claim("resnet50-640-nvlink", "slowdown", 0.08),
        Claim("resnet50-640-pcie", "slowdown", 0.15),
    ),
)  # fmt: skip

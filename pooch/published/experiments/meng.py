"""Training deeper models (Meng et al. 2017): largest batches on an M40, and peaks of deep ResNets."""

from __future__ import annotations

from ..papers import published_figures
from ..rows import Claim, Experiment, Row
from .hardware import M40, OF_12_GB

_METHODS = ("meng_lifetime", "ilp")


def _largest(key: str, title: str, workload: str, start: int, *, quick: bool = False, **settings: int) -> Row:
    return Row(
        key, f"{title}, {M40}", "largest", workload, _METHODS, OF_12_GB, M40, settings=settings, start=start,
        quick=quick,
    )  # fmt: skip


def _at_their_peak(key: str, title: str, workload: str, peak_mb: int) -> Row:
    return Row(
        f"{key}-peak", f"{title}, batch 32, {peak_mb} MB, {M40}", "slowdown", workload, _METHODS, f"{peak_mb}MB", M40,
        32,
    )  # fmt: skip


_TOKENS = (
    "again the loss over the vocabulary: 92,000 words fit regardless of length, so fewer of the longer sentences do; "
    "the batch itself is larger than the paper's"
)
_OBSTACLES = {
    "lstm-1": (
        "the loss: log-softmax over the vocabulary and its gradient are single operators that hold three times the "
        "logits, 3.5 GiB each; the paper does not give the size of its vocabulary"
    ),
    "nmt-100": _TOKENS,
    "nmt-200": _TOKENS,
    "nmt-400": _TOKENS,
}


def _claims() -> tuple[Claim, ...]:
    """One claim for each multiple in the paper."""
    return tuple(
        Claim(figure.row, "multiple", figure.multiple, obstacle=_OBSTACLES.get(figure.row, ""))
        for figure in published_figures()
        if figure.experiment == "meng" and figure.multiple is not None
    )


MENG = Experiment(
    name="meng",
    title="Training deeper models: largest batches (Meng et al. 2017)",
    about=(
        "The largest batch that fits in the 12 GB of an M40 (11 GiB of them for a step) over PCIe 3, compared with the "
        "largest in-core batch; also the time that deep ResNets lose at batch 32 in as many bytes as the paper "
        "measured as their peak (that of one configuration, not the least possible; the paper gives no time for it). "
        "Nothing is rewritten by hand: attention and recurrent cells are written op by op, where the paper has "
        "versions that save memory. The paper gives layers and lengths. Widths and vocabularies are assumed (see the "
        "notes of the workloads), and so are the GAN's image size and the length of the translator for which the paper "
        "gives none. Compare the multiples, not the sizes."
    ),
    rows=(
        _largest("resnet50", "ResNet-50", "resnet50", 100, quick=True),
        _largest("inception-v3", "Inception-V3", "inception_v3", 60),
        _largest("gan", "GAN, images 256x256, width 128", "gan", 16, image_size=256, width=128),
        _largest("lstm-1", "LSTM, 1 layer", "lstm@meng-1", 800, quick=True),
        _largest("lstm-4", "LSTM, 4 layers", "lstm@meng-4", 300),
        _largest("lstm-8", "LSTM, 8 layers", "lstm@meng-8", 150),
        _largest("lstm-16", "LSTM, 16 layers", "lstm@meng-16", 40),
        _largest("nmt", "NMT, length 40", "nmt@meng-50", 200, sequence_length=40),
        _largest("nmt-50", "NMT, length 50", "nmt@meng-50", 100),
        _largest("nmt-100", "NMT, length 100", "nmt@meng-100", 40),
        _largest("nmt-200", "NMT, length 200", "nmt@meng-200", 10),
        _largest("nmt-400", "NMT, length 400", "nmt@meng-400", 2),
        _at_their_peak("resnet101", "ResNet-101", "resnet101", 2660),
        _at_their_peak("resnet200", "ResNet-200", "resnet200", 3052),
        _at_their_peak("resnet1001", "ResNet-1001", "resnet@meng-1001", 5979),
        _at_their_peak("resnet2000", "ResNet-2000", "resnet@meng-2000", 10650),
    ),
    measured=(
        Row(
            "lstm-here", "LSTM, 4 layers of 256, length 20, 96 MiB", "largest", "lstm", _METHODS, "96MiB",
            settings={"unrolled": True, "layers": 4, "width": 256, "sequence_length": 20, "dropout": 0.0}, start=16,
            quick=True,
        ),
        Row(
            "nmt-here", "NMT, width 256, length 16, 128 MiB", "largest", "nmt", _METHODS, "128MiB",
            settings={"width": 256, "sequence_length": 16}, start=8,
        ),
    ),
    claims=_claims(),
)  # fmt: skip

"""The experiments by name. One file each."""

from __future__ import annotations

from pooch.errors import UsageError
from pooch.published.experiments.char_rnn import CHAR_RNN
from pooch.published.experiments.meng import MENG
from pooch.published.experiments.pooch import POOCH
from pooch.published.experiments.tflms import TFLMS
from pooch.published.experiments.unet3d import UNET3D
from pooch.published.rows import Experiment

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (POOCH, TFLMS, UNET3D, MENG, CHAR_RNN)}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in EXPERIMENTS:
        raise UsageError(f"there is no published experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]

"""The experiments by name, one file each."""

from __future__ import annotations

from ...errors import UsageError
from ...wording import did_you_mean
from ..rows import Experiment
from .char_rnn import CHAR_RNN
from .meng import MENG
from .policies import POLICIES
from .pooch import POOCH
from .tflms import TFLMS
from .unet3d import UNET3D

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (POOCH, TFLMS, UNET3D, MENG, CHAR_RNN, POLICIES)}


def find_experiment(name: str) -> Experiment:
    """Return the experiment with a name.

    Raises:
        UsageError: there is none.
    """
    if name not in EXPERIMENTS:
        raise UsageError(f"there is no published experiment {name!r}: {did_you_mean(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]

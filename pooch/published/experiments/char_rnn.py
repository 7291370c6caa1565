"""TensorFlow's while-loop swapping (Alvaro 2019): which tensor leaves first."""

from __future__ import annotations

from ..rows import Experiment, Row, Saving
from .hardware import V100_PCIE

_METHODS = ("tf_latest_first", "tf_earliest_first", "ilp")

CHAR_RNN = Experiment(
    name="char-rnn",
    title="TensorFlow's while loops: which tensor is swapped first (Alvaro 2019)",
    about=(
        "An unrolled character LSTM, batch 50, 500 characters, at several fractions of its in-core memory. "
        "`tf_latest_first` swaps the tensor being pushed, as TensorFlow did before the change; `tf_earliest_first` "
        "swaps the oldest one. The paper's figure is the time that the change saved. The paper names no GPU; we "
        "assume a V100 with a PCIe 3 link."
    ),
    rows=tuple(
        Row(
            f"char-rnn-500-{share}", f"char-RNN, length 500, {share}% of its memory, {V100_PCIE}", "slowdown",
            "char_rnn@long", _METHODS, f"{share}%", V100_PCIE, quick=share == 80,
        )
        for share in (90, 80, 70, 60)
    ),
    measured=(
        Row(
            "char-rnn-here", "char-RNN, width 256, length 60, 75% of its memory", "slowdown", "char_rnn", _METHODS,
            "75%", settings={"width": 256, "sequence_length": 60}, quick=True,
        ),
    ),
    saving=Saving("tf_latest_first", "tf_earliest_first", "time"),
)  # fmt: skip

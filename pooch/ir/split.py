"""An operator that runs in slices. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A call of the forward pass that runs in slices, and so does its backward pass, with the same bits.

    Attributes:
        op: index of the op that stands for the call, in the profile of the step with slices.
        label: module path and function.
        fingerprint: function, shapes and arguments, to recognise the call at run time.
        rows: of one slice.
        slices: how many there are.
        input_bytes: size of what is sliced.
        whole_peak_bytes: highest live bytes of the in-core step while the plain operators run.
        peak_bytes: the same in slices.
        whole_ms: time of the plain operators, forward and backward pass.
        time_ms: the same in slices.
        reason: why the plan runs it in slices, in one line; empty in a profile.
        compared: whether its bits were compared with those of the plain call, as they cannot be on a modelled device.
    """

    op: int
    label: str
    fingerprint: str
    rows: int
    slices: int
    input_bytes: int
    whole_peak_bytes: int
    peak_bytes: int
    whole_ms: float
    time_ms: float
    reason: str = ""
    compared: bool = True

"""Finds out when the program itself releases each value, with a forward pass in which autograd saves nothing.

A pack hook that drops its argument leaves only the program's own references, and the finalizer of each storage tells
the slot after which the program released it. The pass needs almost no memory, so it also works for models that do not
fit.
"""

from __future__ import annotations

import torch

from ..errors import ProfileError
from ..torchtools.raw_looks import RawLooks
from ..torchtools.sharding import reshard
from ..torchtools.standing_aside import StepHooks
from .recorder import ForwardRecorder
from .step import Forward


def record_releases(
    forward: Forward, model: torch.nn.Module, recorder: ForwardRecorder | None = None
) -> ForwardRecorder:
    """Runs the forward pass without letting autograd keep anything.

    Returns:
        The recorder. `values[i].released_after` is the index of the last op before the program released value i, or
        None if it still held the value when `forward` returned, as it does with the loss.
    """
    recorder = recorder or ForwardRecorder(model)
    hooks = StepHooks(recorder.note_saved, _no_unpack)
    try:
        with recorder.path.watched(), hooks, RawLooks(recorder.looked), recorder:
            loss = forward()
    finally:
        reshard(model)
    held = [value.released_after for value in recorder.values]
    del loss
    for value, released in zip(recorder.values, held, strict=True):
        value.released_after = released
    return recorder


def _no_unpack(handle: object) -> torch.Tensor:
    raise ProfileError("the forward pass itself runs a backward pass: profile a forward that only computes the loss")

"""When the program itself lets go of each value: a forward pass in which autograd saves nothing.

A pack hook that drops what it gets leaves only the program's own references; each storage's finalizer then tells
the slot after which the program let go. The pass needs almost no memory, so it also works for models that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pooch.errors import ProfileError
from pooch.profiler.recorder import ForwardRecorder


def _no_unpack(handle: None) -> torch.Tensor:
    raise ProfileError("the forward pass itself runs a backward pass: profile a forward that only computes the loss")


def record_releases(forward: Callable[[], torch.Tensor], model: torch.nn.Module) -> ForwardRecorder:
    """Run the forward pass without letting autograd keep anything.

    Returns:
        The recorder; `values[i].released_after` is the index of the last op before the program let go of value i,
        or None where it still held it when `forward` returned (the loss itself among them).
    """
    recorder = ForwardRecorder(model)

    def pack(tensor: torch.Tensor) -> None:
        recorder.note_saved(tensor)

    with recorder.path.watched(), torch.autograd.graph.saved_tensors_hooks(pack, _no_unpack), recorder:
        loss = forward()
    held = [value.released_after for value in recorder.values]
    del loss
    for value, released in zip(recorder.values, held, strict=True):
        value.released_after = released
    return recorder

"""When the program itself lets go of each value: a forward pass in which autograd saves nothing.

A pack hook that drops what it gets leaves only the program's own references; each storage's finalizer then tells
the slot after which the program let go. The pass needs almost no memory, so it also works for models that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pooch.errors import ProfileError
from pooch.profiler.recorder import ForwardRecorder
from pooch.torchtools.raw_looks import RawLooks
from pooch.torchtools.sharding import reshard


def _no_unpack(handle: None) -> torch.Tensor:
    raise ProfileError("the forward pass itself runs a backward pass: profile a forward that only computes the loss")


def record_releases(
    forward: Callable[[], torch.Tensor], model: torch.nn.Module, recorder: ForwardRecorder | None = None
) -> ForwardRecorder:
    """Run the forward pass without letting autograd keep anything. `recorder`: a fresh one (None: the usual kind).

    Returns:
        The recorder; `values[i].released_after` is the index of the last op before the program let go of value i,
        or None where it still held it when `forward` returned (the loss itself among them).
    """
    used = recorder or ForwardRecorder(model)

    def pack(tensor: torch.Tensor) -> None:
        used.note_saved(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, _no_unpack)
    try:
        with used.path.watched(), hooks, RawLooks(used.looked), used:
            loss = forward()
    finally:
        reshard(model)
    held = [value.released_after for value in used.values]
    del loss
    for value, released in zip(used.values, held, strict=True):
        value.released_after = released
    return used

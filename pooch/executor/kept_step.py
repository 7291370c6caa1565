"""A step in which nothing leaves, while its backward pass is watched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..torchtools.outside import changed_in_place
from ..torchtools.tensors import may_move
from .records import Reassigned, pack_kept
from .silence import SavedTensors, Silence
from .statistics import RunStats


class KeptStep(SavedTensors):
    """A step whose hooks keep everything, and notice the first read.

    Args:
        stats: Counters of the step. Also an attribute.
        silence: Tells what is not governed.

    Attributes:
        on_read: Called once, at the first read of a saved tensor.
    """

    def __init__(self, stats: RunStats, silence: Silence) -> None:
        self.stats, self._silence = stats, silence
        self.on_read: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._reassigned = Reassigned()

    def silenced(self) -> tuple[Silence, RunStats]:
        """Return what tells what is not governed, and the counters of the step."""
        return self._silence, self.stats

    def data_assigned(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Note that the program is about to give a tensor other data, and return what is called once it has."""
        return self._reassigned.note(tensor, None)

    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        return pack_kept(tensor, None) if may_move(tensor) else self.keep_silent(tensor)

    def unpack_plain(self, packed: Any) -> torch.Tensor:
        """Return the tensor that autograd reads."""
        if self.on_read is not None:
            with self._lock:  # if two threads read first, only one reports it
                on_read, self.on_read = self.on_read, None
            if on_read is not None:
                on_read()
        if self._reassigned and (other := self._reassigned.instead_of(packed)) is not None:
            return other
        tensor: torch.Tensor
        tensor, version, _, _ = packed
        if tensor._version != version:
            raise changed_in_place(tensor.type(), list(tensor.shape))
        return tensor

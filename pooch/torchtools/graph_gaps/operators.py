"""The two operators that stand in compiled graphs where a saved tensor may leave and where it is read again.

`pooch_graph::leave` hands a tensor to the saved tensor hooks in place, as autograd does at the end of the graph, but
in its midst. It returns a tensor of the same geometry on the meta device, which has no memory: the graph saves that in
place of the tensor. `pooch_graph::come_back` is given it in the backward graph, and returns the tensor. Where no hooks
are in place, the tensor just stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..endings import end_with
from ..tensors import storage_of

_autograd: Any = torch._C._autograd

_LIBRARY = torch.library.Library("pooch_graph", "DEF")
_LIBRARY.define("leave(Tensor tensor) -> Tensor", tags=(torch.Tag.flexible_layout,))
_LIBRARY.define("come_back(Tensor place, Device device) -> Tensor", tags=(torch.Tag.flexible_layout,))


class _Left:
    """What is held for a tensor that has left, until the tensor that stands in its place is gone.

    Attributes:
        held: What the hooks returned, or the tensor.
        unpack: The hook that returns the tensor, or None.
    """

    __slots__ = ("held", "unpack")

    def __init__(self, held: Any, unpack: Callable[[Any], torch.Tensor] | None) -> None:
        self.held, self.unpack = held, unpack


LISTENERS: list[Callable[[], None]] = []  # are called after each tensor that the hooks in place were given
_LEFT: dict[int, _Left] = {}  # by the storage of what stands in its place


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    place = _place_of(tensor)
    storage = storage_of(place)
    if hooks is None:
        left = _Left(tensor, None)
    else:
        with torch._C._DisableTorchDispatch():  # no ops of the program
            left = _Left(hooks[0](tensor), hooks[1])
            for tell in LISTENERS:
                tell()
    _LEFT[storage._cdata] = left
    end_with(storage, _LEFT.pop, storage._cdata, None)
    return place


def _come_back(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    left = _LEFT.get(storage_of(place)._cdata)
    if left is None:
        return place  # it never left
    return left.held if left.unpack is None else left.unpack(left.held)  # type: ignore[no-any-return]


def _place_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _returned(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(place.size(), place.stride(), dtype=place.dtype, device=device)


# The key that comes before those of devices, as on the meta device there is only what stands for the operator.
for _name, _implementation, _fake in (("leave", _leave, _place_of), ("come_back", _come_back, _returned)):
    _LIBRARY.impl(_name, _implementation, "BackendSelect")
    torch.library.register_fake(f"pooch_graph::{_name}", _fake, lib=_LIBRARY)

LEAVE: Any = torch.ops.pooch_graph.leave.default
COME_BACK: Any = torch.ops.pooch_graph.come_back.default
OPERATORS = (LEAVE, COME_BACK)

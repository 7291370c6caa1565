"""The two operators that stand in compiled graphs where a saved tensor may leave and where it is read again.

`pooch_graph::leave` hands a tensor to whoever holds a budget, as autograd does at the end of the graph, but in its
midst. It returns a tensor of the same geometry on the meta device, which has no memory: the graph saves that in place
of the tensor. `pooch_graph::come_back` is given it in the backward graph, and returns the tensor. Where nobody holds a
budget, or the program has saved tensor hooks of its own, both return what they are given, as their schemas say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..endings import end_with
from ..tensors import storage_of

_LIBRARY = torch.library.Library("pooch_graph", "DEF")
_LIBRARY.define("leave(Tensor(a) tensor) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))
_LIBRARY.define("come_back(Tensor(a) place, Device device) -> Tensor(a)", tags=(torch.Tag.flexible_layout,))


@dataclass(frozen=True, slots=True)
class Left:
    """What is held for a tensor that has left, until the tensor that stands in its place is gone.

    Attributes:
        held: What autograd would hold.
        unpack: Returns the tensor.
    """

    held: Any
    unpack: Callable[[Any], torch.Tensor]


HOLDERS: list[Callable[[torch.Tensor], Left | None]] = []  # who may hold a tensor; None: it stays
_LEFT: dict[int, Left] = {}  # by the storage of what stands in its place


def _leave(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():  # no ops of the program
        left = next((left for hold in HOLDERS if (left := hold(tensor)) is not None), None)
        if left is None:
            return tensor
        place = _place_of(tensor)
    storage = storage_of(place)
    _LEFT[storage._cdata] = left
    end_with(storage, _LEFT.pop, storage._cdata, None)
    return place


def _come_back(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    left = _LEFT.get(storage_of(place)._cdata)
    return place if left is None else left.unpack(left.held)


def _place_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _returned(place: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(place.size(), place.stride(), dtype=place.dtype, device=device)


# The key that comes before those of devices, as on the meta device there is only what stands for the operator.
for _name, _implementation, _fake in (("leave", _leave, _place_of), ("come_back", _come_back, _returned)):
    _LIBRARY.impl(_name, _implementation, "BackendSelect")
    for _key in ("Autograd", "ADInplaceOrView"):  # which would make a view of what may be on another device
        _LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)
    torch.library.register_fake(f"pooch_graph::{_name}", _fake, lib=_LIBRARY)

LEAVE: Any = torch.ops.pooch_graph.leave.default
COME_BACK: Any = torch.ops.pooch_graph.come_back.default
OPERATORS = (LEAVE, COME_BACK)

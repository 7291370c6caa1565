"""The memory of a device, as moves of values need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..machine import Value
from ..torchtools import watch
from ..torchtools.tensors import new_storage

_use_count = torch._C._storage_Use_Count


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device."""

    device: torch.device

    def new(self, size_bytes: int) -> torch.UntypedStorage:
        """Allocate a storage. Where allocations ask for room, it is made first."""
        return new_storage(size_bytes, self.device)

    def is_held_elsewhere(self, storage: torch.UntypedStorage) -> bool:
        """Whether more than one reference holds a storage, so that dropping one frees nothing."""
        return _use_count(storage._cdata) > 1


def released(values: dict[int, Value]) -> list[int]:
    """Return which of some values autograd has let go of, or nothing else holds, by their keys."""
    module = watch.LIBRARY.loaded
    if module is not None:
        return module.released(values)  # type: ignore[no-any-return]
    return [
        key
        for key, value in values.items()
        if not value.handles or value.storage is None or not is_held_elsewhere(value.storage)
    ]


def is_held_elsewhere(storage: torch.UntypedStorage) -> bool:
    """Whether anything holds a storage beside the object that the caller has."""
    return _use_count(storage._cdata) > 1

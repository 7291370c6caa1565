"""What the runtime knows of each planned value, and the handles that autograd holds in place of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pooch.executor.engines.protocol import Ticket
from pooch.executor.geometry import Geometry


class Record:
    """A value that is swapped or recomputed, in one step.

    Attributes:
        value: its id. size_bytes: of its storage, once it is copied out.
        storage: its bytes on the device, or None while they are elsewhere.
        ticket: the copy under way, if any.
        copied_out: the tier holds it. handles: how many saved tensors of autograd's are on it.
        changed: an in-place op wrote over it after it was saved.
    """

    __slots__ = ("changed", "copied_out", "handles", "size_bytes", "storage", "ticket", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.size_bytes = 0
        self.storage: torch.UntypedStorage | None = None
        self.ticket: Ticket | None = None
        self.copied_out = False
        self.handles = 0
        self.changed = False


class PackedRecord:
    """What autograd holds for a swapped or recomputed value; its end tells that autograd let go."""

    __slots__ = ("_released", "geometry", "record", "step")

    def __init__(self, step: object, record: Record, geometry: Geometry, released: Callable[[Record], None]) -> None:
        self.step, self.record, self.geometry = step, record, geometry
        self._released = released
        record.handles += 1

    def __del__(self) -> None:
        self.record.handles -= 1
        if self.record.handles == 0:
            self._released(self.record)


class PackedTensor:
    """What autograd holds for a kept value: the tensor, and its version, since hooks switch PyTorch's own check off."""

    __slots__ = ("step", "tensor", "value", "version")

    def __init__(self, step: object, value: int | None, tensor: torch.Tensor) -> None:
        self.step, self.value, self.tensor = step, value, tensor
        self.version = tensor._version

    def checked(self) -> torch.Tensor:
        """The tensor, if nobody changed it since.

        Raises:
            RuntimeError: with PyTorch's words, where it was changed in place.
        """
        if self.tensor._version != self.version:
            raise changed_in_place(f"{self.tensor.type()} {list(self.tensor.shape)}")
        return self.tensor


def changed_in_place(what: str) -> RuntimeError:
    """The error that PyTorch raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] was changed after autograd saved it"
    )

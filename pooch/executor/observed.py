"""Steps that mark, in a recorded trace of memory, which storage holds which value: for pictures of measured steps."""

from __future__ import annotations

from typing import Any

import torch

from ..machine import Value
from ..torchtools.memory_trace import marker
from ..torchtools.tensors import storage_of
from .step import Step

MARK = "value"

_storage: Any = Value.__dict__["storage"]  # where an object keeps it


class _ObservedValue(Value):
    """A value that marks each storage which it gets."""

    __slots__ = ()

    @property
    def storage(self) -> Any:
        """Its bytes on the device, or None."""
        return _storage.__get__(self)

    @storage.setter
    def storage(self, storage: Any) -> None:
        _storage.__set__(self, storage)
        if storage is not None:
            _mark(self.number, storage)


class ObservedStep(Step):
    """A step under a plan that marks what its ops make, and what comes back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.guide is not None, "without a plan nothing is decided on"
        for value in self.guide.values.planned.values():
            value.__class__ = _ObservedValue

    def after_op(self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]) -> None:
        """Mark what a planned op has made."""
        guide = self.guide
        assert guide is not None
        position = guide.cursor.position
        super().after_op(func, name, outputs, made)
        if not guide.on_path or guide.cursor.position == position:
            return
        for number, tensor in zip(guide.table.expected[position].writes, made, strict=True):
            if number >= 0:
                _mark(number, storage_of(tensor))


def _mark(number: int, storage: torch.UntypedStorage) -> None:
    with torch._C._DisableTorchDispatch(), marker(f"{MARK} {number} {storage.data_ptr()}"):
        pass


def marked(name: str) -> tuple[int, int] | None:
    """The value and the address that a marker tells, or None if it tells something else."""
    kind, _, rest = name.partition(" ")
    number, _, address = rest.partition(" ")
    return (int(number), int(address)) if kind == MARK else None

"""The state of each planned value, and the handles that autograd holds in place of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from ..torchtools.tensors import Geometry, version_of
from .engines.protocol import Ticket

Kind = TypeVar("Kind", bound="SavedRecord")


class SavedRecord:
    """What handles need to know of the value that they stand for.

    Attributes:
        handles: Number of saved tensors of autograd on it.
        changed: Whether an in-place op wrote over it after it was saved.
    """

    __slots__ = ("changed", "handles")

    def __init__(self) -> None:
        self.handles = 0
        self.changed = False


class Record(SavedRecord):
    """The state of a swapped or recomputed value in one step.

    Attributes:
        value: The value's id.
        size_bytes: Size of its storage, once it is copied out.
        storage: Its bytes on the device, or None while they are elsewhere.
        ticket: The pending copy, if any.
        copied_out: Whether the tier holds its bytes.
        home: Returns the storage in which the program holds it, or None once the program has released it.
        handed_out: Whether the program obtained its address, so that it has to stay in place.
    """

    __slots__ = ("copied_out", "handed_out", "home", "size_bytes", "storage", "ticket", "value")

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value
        self.size_bytes = 0
        self.storage: torch.UntypedStorage | None = None
        self.ticket: Ticket | None = None
        self.copied_out = False
        self.home: Callable[[], torch.UntypedStorage | None] = lambda: None
        self.handed_out = False


class VersionProbe:
    """Detects later in-place changes of a tensor without holding its memory.

    A detached tensor shares the version counter, and assigning other data to it leaves the counter alone. This also
    detects changes outside of the region, which the dispatch mode does not see.
    """

    __slots__ = ("_probe", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = version_of(tensor)
        self._probe: torch.Tensor | None = None
        if not (tensor.is_conj() or tensor.is_neg()):  # ordinary data cannot be assigned to these
            self._probe = tensor.detach()
            self._probe.data = _nothing(tensor.device)

    def moved(self) -> bool:
        """Whether the tensor was written over."""
        return self._probe is not None and version_of(self._probe) != self._version

    @property
    def can_tell(self) -> bool:
        """Whether changes are detected at all."""
        return self._probe is not None


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


class PackedRecord(Generic[Kind]):
    """What autograd holds in place of a swapped or recomputed value. Its destruction, in any thread, releases it."""

    __slots__ = ("_ended", "geometry", "probe", "record", "step")

    def __init__(self, step: object, record: Kind, tensor: torch.Tensor, ended: Callable[[Kind], None]) -> None:
        self.step, self.record, self.geometry = step, record, Geometry.of(tensor)
        self.probe = VersionProbe(tensor)
        self._ended = ended
        record.handles += 1

    def __del__(self) -> None:
        self._ended(self.record)

    def check(self) -> None:
        """Check that the tensor was not changed in place since it was saved.

        Raises:
            RuntimeError: PyTorch's own error, if it was.
        """
        if self.record.changed or self.probe.moved():
            raise changed_in_place(f"{self.geometry.dtype} {list(self.geometry.size)}")


def pack_kept(tensor: torch.Tensor, value: int | None) -> tuple[torch.Tensor, int, int | None]:
    """Return what autograd holds for a kept value: the tensor, its version and the value's id.

    The version is needed since hooks disable PyTorch's own check. It is a plain tuple since there is one for each saved
    tensor, and an object would double the cost of the hook. A tensor with a history is detached: an op that saves its
    own result would otherwise hold itself, and a forward pass without a backward pass would stay in memory until the
    garbage collector runs.
    """
    if tensor.grad_fn is not None:
        if torch._C._len_torch_dispatch_stack():
            with torch._C._DisableTorchDispatch():
                tensor = tensor.detach()
        else:
            tensor = tensor.detach()
    return tensor, tensor._version, value


def changed_in_place(what: str) -> RuntimeError:
    """Return the error that PyTorch raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] was changed after autograd saved it"
    )

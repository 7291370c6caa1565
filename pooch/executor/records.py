"""What the runtime knows of each planned value, and the handles that autograd holds in place of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from pooch.executor.engines.protocol import Ticket
from pooch.torchtools.tensors import Geometry, version_of


class Record:
    """A value that is swapped or recomputed, in one step.

    Attributes:
        value: its id. size_bytes: of its storage, once it is copied out.
        storage: its bytes on the device, or None while they are elsewhere.
        ticket: the copy under way, if any.
        copied_out: the tier holds it. handles: how many saved tensors of autograd's are on it.
        changed: an in-place op wrote over it after it was saved.
        home: gives the storage in which the program has it, or None once the program has let go.
        handed_out: somebody has its address, so it has to stay in place.
    """

    __slots__ = ("changed", "copied_out", "handed_out", "handles", "home", "size_bytes", "storage", "ticket", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.size_bytes = 0
        self.storage: torch.UntypedStorage | None = None
        self.ticket: Ticket | None = None
        self.copied_out = False
        self.handles = 0
        self.changed = False
        self.home: Callable[[], torch.UntypedStorage | None] = _nowhere
        self.handed_out = False


def _nowhere() -> None:
    return None


class VersionProbe:
    """Tells whether a tensor was changed in place since, without holding its memory.

    A detached tensor shares the version counter; giving it other data leaves the counter where it was. This sees
    changes that the dispatch mode does not: those made outside of the region.
    """

    __slots__ = ("_probe", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = version_of(tensor)
        self._probe: torch.Tensor | None = None
        if not (tensor.is_conj() or tensor.is_neg()):  # such tensors cannot be given ordinary data
            self._probe = tensor.detach()
            self._probe.data = _nothing(tensor.device)

    def moved(self) -> bool:
        """Whether the tensor was written over."""
        return self._probe is not None and version_of(self._probe) != self._version


@cache
def _nothing(device: torch.device) -> torch.Tensor:
    return torch.empty(0, device=device)


class PackedRecord:
    """What autograd holds for a swapped or recomputed value; its end tells that autograd let go, in any thread."""

    __slots__ = ("_ended", "geometry", "probe", "record", "step")

    def __init__(self, step: object, record: Record, tensor: torch.Tensor, ended: Callable[[Record], None]) -> None:
        self.step, self.record, self.geometry = step, record, Geometry.of(tensor)
        self.probe = VersionProbe(tensor)
        self._ended = ended
        record.handles += 1

    def __del__(self) -> None:
        self._ended(self.record)

    def check(self) -> None:
        """Raise PyTorch's error where the tensor was changed in place since.

        Raises:
            RuntimeError: with PyTorch's words.
        """
        if self.record.changed or self.probe.moved():
            raise changed_in_place(f"{self.geometry.dtype} {list(self.geometry.size)}")


def pack_kept(tensor: torch.Tensor, value: int | None) -> tuple[torch.Tensor, int, int | None]:
    """What autograd holds for a kept value: the tensor, its version, since hooks switch PyTorch's own check off, and
    the value's id. A bare tuple: there is one for each saved tensor, and an object would cost as much as all else.

    Detached where it has a history: an op that saves its own result would otherwise hold itself, and a forward pass
    without a backward pass would stay in memory until the garbage collector comes by.
    """
    if tensor.grad_fn is not None:
        if torch._C._len_torch_dispatch_stack():
            with torch._C._DisableTorchDispatch():
                tensor = tensor.detach()
        else:
            tensor = tensor.detach()
    return tensor, tensor._version, value


def changed_in_place(what: str) -> RuntimeError:
    """The error that PyTorch raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] was changed after autograd saved it"
    )

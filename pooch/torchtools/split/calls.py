"""Finds calls of cross entropy that can run in slices, and makes those that a plan names run so.

Every way to call it (`F.cross_entropy`, however it was imported, and `nn.CrossEntropyLoss`) ends in one function of
PyTorch's C++ part, which is replaced while anybody watches, and only acts in the threads that do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..tensors import dtype_name, has_plain_storage
from .loss import FEWEST_SLICES, slice_rows, split_cross_entropy

_FUNCTION = "cross_entropy_loss"
_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of cross entropy that can run in slices; logits (N, classes), target (N,), weight (classes,) or None."""

    logits: Tensor
    target: Tensor
    weight: Tensor | None
    reduction: int
    ignore_index: int

    @property
    def rows(self) -> int:
        """Rows of a slice."""
        return slice_rows(self.logits)

    @property
    def fingerprint(self) -> str:
        """What has to be equal for the same kernels to run."""
        logits = self.logits
        parts = [
            f"{dtype_name(logits.dtype)}{list(logits.shape)} by {list(logits.stride())}",
            dtype_name(self.target.dtype),
            f"reduction={_REDUCTIONS[self.reduction]}",
            f"ignore_index={self.ignore_index}",
        ]
        if self.weight is not None:
            parts.append(f"weight {dtype_name(self.weight.dtype)}")
        return f"cross_entropy({', '.join(parts)})"


def splittable(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> LossCall | str:
    """Return the call if it can run in slices, else why it cannot."""
    try:
        logits, target, weight, reduction, ignore_index, smoothing = _bound(*arguments, **named)
    except TypeError:
        return "its arguments are not those of cross_entropy"
    tensors = [tensor for tensor in (logits, target, weight) if tensor is not None]
    if not all(_is_ordinary(tensor) for tensor in tensors):
        return "its arguments are not ordinary tensors"
    if logits.dim() != 2 or target.dim() != 1 or target.dtype != torch.int64:
        return "its rows are not classified one by one: flatten the logits to (N, classes)"
    if smoothing:
        return "label smoothing adds up all classes of a row"
    if not logits.is_floating_point() or logits.element_size() not in (2, 4, 8) or logits.shape[0] < 2:
        return "its logits cannot be sliced"
    if logits.shape[0] != target.shape[0] or reduction not in range(len(_REDUCTIONS)):
        return "its arguments do not fit together"
    if weight is not None and logits.shape[0] * FEWEST_SLICES > logits.shape[1]:
        return "its weights would take as much memory as the logits"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "it runs in a transform of torch.func"
    if torch.is_autocast_enabled(logits.device.type) and logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()  # as autocasting does for this operator
    return LossCall(logits, target, weight, reduction, ignore_index)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether it is no subclass that sees ops, or a fake tensor that stands for such a one in a profile."""
    return type(tensor) in (Tensor, torch.nn.Parameter) or (type(tensor) is FakeTensor and has_plain_storage(tensor))


def _bound(
    logits: Any, target: Any, weight: Any = None, reduction: int = 1, ignore_index: int = -100, smoothing: float = 0.0
) -> tuple[Any, ...]:
    return logits, target, weight, reduction, ignore_index, smoothing


# Given the logits in the forward pass, returns what tells in the backward pass whether they may be written over.
Judge = Callable[[Tensor], Callable[[], bool]]


class SplitCalls:
    """Runs the calls with these fingerprints in slices; all others run as they are.

    Args:
        fingerprints: of the calls.
        may_write: tells whether logits may be written over; what the program and autograd hold is counted in any case.
            None: whoever stands between autograd and the step does (see `judging_writes`), or nobody.

    Attributes:
        made: fingerprints of the calls that ran in slices so far.
    """

    def __init__(self, fingerprints: Container[str], may_write: Judge | None = None) -> None:
        self._fingerprints, self._may_write = fingerprints, may_write
        self.made: list[str] = []

    def __call__(self, plain: Callable[..., Tensor], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
        """Run one call."""
        call = splittable(arguments, named) if torch.is_grad_enabled() else "no graph is recorded"
        if isinstance(call, str) or not call.logits.requires_grad or call.fingerprint not in self._fingerprints:
            return plain(*arguments, **named)
        self.made.append(call.fingerprint)
        may_write = self._may_write or _WATCHING.judges[-1]
        return split_cross_entropy(
            call.logits,
            call.target,
            call.weight,
            call.reduction,
            call.ignore_index,
            call.rows,
            may_write(call.logits),
        )


Watcher = Callable[[Callable[..., Tensor], tuple[Any, ...], Mapping[str, Any]], Tensor]


class _Watching(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.judges: list[Judge] = [lambda logits: lambda: True]


_WATCHING = _Watching()
_LOCK = threading.Lock()
_plain: Callable[..., Tensor] | None = None
_users = 0


def _watched(*arguments: Any, **named: Any) -> Tensor:
    plain = _plain
    assert plain is not None
    if not _WATCHING.watchers:
        return plain(*arguments, **named)
    return _WATCHING.watchers[-1](plain, arguments, named)


@contextmanager
def watching_losses(watcher: Watcher) -> Iterator[None]:
    """Pass every call of cross entropy in this thread to the watcher, with the plain function and the arguments."""
    global _plain, _users
    with _LOCK:
        if _users == 0:
            _plain = getattr(torch._C._nn, _FUNCTION)
            setattr(torch._C._nn, _FUNCTION, _watched)
        _users += 1
    _WATCHING.watchers.append(watcher)
    try:
        yield
    finally:
        _WATCHING.watchers.pop()
        with _LOCK:
            _users -= 1
            if _users == 0:
                setattr(torch._C._nn, _FUNCTION, _plain)


@contextmanager
def judging_writes(judge: Judge) -> Iterator[None]:
    """Have calls of this thread that run in slices ask whether logits may be written over.

    It is for who holds what autograd has saved in a way that references do not show.
    """
    _WATCHING.judges.append(judge)
    try:
        yield
    finally:
        _WATCHING.judges.pop()

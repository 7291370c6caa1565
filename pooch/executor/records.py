"""What autograd holds in place of the tensors that it saves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..machine import Value
from ..torchtools import watch
from ..torchtools.outside import changed_in_place
from ..torchtools.tensors import Geometry, has_plain_storage, version_of

# Address of a tensor, and the number of the node that made it.
Identity = tuple[int, int]


class VersionProbe:
    """Detects later in-place changes of a tensor without holding its memory.

    A detached tensor shares the version counter, and assigning other data to it leaves the counter alone. This also
    detects changes outside of the region, which the dispatch mode does not see.
    """

    __slots__ = ("_probe", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = version_of(tensor)
        self._probe = _detached(tensor)
        self._probe.data = _nothing(tensor.device)

    def moved(self) -> bool:
        """Whether the tensor was written over."""
        return version_of(self._probe) != self._version


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same version counter, also in the middle of an op, as where an allocation asks for room.

    There PyTorch has left out the layer in which views share their counter with what they are views of.
    """
    if not _is_left_out(_VIEWS):
        return _plain(tensor)
    _leave_out(_VIEWS, False)
    try:
        return _plain(tensor)
    finally:
        _leave_out(_VIEWS, True)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor, or a view of it that is neither conjugated nor negated: data can only be assigned to such."""
    if not (tensor.is_conj() or tensor.is_neg()):
        return tensor.detach()
    with torch.no_grad():
        plain = torch._conj(tensor) if tensor.is_conj() else tensor
        return (torch._neg_view(plain) if plain.is_neg() else plain).detach()  # a view would hold the memory


_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_is_left_out: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_leave_out: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded


class _Nothing(threading.local):
    """A tensor without memory for each device, of each thread.

    PyTorch's reference counts of a storage's Python object are not safe where several threads share the storage.
    """

    def __init__(self) -> None:
        self.tensors: dict[torch.device, torch.Tensor] = {}


_NOTHING = _Nothing()


def _nothing(device: torch.device) -> torch.Tensor:
    found = _NOTHING.tensors.get(device)
    if found is None:
        found = _NOTHING.tensors[device] = torch.empty(0, device=device)
    return found


class Hold:
    """Keeps a value, as autograd's handles do, for as long as somebody else will read it.

    Args:
        value: The value.
        ended: Called with the value at the end of the hold.

    Attributes:
        value: The value.
    """

    __slots__ = ("_ended", "value")

    def __init__(self, value: Value, ended: Callable[[Value], None]) -> None:
        value.handles += 1
        self.value, self._ended = value, ended

    def __del__(self) -> None:
        if hasattr(self, "_ended"):
            self._ended(self.value)


class Handle:
    """What autograd holds in place of a tensor whose value may leave. Its destruction, in any thread, releases it.

    Args:
        step: What it keeps alive.
        value: The value in the tensor's storage.
        tensor: The tensor.
        ended: Called with the value at the end of the handle.
    """

    __slots__ = ("_ended", "geometry", "identity", "probe", "step", "value")

    def __init__(self, step: object, value: Value, tensor: torch.Tensor, ended: Callable[[Value], None]) -> None:
        self.value, self._ended = value, ended
        value.handles += 1
        self.step, self.geometry = step, Geometry.of(tensor)
        self.probe, self.identity = VersionProbe(tensor), saved_identity(tensor)

    def __del__(self) -> None:
        # Where Ctrl-C comes at its entry, Python forgets it. Nothing depends on it but how soon the memory is free.
        if hasattr(self, "_ended"):
            self._ended(self.value)

    def check(self) -> None:
        """Check that the tensor was not changed in place since it was saved.

        Raises:
            RuntimeError: PyTorch's own error, if it was.
        """
        if self.probe.moved():
            raise changed_in_place(self.geometry.dtype, list(self.geometry.size))

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor on another storage."""
        return self.geometry.on(storage)


watch.HANDLES.add(Handle)


def handle_on(
    step: object, value: Value, tensor: torch.Tensor, ended: Callable[[Value], None], reads: Any = None
) -> Handle:
    """Return a handle, a native one if there is a native part.

    Args:
        step: See `Handle`, also for the next three.
        value: The value in the tensor's storage.
        tensor: The tensor.
        ended: Called with the value at the end of the handle.
        reads: What reads the value natively as long as it is there, or None.
    """
    module = watch.LIBRARY.loaded
    if module is None or not module.is_ordinary(tensor):
        return Handle(step, value, tensor, ended)
    return module.Handle(step, value, tensor, ended, reads)  # type: ignore[no-any-return]


class KeptTensor:
    """What autograd holds in place of a tensor that a plan keeps. It gets a handle if it has to leave after all.

    A handle for each kept value of each step would double what following a plan costs.

    Attributes:
        tensor: The tensor, without its history; None once it has a handle.
        version: Of the tensor when it was saved.
        number: Number of the value in the step.
        identity: Of the tensor that autograd has saved.
        handle: The handle, or None.
    """

    __slots__ = ("__weakref__", "handle", "identity", "number", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, version: int, number: int, identity: Identity | None) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version, self.number, self.identity = version, number, identity
        self.handle: Handle | None = None


class Reassigned:
    """Tensors of a step that the program has given other data: `tensor.data = other`.

    Plain autograd holds the tensor that it has saved, and reads what its data is then. Here its data alone is held:
    with its history, a tensor that no backward pass reaches would hold the step, and that the tensor, for ever.
    """

    def __init__(self) -> None:
        self._data: dict[Identity, torch.Tensor] = {}  # numbers of nodes come once, also where addresses come again
        self._values: set[tuple[Identity, int | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._values)

    def note(self, tensor: torch.Tensor, value: int | None) -> Callable[[], None] | None:
        """Note that a tensor is about to lose its data, and return what is called once it has other data.

        Args:
            tensor: The tensor.
            value: What its storage holds, or None if that is no value of the step.
        """
        node = tensor.grad_fn
        if node is None:
            return None
        identity = id(tensor), node._sequence_nr()

        def assigned() -> None:
            hides = torch._C._len_torch_dispatch_stack() and has_plain_storage(tensor)  # from modes of the program's
            with torch._C._DisableTorchDispatch() if hides else nullcontext():
                self._data[identity] = tensor.detach()
            self._values.add((identity, value))

        return assigned

    def instead_of(self, packed: Any) -> torch.Tensor | None:
        """Return what to read in place of a tensor that autograd has saved, if it was given other data since."""
        if type(packed) is tuple:
            _, _, value, identity = packed
        elif isinstance(packed, torch.Tensor):
            return None
        else:
            value = packed.value.number if type(packed) in watch.HANDLES else packed.number
            identity = packed.identity
        if identity is None or (identity, value) not in self._values:
            return None
        return self._data[identity].detach()


def saved_identity(tensor: torch.Tensor) -> Identity | None:
    """Return what tells a tensor that autograd is saving from others, or None if it saves the result of the newest
    node.

    Of its own result a node saves the memory alone, so that data assigned to the tensor later is not read. An address
    is not enough: the tensor may end, and another one come to the same address, before data is assigned to that.
    """
    node = tensor.grad_fn
    if node is None:
        return None
    number: int = node._sequence_nr()
    if number == torch.autograd._get_sequence_nr() - 1:  # type: ignore[attr-defined]
        return None
    return id(tensor), number


def pack_kept(tensor: torch.Tensor, value: int | None) -> tuple[torch.Tensor, int, int | None, Identity | None]:
    """Return what autograd holds for a kept value: the tensor, its version, the value's id and the tensor's identity.

    The version is needed since hooks disable PyTorch's own check. It is a plain tuple since there is one for each saved
    tensor, and an object would double the cost of the hook. A tensor with a history is detached: an op that saves its
    own result would otherwise hold itself, and a forward pass without a backward pass would stay in memory until the
    garbage collector runs.
    """
    identity = saved_identity(tensor)
    if tensor.grad_fn is not None:
        if torch._C._len_torch_dispatch_stack():
            with torch._C._DisableTorchDispatch():
                tensor = tensor.detach()
        else:
            tensor = tensor.detach()
    return tensor, tensor._version, value, identity


def pack_whole(tensor: torch.Tensor) -> tuple[torch.Tensor, int, None, Identity | None]:
    """Return the same for a tensor without ordinary memory, whose type may have a way of its own to be detached."""
    identity = saved_identity(tensor)
    if tensor.grad_fn is not None:
        tensor = tensor.detach()
    return tensor, tensor._version, None, identity

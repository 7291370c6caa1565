"""Finds tensors in arguments and identifies storages. Pooch keys everything by storage, never by tensor object."""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..ground.units import round_up
from .function_modes import past_subclasses

# The storage of a tensor. Pooch's own reads of it are no looks of the program's, which `RawLooks` reports.
storage_of: Callable[[torch.Tensor], torch.UntypedStorage] = torch._C.TensorBase.untyped_storage
# So are what it does with a storage's address, and with tensors that it puts on one.
# Where the bytes of a storage are, without anybody being told that somebody has the address.
memory_address: Callable[[torch.UntypedStorage], int] = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]
_put_on: Callable[[torch.Tensor, torch.UntypedStorage], torch.Tensor] = torch._C.TensorBase.set_


def storage_key(tensor: torch.Tensor) -> int:
    """Returns the identity of the tensor's storage, which is unique while the storage lives."""
    key: int = storage_of(tensor)._cdata
    return key


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Returns a new storage of the device's current allocator. `UntypedStorage(...)` ignores one that was installed."""
    return storage_of(torch.empty(size_bytes, dtype=torch.uint8, device=device))


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor has strided memory that can be copied byte by byte.

    Sparse, nested and quantized tensors, opaque oneDNN tensors and subclasses that see every op do not: their bytes
    alone do not make the tensor again, or there are none. The zeros of forward-mode differentiation have none either.
    """
    # This runs several times for every op of every step.
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return _is_plain_subclass(tensor)
    return _is_plainly_strided(tensor)


def _is_plain_subclass(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of a subclass has memory like any other, as those have that only see functions."""
    kind = type(tensor)
    if not _sees_no_ops(kind) and not (kind is FakeTensor and len(_WORLDS)):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # even its attributes may be functions of the program
        return _is_plainly_strided(tensor)


def _is_plainly_strided(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_strided and not tensor._is_zerotensor()


def _sees_no_ops(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


_WORLDS: weakref.WeakSet[object] = weakref.WeakSet()  # in which fake tensors stand for real ones


def fakes_are_plain_with(world: object) -> None:
    """Lets fake tensors count as having memory as long as `world` lives. Otherwise they are tensors without any."""
    _WORLDS.add(world)


def may_move(tensor: torch.Tensor) -> bool:
    """Returns whether the bytes of a tensor can leave the device: they are ordinary, and there are some.

    On the meta device there are none.
    """
    return has_plain_storage(tensor) and not tensor.is_meta


def can_be_dropped(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of unknown origin can leave once nothing else holds its storage.

    A parameter may be given other data, memory that PyTorch did not allocate can change without its knowledge, and
    nothing tells whether a conjugate view was changed.
    """
    is_parameter = tensor.is_leaf and tensor.requires_grad
    return not (is_parameter or tensor.is_conj() or tensor.is_neg()) and storage_of(tensor).resizable()


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often the tensor was modified in place; inference tensors keep no count."""
    return 0 if tensor.is_inference() else tensor._version


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a parameter, or of what stands in its place in `torch.func.functional_call`.

    That may be the result of an op, which has no gradient of its own. PyTorch warns of asking for it.
    """
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def result_tensors(result: Any) -> list[torch.Tensor]:
    """Returns the tensors among the results of an op, in order."""
    return [result] if isinstance(result, torch.Tensor) else find_tensors(result)


def find_tensors(arguments: Any) -> list[torch.Tensor]:
    """Returns every tensor in nested lists, tuples and dictionaries of arguments, in order."""
    found: list[torch.Tensor] = []
    _collect((arguments,), found)
    return found


def _collect(items: Iterable[Any], found: list[torch.Tensor]) -> None:
    # This runs several times for every op of a recorded step, and generators would be slower.
    for item in items:
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            _collect(item, found)
        elif isinstance(item, dict):
            _collect(item.values(), found)


def map_tensors(function: Callable[[torch.Tensor], Any], arguments: Any) -> Any:
    """Returns the same nesting with every tensor replaced by `function(tensor)`."""
    if isinstance(arguments, torch.Tensor):
        return function(arguments)
    if isinstance(arguments, (list, tuple)):
        mapped = [map_tensors(function, item) for item in arguments]
        return mapped if isinstance(arguments, list) else tuple(mapped)
    if isinstance(arguments, dict):
        return {key: map_tensors(function, item) for key, item in arguments.items()}
    return arguments


def tensors_with_memory(arguments: Any) -> tuple[list[torch.Tensor], bool]:
    """Returns the ordinary tensors in some arguments, including those that others are made of.

    It also returns whether there is other memory that cannot be determined.
    """
    found: list[torch.Tensor] = []
    hidden = False
    stack = find_tensors(arguments)
    while stack:
        tensor = stack.pop()
        if has_own_memory(tensor):
            found.append(tensor)
            continue
        inner = inner_tensors(tensor)
        if inner is None:
            hidden = True
        else:
            stack += inner
    return found, hidden


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has a storage with its bytes, also where these alone do not make it again."""
    if type(tensor) is FakeTensor:
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if has_plain_storage(tensor):
        return True
    return _sees_no_ops(type(tensor)) and tensor.layout is torch.strided and not tensor._is_zerotensor()


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns the tensors that a tensor without ordinary memory is made of, or None if that cannot be determined."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return [torch._C._functorch.get_unwrapped(tensor)]
    if not _sees_no_ops(type(tensor)):
        return _inside_wrapper(tensor)
    if tensor._is_zerotensor():
        return []
    if tensor.layout is torch.sparse_coo:
        return [torch.ops.aten._indices(tensor), torch.ops.aten._values(tensor)]
    if tensor.layout is torch._mkldnn:  # type: ignore[attr-defined]
        return []  # its memory is its own
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return None


def _inside_wrapper(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Returns the tensors in a wrapper: those that it names, or else those among its attributes."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        names = flatten()[0]
        inner = [each for each in (getattr(tensor, name) for name in names) if isinstance(each, torch.Tensor)]
    else:
        inner = [*find_tensors(getattr(tensor, "__dict__", {})), *_own_memory(tensor)]
    return inner or None


def _own_memory(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns an ordinary tensor on the memory of a subclass that sees every op, unless it is a wrapper without any."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass():
        try:
            has_memory = tensor.untyped_storage().data_ptr() != 0
        except RuntimeError:  # PyTorch refuses to look into a wrapper's storage
            return []
        return [tensor.detach().as_subclass(torch.Tensor)] if has_memory else []


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a tensor except its bytes; from it, tensors are recreated on storages that moved."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Returns the geometry of a tensor."""
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg()
        )

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns a tensor of this geometry on a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugated:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negated else tensor


def describe(tensor: torch.Tensor) -> str:
    """Returns dtype and shape for fingerprints, such as "float32[16,64,112,112]"."""
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def fingerprint(name: str, outputs: list[torch.Tensor]) -> str:
    """Returns the text that identifies an executed op: its name and the tensors that it returned."""
    return f"{name}({' '.join(map(describe, outputs))})"


def operator_of(text: str) -> str:
    """Returns the operator in a fingerprint alone, so that shapes that change from step to step make no difference."""
    return text.partition("(")[0]


def functional_name(text: str) -> str:
    """Returns a name or fingerprint without the mark of ops in place: "aten.add.Tensor" for "aten.add_.Tensor"."""
    namespace, _, rest = text.partition(".")
    base, dot, overload = rest.partition(".")
    return f"{namespace}.{base.removesuffix('_')}{dot}{overload}"


@past_subclasses
def model_signature(model: torch.nn.Module) -> str:
    """Returns a hexadecimal digest of the names, shapes and dtypes of parameters and buffers.

    It is equal for two models that a plan cannot tell apart before the step runs.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"p {name} {describe(parameter)} {parameter.requires_grad}\n".encode())
    for name, buffer in model.named_buffers():
        digest.update(f"b {name} {describe(buffer)}\n".encode())
    return digest.hexdigest()[:32]


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, or of those that a sparse one is made of."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(map(tensor_bytes, inner_tensors(tensor) or []))


@past_subclasses
def storage_bytes(tensors: Iterable[torch.Tensor], granule_bytes: int = 1) -> int:
    """Returns the bytes of the distinct storages behind some tensors, each rounded up to a multiple of the granule."""
    sizes = {storage_key(t): storage_of(t).nbytes() for t in tensors if has_plain_storage(t)}
    return sum(round_up(size_bytes, granule_bytes) for size_bytes in sizes.values())


class FreedStorages:
    """Calls a method with a storage's key when the storage is freed, unless the object that it is bound to is gone.

    Args:
        method: The method. Only a weak reference to its object is held.
    """

    def __init__(self, method: Callable[[int], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def watch(self, storage: torch.UntypedStorage, key: int) -> weakref.ref[torch.UntypedStorage]:
        """Returns a reference to a storage. The call is made as long as somebody holds the reference."""
        return weakref.ref(storage, partial(_call_if_alive, self._method, key))


def _call_if_alive(reference: weakref.WeakMethod[Callable[[int], None]], key: int, _: object) -> None:
    method = reference()
    if method is not None:
        method(key)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat uint8 tensor on the bytes of a storage."""
    return _put_on(torch.empty(0, dtype=torch.uint8, device=storage.device), storage)


def bytes_in_place(storage: torch.UntypedStorage) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """Returns the memory of a storage on the CPU, which the caller keeps alive.

    `Tensor.numpy` would permanently prevent the storage from being resized.
    """
    address = (ctypes.c_uint8 * storage.nbytes()).from_address(memory_address(storage))
    return numpy.ctypeslib.as_array(address)

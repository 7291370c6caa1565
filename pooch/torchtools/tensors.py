"""Finding tensors in arguments and naming storages. Everything in Pooch is keyed by storage, never by tensor object."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage while that storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Strided memory that can be copied byte by byte (not sparse, not oneDNN-opaque, not a wrapper subclass)."""
    if tensor.layout is not torch.strided:
        return False
    return type(tensor) is torch.Tensor or not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor was changed in place; tensors of inference mode keep no count."""
    return 0 if tensor.is_inference() else tensor._version


def result_tensors(result: Any) -> list[torch.Tensor]:
    """Tensors among the results of an op, in order."""
    return [result] if isinstance(result, torch.Tensor) else list(find_tensors(result))


def find_tensors(arguments: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and dictionaries of arguments, in order."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for item in arguments:
            yield from find_tensors(item)
    elif isinstance(arguments, dict):
        for item in arguments.values():
            yield from find_tensors(item)


def map_tensors(function: Callable[[torch.Tensor], Any], arguments: Any) -> Any:
    """The same nesting with every tensor replaced by `function(tensor)`."""
    if isinstance(arguments, torch.Tensor):
        return function(arguments)
    if isinstance(arguments, (list, tuple)):
        mapped = [map_tensors(function, item) for item in arguments]
        return mapped if isinstance(arguments, list) else tuple(mapped)
    if isinstance(arguments, dict):
        return {key: map_tensors(function, item) for key, item in arguments.items()}
    return arguments


def tensors_with_memory(arguments: Any) -> tuple[list[torch.Tensor], bool]:
    """The ordinary tensors in some arguments, those inside of wrapper subclasses among them.

    Returns:
        The tensors, and whether besides there is memory that cannot be told (sparse, opaque, functorch's wrappers).
    """
    found: list[torch.Tensor] = []
    hidden = False
    stack = list(find_tensors(arguments))
    while stack:
        tensor = stack.pop()
        if _is_wrapper(tensor):
            names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
            stack += [inner for inner in (getattr(tensor, name) for name in names) if isinstance(inner, torch.Tensor)]
        elif _hides_memory(tensor):
            hidden = True
        else:
            found.append(tensor)
    return found, hidden


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor and bool(torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor))


def _hides_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return not is_plain and not isinstance(tensor, FakeTensor)


def describe(tensor: torch.Tensor) -> str:
    """Shape and dtype for fingerprints: "f32[16,64,112,112]"."""
    return f"{dtype_name(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def dtype_name(dtype: torch.dtype) -> str:
    """Short name: "float32", "int64"."""
    return str(dtype).removeprefix("torch.")


def fingerprint(name: str, outputs: list[torch.Tensor]) -> str:
    """Text by which an executed op is recognised: its name and what it returned."""
    return f"{name}({' '.join(map(describe, outputs))})"


def storage_bytes(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if has_plain_storage(t)}
    return sum(sizes.values())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat uint8 tensor on the bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def bytes_in_place(storage: torch.UntypedStorage) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """The memory of a storage on the CPU, which the caller holds; `Tensor.numpy` would forbid to ever resize it."""
    address = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return numpy.ctypeslib.as_array(address)

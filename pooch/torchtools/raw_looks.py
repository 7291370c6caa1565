"""Detects accesses to a tensor's memory that no dispatched op shows, such as `print(x)` or `x.numpy()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Tensor: Any = torch.Tensor

_READING = frozenset({Tensor.__repr__, Tensor.__format__, Tensor.tolist, Tensor.__deepcopy__})
# With the address, the program may read or write at any time from then on.
_HANDING_OUT = frozenset(
    {
        Tensor.numpy,
        Tensor.__array__,
        Tensor.data_ptr,
        Tensor.untyped_storage,
        Tensor.storage,
        Tensor._typed_storage,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        Tensor.share_memory_,
        Tensor.apply_,
        Tensor.map_,
        Tensor.map2_,
        Tensor.__cuda_array_interface__.__get__,
    }
)


class RawLooks(TorchFunctionMode):
    """Function mode that reports every such access before it happens, and whether it hands out the address."""

    def __init__(self, looked: Callable[[Any, bool], None]) -> None:
        super().__init__()
        self._looked = looked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HANDING_OUT:
            self._looked((args, kwargs), True)
        elif func in _READING:
            self._looked((args, kwargs), False)
        return func(*args, **(kwargs or {}))

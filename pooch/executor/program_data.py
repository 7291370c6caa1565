"""Tensors that the program holds, such as its data, and parameters that it trains elsewhere or never: which can leave.

Their bytes may be taken only if nothing reads them that is not seen. Ops are, on each tensor that Python holds. An
array shares memory with a tensor that Python holds as well, whose storage cannot be resized from then on. What another
library was given holds the tensor itself, as a view does with its base. What autograd has saved holds a further tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..torchtools.tensors import has_plain_storage, storage_key, storage_of

_LEAST_BYTES = 2**16  # what is smaller gains little, and PyTorch reads some of it without an op: states of generators

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def data_that_can_leave(
    tensors: Iterable[torch.Tensor], device: torch.device, library: Any
) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the tensors that can leave, those on one storage together, with the bases of views.

    Args:
        tensors: Tensors of any kind. If there are others on the storage of one, nothing of it can leave.
        device: Where they have to be.
        library: Tells what holds a tensor.
    """
    found: dict[int, dict[int, torch.Tensor]] = {}
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES or tensor.device != device:  # of others it may not be asked anything
            continue
        if has_plain_storage(tensor) and storage_of(tensor).nbytes() >= _LEAST_BYTES and not tensor.is_inference():
            together = found.setdefault(storage_key(tensor), {})
            for each in (tensor, tensor._base):
                if each is not None:
                    together[id(each)] = each
    for by_id in found.values():
        on_storage = list(by_id.values())
        if storage_of(on_storage[0]).resizable() and _are_held_by_python_alone(on_storage, library):
            yield on_storage


def _are_held_by_python_alone(tensors: Sequence[torch.Tensor], library: Any) -> bool:
    views = Counter(id(tensor._base) for tensor in tensors)
    return all(
        _is_no_result(tensor) and library.is_plain(tensor) and library.references_to(tensor) == 1 + views[id(tensor)]
        for tensor in tensors
    )


def _is_no_result(tensor: torch.Tensor) -> bool:
    """Whether a tensor is none for which a backward pass may be run, such as what a model has returned.

    A parameter is held by what autograd has recorded of it: one that may be in a backward pass has further references.
    """
    return not tensor.requires_grad or (type(tensor) is torch.nn.Parameter and tensor.is_leaf)

"""Contents of the few tensors that do not depend on data: ranges, masks made of ranges, constants.

Libraries read them back (`torch.arange(2, 5).tolist()`, `if (positions == 0).all()`), and the result decides which ops
run. They are therefore computed for real, in addition to the fake tensors. Tensors that are derived from parameters,
inputs or the random generator have no contents; reading them raises an error.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...torchtools.effects import written_tensors
from ...torchtools.operators import operator_facts
from ...torchtools.tensors import find_tensors, has_plain_storage, map_tensors, storage_key

_LARGEST = 2**20  # elements
READ_BACK = torch.ops.aten._local_scalar_dense.default
_CONSTANTS = {
    getattr(torch.ops.aten, name)
    for name in ("arange", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros", "tril_indices", "triu_indices")
}


class KnownContents(TorchDispatchMode):
    """Tracks contents through the operators that run inside, by storage so that views have them too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ_BACK and storage_key(args[0]) in self._real:
            with _disable_current_modes():
                return self._contents(args[0]).item()
        result = func(*args, **kwargs)
        if isinstance(result, (torch.Tensor, list, tuple)) and not operator_facts(func).is_view:
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = find_tensors((args, kwargs)), find_tensors(result)
        is_known = all(map(self._is_known, given)) if given else func.overloadpacket in _CONSTANTS
        is_known = is_known and torch.Tag.nondeterministic_seeded not in func.tags
        if is_known and all(map(_is_small, made)) and self._compute(func, args, kwargs, made):
            return
        for key in written_tensors(operator_facts(func), args, kwargs):  # overwritten with unknown contents
            self._real.pop(key, None)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _is_number(tensor) or (has_plain_storage(tensor) and storage_key(tensor) in self._real)

    def _contents(self, fake: torch.Tensor) -> torch.Tensor:
        if _is_number(fake):
            return fake
        with _disable_current_modes():
            real = torch.empty(0, dtype=fake.dtype)
            storage = self._real[storage_key(fake)]
            return real.set_(storage, fake.storage_offset(), fake.shape, fake.stride())

    def _compute(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> bool:
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": "cpu"}
        given, named = map_tensors(self._contents, args), map_tensors(self._contents, kwargs)
        with _disable_current_modes():
            try:
                found = find_tensors(func(*given, **named))
            except (RuntimeError, NotImplementedError, TypeError):
                return False
        for tensor, real in zip(made, found, strict=True):
            self._keep(tensor, real)
        return True

    def _keep(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        storage = fake.untyped_storage()
        if storage._cdata in self._real:
            return  # modified in place, as the real one was
        with _disable_current_modes():
            self._real[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            self._contents(fake).copy_(real)
        weakref.finalize(storage, self._real.pop, storage._cdata, None).atexit = False


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() <= _LARGEST and has_plain_storage(tensor)


def _is_number(tensor: torch.Tensor) -> bool:
    """Returns whether it is a number of the program, which PyTorch temporarily wraps into a tensor."""
    return tensor.ndim == 0 and not isinstance(tensor, FakeTensor)

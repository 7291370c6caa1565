"""Has the bytes of storages be there when the program reads them through the storage, which no op shows.

`torch.save` writes one storage after the other. It is served one by one as well, so that a model can be saved that does
not fit into memory: each is there while it is written. The addresses that it compares meanwhile are those of the
structures that PyTorch keeps of storages, which tell them from one another as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch

from .stand_ins import Place, StandIns


class Keeper(Protocol):
    """Knows where the bytes of storages are."""

    def is_away(self, key: int) -> bool:
        """Whether the bytes of a storage are away."""

    def read(self, key: int, hands_out: bool) -> Callable[[], None]:
        """Have the bytes of a storage be there until what is returned is called.

        Args:
            key: The storage's `_cdata`.
            hands_out: Whether the program obtains their address: they stay for good.
        """


class _Saving(threading.local):
    """Whether the calling thread is within `torch.save`."""

    depth = 0


_SAVING = _Saving()
_KEEPERS: list[Keeper] = []

_READING = ("cpu", "cuda", "clone", "tolist", "to", "type", "pin_memory", "_write_file", "__getitem__", "__reduce__")
_HANDING_OUT = ("data_ptr", "_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_", "share_memory_", "copy_")


def is_saving() -> bool:
    """Whether the calling thread is within `torch.save`, which does not keep the addresses that it asks for."""
    return _SAVING.depth > 0


def _keys_in(arguments: tuple[Any, ...]) -> list[int]:
    """The keys of storages among arguments whose bytes are away."""
    storages = [each for each in arguments if isinstance(each, torch.UntypedStorage)]
    return [each._cdata for each in storages if any(keeper.is_away(each._cdata) for keeper in _KEEPERS)]


def _served(keys: list[int], hands_out: bool, call: Callable[[], Any]) -> Any:
    ends = [keeper.read(key, hands_out) for key in keys for keeper in _KEEPERS if keeper.is_away(key)]
    try:
        return call()
    finally:
        for end in ends:
            end()


def _reading(original: Any) -> Any:
    @wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        keys = _keys_in(args) if _KEEPERS else []
        return original(*args, **kwargs) if not keys else _served(keys, False, lambda: original(*args, **kwargs))

    return read


def _handing_out(original: Any) -> Any:
    @wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        keys = _keys_in(args) if _KEEPERS else []
        if not keys:
            return original(*args, **kwargs)
        if is_saving() and original.__name__ == "data_ptr":
            return keys[0]
        return _served(keys, True, lambda: original(*args, **kwargs))

    return read


def _saving(original: Any) -> Any:
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        _SAVING.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            _SAVING.depth -= 1

    return save


_PLACES = StandIns(
    *(Place(torch.UntypedStorage, name, _reading) for name in _READING),
    *(Place(torch.UntypedStorage, name, _handing_out) for name in _HANDING_OUT),
    Place(torch._C.PyTorchFileWriter, "write_record", _reading),
    Place(torch, "save", _saving),
    Place(torch.serialization, "save", _saving),
)


def serve(keeper: Keeper) -> None:
    """Have reads of storages ask a keeper first."""
    _PLACES.use(keeper)
    _KEEPERS.append(keeper)


def serve_no_longer(keeper: Keeper) -> None:
    """Have a keeper be asked no longer. May be repeated."""
    if keeper in _KEEPERS:
        _KEEPERS.remove(keeper)
    _PLACES.leave(keeper)

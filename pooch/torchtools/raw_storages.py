"""Has the bytes of storages be there when the program reads them through the storage, which no op shows.

`torch.save` writes one storage after the other. It is served one by one as well, so that a model can be saved that does
not fit into memory: each is there while it is written. The addresses that it compares meanwhile are those of the
structures that PyTorch keeps of storages, which tell them from one another as well. So are those that other libraries
are known to compare and not to keep (`address_askers.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, Literal, Protocol

import torch

from . import moving_memory
from .address_askers import compares_addresses
from .stand_ins import Place, StandIns
from .tensors import has_plain_storage, storage_key

# What the program does with a storage: it reads the bytes, writes to them, or obtains their address.
Access = Literal["read", "write", "address"]


class Keeper(Protocol):
    """Knows where the bytes of storages are."""

    def moves(self, key: int) -> bool:
        """Whether the bytes of a storage may leave."""

    def is_away(self, key: int) -> bool:
        """Whether the bytes of a storage are away."""

    def access(self, key: int, access: Access) -> Callable[[], None]:
        """Have the bytes of a storage be there until what is returned is called.

        Args:
            key: The storage's `_cdata`.
            access: What for. Once the program has their address, they stay for good.
        """

    def adopt_tensor(self, tensor: torch.Tensor) -> None:
        """Note that the program has put a tensor on a storage, which no op on what was there before shows."""


class _Saving(threading.local):
    """Whether the calling thread is within `torch.save`."""

    depth = 0


_SAVING = _Saving()
_KEEPERS: list[Keeper] = []

_READING = ("cpu", "cuda", "clone", "tolist", "to", "type", "pin_memory", "_write_file", "__reduce__")
_WRITING = ("copy_", "fill_", "__setitem__", "byteswap", "_set_from_file")
_HANDING_OUT = ("data_ptr", "_share_cuda_", "share_memory_")  # and those that give a storage other memory


def is_saving() -> bool:
    """Whether the calling thread is within `torch.save`, which does not keep the addresses that it asks for."""
    return _SAVING.depth > 0


def compared_address(tensor: torch.Tensor) -> int | None:
    """Return what tells the bytes of a tensor that may be away from others, if whoever asks wants nothing else."""
    if not _KEEPERS or not has_plain_storage(tensor) or not compares_addresses():
        return None
    key = storage_key(tensor)
    if not any(keeper.moves(key) for keeper in _KEEPERS):
        return None
    return key + int(tensor.storage_offset()) * tensor.element_size()


def _keys_in(arguments: tuple[Any, ...]) -> list[int]:
    """The keys of storages among arguments whose bytes may be away."""
    untyped = (each._untyped_storage if isinstance(each, torch.TypedStorage) else each for each in arguments)
    storages = [each for each in untyped if isinstance(each, torch.UntypedStorage)]
    return [each._cdata for each in storages if any(keeper.moves(each._cdata) for keeper in _KEEPERS)]


def _served(keys: list[int], access: Access, call: Callable[[], Any]) -> Any:
    with ExitStack() as ends:
        for key in keys:
            for keeper in [each for each in _KEEPERS if each.moves(key)]:
                ends.callback(keeper.access(key, access))
        return call()


def _accessing(original: Any, access: Access) -> Any:
    @wraps(original)
    def accessed(*args: Any, **kwargs: Any) -> Any:
        keys = _keys_in((*args, *kwargs.values())) if _KEEPERS else []
        return original(*args, **kwargs) if not keys else _served(keys, access, lambda: original(*args, **kwargs))

    return accessed


_reading, _writing = partial(_accessing, access="read"), partial(_accessing, access="write")


def _handing_out(original: Any) -> Any:
    @wraps(original)
    def handed_out(*args: Any, **kwargs: Any) -> Any:
        keys = _keys_in(args) if _KEEPERS else []
        if not keys:
            return original(*args, **kwargs)
        if original.__name__ == "data_ptr" and (is_saving() or compares_addresses()):
            return keys[0]
        return _served(keys, "address", lambda: original(*args, **kwargs))

    return handed_out


def _items(original: Any) -> Any:
    """A slice of a storage is a further storage on its memory, of which nothing tells how long it lives."""
    read, handed_out = _reading(original), _accessing(original, "address")

    @wraps(original)
    def items(storage: Any, index: Any) -> Any:
        return (handed_out if isinstance(index, slice) else read)(storage, index)

    return items


def _asking(original: Any) -> Any:
    """PyTorch ends the process if it is asked whether bytes are shared that are away, which they never are then."""

    @wraps(original)
    def is_shared(storage: torch.UntypedStorage) -> Any:
        return not any(keeper.is_away(storage._cdata) for keeper in _KEEPERS) and original(storage)

    return is_shared


def _putting(original: Any) -> Any:
    read = _reading(original)

    @wraps(original)
    def put(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = read(tensor, *args, **kwargs)
        for keeper in _KEEPERS:
            keeper.adopt_tensor(tensor)
        return result

    return put


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
    *(Place(torch.UntypedStorage, name, _writing) for name in _WRITING),
    *(Place(torch.UntypedStorage, name, _handing_out) for name in _HANDING_OUT),
    Place(torch.UntypedStorage, "__getitem__", _items),
    Place(torch.UntypedStorage, "is_shared", _asking),
    Place(torch.Tensor, "set_", _putting),
    Place(torch._C.PyTorchFileWriter, "write_record", _reading),
    Place(torch, "save", _saving),
    Place(torch.serialization, "save", _saving),
)


class _Moves:
    """Has keepers be asked before a storage gets other memory."""

    def before_move(self, key: int) -> Callable[[], None]:
        ends = ExitStack()
        for keeper in [each for each in _KEEPERS if each.moves(key)]:
            ends.callback(keeper.access(key, "address"))
        return ends.close


_MOVES = _Moves()


def serve(keeper: Keeper) -> None:
    """Have reads of storages ask a keeper first."""
    _PLACES.use(keeper)
    moving_memory.listen(_MOVES)
    _KEEPERS.append(keeper)


def serve_no_longer(keeper: Keeper) -> None:
    """Have a keeper be asked no longer. May be repeated."""
    if keeper in _KEEPERS:
        _KEEPERS.remove(keeper)
    if not _KEEPERS:
        moving_memory.listen_no_longer(_MOVES)
    _PLACES.leave(keeper)

"""Tells of calls with which PyTorch gives a storage other memory: those that share or resize it.

They free the bytes that a copy thread may still read, for what holds the storage does not hold those.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol
from weakref import WeakSet

import torch

from .stand_ins import Place, StandIns
from .tensors import has_plain_storage, storage_key


class Listener(Protocol):
    """Does something with the bytes of storages."""

    def before_move(self, key: int) -> Callable[[], None]:
        """Prepare for a call that gives a storage other memory, and return what is called after it.

        Args:
            key: The storage's `_cdata`.
        """


class _Moving(threading.local):
    """Within how many of such calls a thread is. PyTorch runs ops in them, at which a plan may act.

    Attributes:
        depth: That number.
    """

    depth = 0


MOVING = _Moving()
_LISTENERS: WeakSet[Listener] = WeakSet()


def memory_moves() -> bool:
    """Whether the calling thread is giving a storage other memory, so that no copy may be under way when it goes on."""
    return MOVING.depth > 0


def _key_of(moved: Any) -> int | None:
    """The key of what is moved, or None if it has no bytes of its own."""
    if isinstance(moved, torch.UntypedStorage):
        key: int = moved._cdata
        return key
    return storage_key(moved) if has_plain_storage(moved) else None


def _moving(original: Any) -> Any:
    @wraps(original)
    def moved(storage: Any, *args: Any, **kwargs: Any) -> Any:
        key = _key_of(storage)
        MOVING.depth += 1
        try:
            with ExitStack() as ends:
                if key is not None:
                    for listener in list(_LISTENERS):
                        ends.callback(listener.before_move(key))
                return original(storage, *args, **kwargs)
        finally:
            MOVING.depth -= 1

    return moved


_PLACES = StandIns(
    *(Place(torch.UntypedStorage, name, _moving) for name in ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")),
    *(Place(torch.Tensor, name, _moving) for name in ("resize_", "resize_as_")),
)


def listen(listener: Listener) -> None:
    """Tell somebody of such calls, as long as it lives."""
    _LISTENERS.add(listener)
    _PLACES.use(listener)


def listen_no_longer(listener: Listener) -> None:
    """Tell somebody no longer. May be repeated."""
    _LISTENERS.discard(listener)
    _PLACES.leave(listener)

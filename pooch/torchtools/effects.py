"""What one executed op did to storages. The profiler and the runtime must agree on it, so it stands here once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from pooch.torchtools.operators import OperatorFacts
from pooch.torchtools.tensors import find_tensors, has_plain_storage, storage_key


class StorageMap:
    """Which value lies in which storage now.

    Keyed by the storage's identity; a weak reference tells when it is gone, so that an address that is used again is
    never taken for the storage that lay there before.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def get(self, key: int) -> int | None:
        """The value in that storage, or None where the storage is unknown."""
        entry = self._entries.get(key)
        if entry is None or entry[1]() is None:
            return None
        return entry[0]

    def bind(self, storage: torch.UntypedStorage, value: int) -> None:
        """The storage holds `value` from now on."""
        self._entries[storage._cdata] = (value, weakref.ref(storage))


@dataclass(frozen=True, slots=True)
class Effects:
    """Tensors whose storages hold a new value after an op, in a fixed order, and whether all results were ordinary.

    Attributes:
        tensors: one tensor for each new value: results first, then arguments that were written but not returned.
        ordinary: no result had a layout other than strided memory.
    """

    tensors: tuple[torch.Tensor, ...]
    ordinary: bool


def written_tensors(facts: OperatorFacts, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """{storage key: tensor} of the arguments that the op writes in place."""
    found: dict[int, torch.Tensor] = {}
    for position in facts.written:
        if position < len(args):
            found.update((storage_key(t), t) for t in find_tensors(args[position]) if has_plain_storage(t))
    for name in facts.written_names:
        found.update((storage_key(t), t) for t in find_tensors(kwargs.get(name)) if has_plain_storage(t))
    return found


def argument_keys(args: Any, kwargs: Any) -> set[int]:
    """Storages of all tensor arguments."""
    keys: set[int] = set()
    _collect_keys(args, keys)
    if kwargs:
        _collect_keys(kwargs.values(), keys)
    return keys


def _collect_keys(items: Any, keys: set[int]) -> None:
    # Runs for every op of every step, so it is written out instead of built from generators.
    for item in items:
        if isinstance(item, torch.Tensor):
            if has_plain_storage(item):
                keys.add(item.untyped_storage()._cdata)
        elif isinstance(item, (list, tuple)):
            _collect_keys(item, keys)
        elif isinstance(item, dict):
            _collect_keys(item.values(), keys)


def effects_of(written: dict[int, torch.Tensor], outputs: list[torch.Tensor], read_keys: set[int]) -> Effects:
    """The new values of an op.

    Args:
        written: from `written_tensors`, taken before the op ran.
        outputs: tensors among its results, in order.
        read_keys: storages of all its tensor arguments; a result in one of them that was not written is an alias
            that the schema does not admit to, such as that of `_unsafe_view`.
    """
    return Effects(new_tensors(written, outputs, read_keys), all(map(has_plain_storage, outputs)))


def new_tensors(
    written: dict[int, torch.Tensor], outputs: list[torch.Tensor], read_keys: set[int]
) -> tuple[torch.Tensor, ...]:
    """`Effects.tensors` alone."""
    if len(outputs) == 1 and not written:  # most ops
        only = outputs[0]
        return (only,) if has_plain_storage(only) and storage_key(only) not in read_keys else ()
    remaining, seen, tensors = dict(written), set[int](), []
    for tensor in outputs:
        if not has_plain_storage(tensor):
            continue
        key = storage_key(tensor)
        if key in seen or (key not in written and key in read_keys):
            continue
        seen.add(key)
        remaining.pop(key, None)
        tensors.append(tensor)
    return (*tensors, *remaining.values())

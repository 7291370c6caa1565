"""The effects of one executed op on storages. They are defined once, since profiler and runtime must agree on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .operators import OperatorFacts, reads_statistics
from .tensors import find_tensors, has_plain_storage, may_move, storage_key, storage_of, tensors_with_memory


class StorageMap:
    """Maps storages to the values that they hold now.

    Keys are storage identities. A weak reference tells when the storage is gone, so an identity that is reused is never
    mistaken for the former storage.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def get(self, key: int) -> int | None:
        """Returns the value in that storage, or None if the storage is unknown."""
        entry = self._entries.get(key)
        if entry is None or entry[1]() is None:
            return None
        return entry[0]

    def bind(self, storage: torch.UntypedStorage, value: int) -> None:
        """Records that the storage holds `value` from now on."""
        self._entries[storage._cdata] = (value, weakref.ref(storage))


def written_tensors(facts: OperatorFacts, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
    """Returns {storage key: tensor} of the arguments that the op writes in place."""
    found: dict[int, torch.Tensor] = {}
    for position in facts.written:
        if position < len(args):
            found.update((storage_key(t), t) for t in _with_storage(args[position]))
    for name in facts.written_names:
        found.update((storage_key(t), t) for t in _with_storage(kwargs.get(name)))
    return found


def changed_statistics(facts: OperatorFacts, func: Any, args: Any) -> list[torch.Tensor]:
    """Returns the running statistics that an op updates. Neither its schema nor their version tells."""
    if not facts.statistics or reads_statistics(facts, func, args):
        return []
    found = (args[position] for position in facts.statistics if position < len(args))
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor)]


def _with_storage(arguments: Any) -> Iterator[torch.Tensor]:
    """Yields the ordinary tensors among some arguments, and those that others are made of."""
    for tensor in find_tensors(arguments):
        if has_plain_storage(tensor):
            yield tensor
        else:
            yield from _ordinary_inside(tensor)


def _ordinary_inside(tensor: torch.Tensor) -> list[torch.Tensor]:
    with torch._C._DisableTorchDispatch():  # what is asked of a sparse tensor is no op of the step
        return [inner for inner in tensors_with_memory(tensor)[0] if has_plain_storage(inner)]


def argument_keys(args: Any, kwargs: Any) -> set[int]:
    """Returns the storage keys of all tensor arguments."""
    keys: set[int] = set()
    _collect_keys(args, keys)
    if kwargs:
        _collect_keys(kwargs.values(), keys)
    return keys


def _collect_keys(items: Any, keys: set[int]) -> None:
    # This runs for every op of every step, and generators would be slower.
    for item in items:
        if isinstance(item, torch.Tensor):
            if has_plain_storage(item):
                keys.add(storage_of(item)._cdata)
            else:
                keys.update(map(storage_key, _ordinary_inside(item)))
        elif isinstance(item, (list, tuple)):
            _collect_keys(item, keys)
        elif isinstance(item, dict):
            _collect_keys(item.values(), keys)


def new_tensors(
    written: dict[int, torch.Tensor], outputs: list[torch.Tensor], read_keys: set[int]
) -> tuple[torch.Tensor, ...]:
    """Returns one tensor for each storage with a new value after an op: results first, then other written arguments.

    Args:
        written: the result of `written_tensors` before the op ran.
        outputs: the tensors among its results, in order.
        read_keys: storages of all its tensor arguments. A result in one of them that was not written is an alias that
            the schema does not declare, such as that of `_unsafe_view`.
    """
    if len(outputs) == 1 and not written:  # most ops
        only = outputs[0]
        return (only,) if may_move(only) and storage_key(only) not in read_keys else ()
    remaining, seen, tensors = dict(written), set[int](), []
    for tensor in outputs:
        if not may_move(tensor):
            continue
        key = storage_key(tensor)
        if key in seen or (key not in written and key in read_keys):
            continue
        seen.add(key)
        remaining.pop(key, None)
        tensors.append(tensor)
    return (*tensors, *remaining.values())

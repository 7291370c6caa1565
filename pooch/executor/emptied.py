"""Values whose bytes leave the device while the program still holds them.

A storage is emptied and refilled in place, so tensors on it stay valid. Nothing may read it while it is empty: the
dispatch mode intercepts every op before it runs, and `RawLooks` intercepts reads that are not ops. Where neither is
active any longer (the region ends, an exception leaves it, the step leaves the path), everything is refilled first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ground.errors import TierError
from ..machine import Value
from ..torchtools.effects import StorageMap
from ..torchtools.tensors import bytes_of, storage_key, tensors_with_memory
from .cursor import Cursor
from .engines.health import TierHealth
from .statistics import RunStats

MakeAgain = Callable[[int], torch.UntypedStorage]


class EmptiedStorages:
    """Empties and refills the storages of one step.

    Args:
        stats: Counters of the step, updated in place.
        make_again: Replays a value, given its number.
        health: Notes what is wrong with the tier.
        cursor: Is told whose reads have to be looked at.

    Attributes:
        away: Maps storage keys to the values of storages that are empty or being refilled. Entries of storages that
            the program has released may remain.
    """

    def __init__(self, stats: RunStats, make_again: MakeAgain, health: TierHealth, cursor: Cursor) -> None:
        self._stats, self._make_again, self._health, self._cursor = stats, make_again, health, cursor
        self.away: dict[int, Value] = {}

    def empty(self, value: Value) -> None:
        """Free the bytes, unless their address was handed out or the storage cannot be resized."""
        storage = value.home()
        if storage is None or value.handed_out or not storage.resizable() or self.is_away(value):
            return
        value.size_bytes = storage.nbytes()
        value.storage = None
        self.away[storage._cdata] = value
        self._cursor.note_away(storage._cdata, True)
        storage.resize_(0)
        self._stats.emptied_bytes += value.size_bytes

    def refill(self, value: Value) -> None:
        """Allocate the bytes and start to fill them, unless the program released the value or it is back already."""
        storage = self._home_if_away(value)
        if storage is not None and value.ticket is None:
            self._start(value, storage)
            value.storage = storage

    def arrived(self, value: Value) -> None:
        """Mark a value as readable, once compute waits for its copy in."""
        storage = value.home()
        if storage is not None:
            self._is_back(storage._cdata)

    def _is_back(self, key: int) -> None:
        self.away.pop(key, None)
        self._cursor.note_away(key, False)

    def look(self, arguments: Any) -> None:
        """Bring back what the arguments refer to before they are read; everything, if that cannot be determined."""
        tensors, hidden = tensors_with_memory(arguments)
        if hidden:
            self.restore()
            return
        for tensor in tensors:
            value = self.away.get(storage_key(tensor))
            if value is not None:
                self.bring_back(value)

    def is_away(self, value: Value) -> bool:
        """Whether the program holds the value without its bytes."""
        return self._home_if_away(value) is not None

    def bring_back(self, value: Value) -> None:
        """Bring the bytes of one value back now.

        Raises:
            TierError: If they cannot be read back. The memory is allocated, but its contents are lost.
        """
        storage = self._home_if_away(value)
        if storage is None:
            return
        if value.ticket is None:
            self._stats.late_swaps += 1
            self._start(value, storage)
        ticket, value.ticket = value.ticket, None
        if ticket is not None:
            self._stats.host_stall_ms += ticket.wait()
            if ticket.error is not None:
                fault = self._health.failed(ticket.error, is_told=False)
                text = f"an emptied activation cannot be read back: {fault}; repeat the step"
                raise TierError(text, fault.kind) from ticket.error
        self._is_back(storage._cdata)

    def restore(self) -> None:
        """Bring back everything that the program still holds.

        Raises:
            TierError: If any value cannot be read back.
        """
        failure: TierError | None = None
        for key, value in list(self.away.items()):
            try:
                self.bring_back(value)
            except TierError as error:
                failure = error
            self._is_back(key)
        if failure is not None:
            raise failure

    def hand_out(self, arguments: Any, values: StorageMap, planned: dict[int, Value]) -> None:
        """Keep the arguments in place from now on, since the program obtains their address."""
        for tensor in tensors_with_memory(arguments)[0]:
            number = values.get(storage_key(tensor))
            if number in planned:
                planned[number].handed_out = True

    def _home_if_away(self, value: Value) -> torch.UntypedStorage | None:
        storage: torch.UntypedStorage | None = value.home()
        if storage is None or self.away.get(storage._cdata) is not value:
            return None
        return storage

    def _start(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Start to fill a storage, whose memory is allocated in the order of compute."""
        storage.resize_(value.size_bytes)
        if value.is_copied:
            assert value.place is not None
            value.ticket = value.place.copy_in(storage)
            self._stats.swapped_in_bytes += value.size_bytes
        else:
            bytes_of(storage).copy_(bytes_of(self._make_again(value.number)))

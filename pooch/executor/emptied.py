"""Values whose bytes leave while the program still holds them.

The storage is emptied in place and filled again in place, so whoever holds a tensor on it holds it all the time. While
it is empty nobody may read it: the dispatch mode shows every op before it runs, `RawLooks` shows what is no op, and
where neither watches any more (the region ends, an exception leaves it, the plan is left) everything is filled first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pooch.errors import TierError
from pooch.executor.engines.protocol import Arena
from pooch.executor.records import Record
from pooch.executor.statistics import RunStats
from pooch.torchtools.effects import StorageMap
from pooch.torchtools.tensors import storage_key, tensors_with_memory

MakeAgain = Callable[[], Callable[[int], torch.UntypedStorage] | None]


class EmptiedStorages:
    """The values of one step that are away while the program holds them.

    Args:
        arena: where swapped ones are. offsets: {value: its room there}. stats: counts what leaves and comes back.
        make_again: gives what replays a recomputed value, as long as the step lives.

    Attributes:
        away: by storage key: what is empty or being filled (and what was, where the program has let go since).
    """

    def __init__(self, arena: Arena, offsets: dict[int, int], stats: RunStats, make_again: MakeAgain) -> None:
        self._arena, self._offsets, self._stats, self._make_again = arena, offsets, stats, make_again
        self.away: dict[int, Record] = {}

    def empty(self, record: Record) -> None:
        """Take the bytes; not where their address was handed out or belongs to somebody else."""
        storage = record.home()
        if storage is None or record.handed_out or not storage.resizable() or self.is_away(record):
            return
        record.size_bytes = storage.nbytes()
        record.storage = None
        self.away[storage._cdata] = record
        storage.resize_(0)
        self._stats.emptied_bytes += record.size_bytes

    def refill(self, record: Record) -> None:
        """Give bytes again and start to copy back, unless the program let go or somebody asked for it before."""
        storage = self._home_if_away(record)
        if storage is not None and record.ticket is None:
            self._start(record, storage)
            record.storage = storage

    def arrived(self, record: Record) -> None:
        """Compute waits for the copy back: it may be read."""
        storage = record.home()
        if storage is not None:
            self.away.pop(storage._cdata, None)

    def look(self, arguments: Any) -> None:
        """Somebody is about to read some arguments: have them there, all values where it cannot be told which."""
        tensors, hidden = tensors_with_memory(arguments)
        if hidden:
            self.restore()
            return
        for tensor in tensors:
            record = self.away.get(storage_key(tensor))
            if record is not None:
                self.bring_back(record)

    def is_away(self, record: Record) -> bool:
        """Whether the program holds it without its bytes."""
        return self._home_if_away(record) is not None

    def bring_back(self, record: Record) -> None:
        """Have the bytes in place now.

        Raises:
            TierError: they cannot be read back; the memory is there, its contents are lost.
        """
        storage = self._home_if_away(record)
        if storage is None:
            return
        if record.ticket is None:
            self._stats.late_swaps += 1
            self._start(record, storage)
        ticket, record.ticket = record.ticket, None
        if ticket is not None:
            self._stats.host_stall_ms += ticket.wait()
            if ticket.error is not None:
                raise TierError(f"an emptied activation cannot be read back ({ticket.error})") from ticket.error
        del self.away[storage._cdata]

    def restore(self) -> None:
        """Have everything in place that anybody but us still holds.

        Raises:
            TierError: something cannot be read back.
        """
        failure: TierError | None = None
        for key, record in list(self.away.items()):
            try:
                self.bring_back(record)
            except TierError as error:
                failure = error
            self.away.pop(key, None)
        if failure is not None:
            raise failure

    def hand_out(self, arguments: Any, values: StorageMap, records: dict[int, Record]) -> None:
        """Somebody gets the address of some arguments: they stay in place from now on."""
        for tensor in tensors_with_memory(arguments)[0]:
            value = values.get(storage_key(tensor))
            if value in records:
                records[value].handed_out = True

    def _home_if_away(self, record: Record) -> torch.UntypedStorage | None:
        storage = record.home()
        if storage is None or self.away.get(storage._cdata) is not record:
            return None
        return storage

    def _start(self, record: Record, storage: torch.UntypedStorage) -> None:
        """Begin to fill a storage, which takes its memory in the order of compute."""
        storage.resize_(record.size_bytes)
        if record.copied_out:
            record.ticket = self._arena.copy_in(storage, self._offsets[record.value])
            self._stats.swapped_in_bytes += record.size_bytes
        else:
            make_again = self._make_again()
            assert make_again is not None, "the step is under way"
            _bytes_of(storage).copy_(_bytes_of(make_again(record.value)))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""A memory trace without an allocator: storages of fake tensors are born and die on a clock that counts events.

The trace has the form of the allocator's own, so that the same assembly makes slots, lives and points of both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pooch.torchtools.effects import argument_keys
from pooch.torchtools.memory_trace import MemoryTrace, Span
from pooch.torchtools.reported_memory import MemoryEvent
from pooch.torchtools.tensors import find_tensors, has_plain_storage


@dataclass
class _Block:
    """A stretch of memory. `holders`: storages that stand for it; several where one took it over in place."""

    address: int
    size_bytes: int
    holders: int = 1


class FakeTrace:
    """Records births, deaths, and what happens between them.

    Args:
        granularity_bytes: what the allocator rounds each allocation up to.

    Attributes:
        times_ms: cost of each operator of the backward pass, by when it started.
    """

    def __init__(self, granularity_bytes: int = 1) -> None:
        self._granularity = granularity_bytes
        self._clock = 0
        self._addresses = 0
        self._events: list[MemoryEvent] = []
        self._markers: list[Span] = []
        self._operators: list[Span] = []
        self._blocks: dict[int, _Block] = {}
        self.times_ms: dict[int, float] = {}

    def now(self) -> int:
        """A moment later than all before."""
        self._clock += 1
        return self._clock

    def address(self, storage: torch.UntypedStorage) -> int:
        """Where the storage lies: no other has it, ever; 0 for what existed before the step."""
        block = self._blocks.get(storage._cdata)
        return 0 if block is None else block.address

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage was born in this trace, and lives."""
        return storage._cdata in self._blocks

    def born(self, storage: torch.UntypedStorage) -> None:
        """An allocation; its end is seen when the storage goes."""
        rounded = -(-storage.nbytes() // self._granularity) * self._granularity
        self._addresses += 1
        self._hold(storage, _Block(self._addresses, rounded))
        self._allocated(self._addresses, rounded)

    def results(self, args: Any, kwargs: Any, result: Any) -> None:
        """What an operator returned: storages that are neither known nor its arguments' are new."""
        old = argument_keys(args, kwargs)
        for tensor in find_tensors(result):
            if has_plain_storage(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in old and not self.knows(storage):
                    self.born(storage)

    def took_over(self, storage: torch.UntypedStorage, old: torch.UntypedStorage) -> None:
        """The storage is really the old one, written in place; fake tensors cannot say so."""
        block = self._blocks[old._cdata]
        block.holders += 1
        self._hold(storage, block)

    def passing(self, size_bytes: int) -> None:
        """Memory that an operator takes beyond its results and gives back before it ends."""
        if size_bytes > 0:
            self._addresses += 1
            self._allocated(self._addresses, size_bytes)
            self._allocated(self._addresses, -size_bytes)

    @contextmanager
    def marked(self, name: str, within: str = "") -> Iterator[None]:
        """A named stretch. `within`: of the kernel of an operator, the one that called it."""
        start = self.now()
        try:
            yield
        finally:
            self._markers.append(Span(name, start, self.now(), within=within))

    def operator(self, name: str, start: int, time_ms: float, node: str) -> None:
        """An operator of the backward pass, from `start` until now; `time_ms`: what it costs."""
        self._operators.append(Span(name, start, self.now(), node))
        self.times_ms[start] = time_ms

    def finish(self) -> MemoryTrace:
        """What was recorded so far."""
        by_start = sorted(self._markers, key=lambda span: span.start_ns)
        return MemoryTrace(tuple(self._events), tuple(by_start), tuple(self._operators))

    def _hold(self, storage: torch.UntypedStorage, block: _Block) -> None:
        key = storage._cdata
        self._blocks[key] = block
        weakref.finalize(storage, _storage_gone, weakref.ref(self), key).atexit = False

    def _allocated(self, address: int, size_bytes: int) -> None:
        if size_bytes:
            self._events.append(MemoryEvent(self.now(), address, size_bytes))

    def storage_gone(self, key: int) -> None:
        """Nobody refers to the storage any more."""
        block = self._blocks.pop(key)
        block.holders -= 1
        if block.holders == 0:
            self._allocated(block.address, -block.size_bytes)


def _storage_gone(trace: weakref.ref[FakeTrace], key: int) -> None:
    alive = trace()
    if alive is not None:
        alive.storage_gone(key)

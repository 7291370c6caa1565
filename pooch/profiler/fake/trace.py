"""A memory trace without an allocator: fake storages are allocated and freed on a clock that counts events.

The trace has the same form as the allocator's own, so the same code derives slots, lives and points from both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...ground.units import round_up
from ...torchtools.effects import argument_keys
from ...torchtools.memory_trace import MemoryTrace, Span
from ...torchtools.reported_memory import MemoryEvent
from ...torchtools.tensors import FreedStorages, find_tensors, has_plain_storage


@dataclass
class _Block:
    """A block of memory with a unique address; several storages stand for it if one took it over in place."""

    address: int
    size_bytes: int
    holders: int = 1


class FakeTrace:
    """Records allocations, each rounded up to a multiple of the granularity, frees, and what happens between them.

    Attributes:
        times_ms: {start time: cost in ms} of each operator of the backward pass.
    """

    def __init__(self, granularity_bytes: int = 1) -> None:
        self._granularity = granularity_bytes
        self._clock = 0
        self._addresses = 0
        self._events: list[MemoryEvent] = []
        self._markers: list[Span] = []
        self._operators: list[Span] = []
        self._blocks: dict[int, _Block] = {}
        self._freed = FreedStorages(self.storage_gone)
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.times_ms: dict[int, float] = {}

    def now(self) -> int:
        """Returns a time later than all earlier ones."""
        self._clock += 1
        return self._clock

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns the address of the storage, which is never reused; 0 for storages that existed before the step."""
        block = self._blocks.get(storage._cdata)
        return 0 if block is None else block.address

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the storage was allocated in this trace and is still alive."""
        return storage._cdata in self._blocks

    def results(self, args: Any, kwargs: Any, result: Any) -> None:
        """Records the results of an operator: storages that are neither known nor its arguments' are allocated.

        Their frees are recorded when the storages are gone.
        """
        old = argument_keys(args, kwargs)
        for tensor in find_tensors(result):
            if has_plain_storage(tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage._cdata not in old and not self.knows(storage):
                    rounded_bytes = round_up(storage.nbytes(), self._granularity)
                    self._addresses += 1
                    self._hold(storage, _Block(self._addresses, rounded_bytes))
                    self._allocated(self._addresses, rounded_bytes)

    def took_over(self, storage: torch.UntypedStorage, old: torch.UntypedStorage) -> None:
        """Records that the storage is actually the old one, modified in place, which fake tensors cannot express."""
        block = self._blocks[old._cdata]
        block.holders += 1
        self._hold(storage, block)

    def passing(self, size_bytes: int) -> None:
        """Records memory that an operator allocates beyond its results and frees before it ends."""
        if size_bytes > 0:
            self._addresses += 1
            self._allocated(self._addresses, size_bytes)
            self._allocated(self._addresses, -size_bytes)

    @contextmanager
    def marked(self, name: str, within: str = "") -> Iterator[None]:
        """Context manager that records a named range; `within` is the operator that called the one inside."""
        start = self.now()
        try:
            yield
        finally:
            self._markers.append(Span(name, start, self.now(), within=within))

    def operator(self, name: str, start: int, time_ms: float, node: str) -> None:
        """Records an operator of the backward pass that ends now, and the autograd node that runs it."""
        self._operators.append(Span(name, start, self.now(), node))
        self.times_ms[start] = time_ms

    def finish(self) -> MemoryTrace:
        """Returns what was recorded so far."""
        by_start = sorted(self._markers, key=lambda span: span.start_ns)
        return MemoryTrace(tuple(self._events), tuple(by_start), tuple(self._operators))

    def _hold(self, storage: torch.UntypedStorage, block: _Block) -> None:
        key = storage._cdata
        self._blocks[key] = block
        self._references[key] = self._freed.watch(storage, key)

    def _allocated(self, address: int, size_bytes: int) -> None:
        if size_bytes:
            self._events.append(MemoryEvent(self.now(), address, size_bytes))

    def storage_gone(self, key: int) -> None:
        """Called when nothing refers to the storage anymore."""
        block = self._blocks.pop(key)
        block.holders -= 1
        if block.holders == 0:
            self._allocated(block.address, -block.size_bytes)

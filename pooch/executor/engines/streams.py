"""The engine for devices with streams: two copy streams, events, and a pinned block of exactly the planned size.

All ordering is on the device: `wait` makes the compute stream wait for an event, and the host continues. A storage is
released only after the compute stream waits for its copy, so the caching allocator may reuse it at once.

The compute stream is the one that was current when the step began, regardless of the thread and stream of later calls:
autograd runs each node of the backward pass on the stream of its forward op, but a graph may be freed anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...ground.errors import TierError, first_line
from ...ground.units import format_bytes
from ...torchtools import accelerators
from ...torchtools.ranges import copy_range
from ...torchtools.tensors import bytes_of
from .free_room import FreeRoom
from .health import TierHealth
from .pinned import SWITCHED_OFF, Locking, PinnedBlock, give_block, locking_wanted, take_block
from .protocol import Purpose
from .step_clock import StepClock
from .tier_room import TierRoom

PAGEABLE = "host memory that is not page-locked"


@dataclass
class StreamTicket:
    """One copy: the events around it, and the arena that knows the compute streams."""

    before: torch.Event
    event: torch.Event
    arena: StreamArena
    moved_bytes: int
    error: BaseException | None = None

    @property
    def copy_ms(self) -> float | None:
        """What the copy took on its stream in ms. None as long as it has not ended."""
        return float(self.before.elapsed_time(self.event)) if self.is_done() else None

    def is_done(self) -> bool:
        """Whether the copy has ended."""
        return bool(self.event.query())

    def wait(self) -> float:
        """Make the compute streams wait. The host does not."""
        self.arena.await_copy(self.event)
        return 0.0


class StreamArena:
    """Room in one pinned block of host memory.

    Args:
        engine: The engine that opened the arena.
        block: The pinned block, or None if nothing is swapped.
        purpose: What the engine reuses the block for afterwards.
    """

    def __init__(self, engine: StreamEngine, block: PinnedBlock | None, purpose: Purpose) -> None:
        self._engine, self._block, self._purpose = engine, block, purpose
        self._seen = [engine.current_stream()]
        self.clock = StepClock(self._seen[0], engine.device)
        self._out_events: dict[int, torch.Event] = {}
        self._read_rooms: list[tuple[int, int, torch.Event]] = []  # begin, end, event at the end of the copy in
        self._last: dict[torch.Stream, torch.Event] = {}
        # What copies still read or fill, by the event at their end. Holding it prevents its memory from being reused
        # before compute waits for the copy.
        self._under_way: dict[torch.Event, torch.UntypedStorage] = {}

    def is_beside(self) -> bool:
        """Whether the calling thread computes on a stream other than the arena's."""
        return self._engine.current_stream() != self._seen[0]

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let the calling thread compute on the arena's stream inside; its own stream waits for that afterwards."""
        home, current = self._seen[0], self._engine.current_stream()
        if home == current:
            yield
            return
        home.wait_event(self._engine.mark(current))
        try:
            with accelerators.on_stream(home):
                yield
        finally:
            current.wait_event(self._engine.mark(home))

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """Order copies with the calling thread's stream from now on, since it works on these planned storages.

        The allocator does not reuse the storages before that stream is done with them.
        """
        current = self._engine.current_stream()
        if current not in self._seen:
            self._seen.append(current)
        for storage in storages:
            bytes_of(storage).record_stream(current)

    def compute_streams(self) -> list[torch.Stream]:
        """Return the streams that copies wait for, and that wait for copies."""
        current = self._engine.current_stream()
        if self._engine.is_aside():
            return [current]
        return self._seen if current in self._seen else [*self._seen, current]

    def await_copy(self, event: torch.Event) -> None:
        """Make compute wait for a copy. The clock records the wait, except for copies issued in `aside`."""
        for stream in self.compute_streams():
            if stream == self._seen[0] and not self._engine.is_aside():
                self.clock.wait(event)
            else:
                stream.wait_event(event)
        self._under_way.pop(event, None)

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> StreamTicket:
        """Copy a storage to the host, after everything issued so far is computed."""
        stream = self._engine.out_stream
        self._wait_for_compute(stream)
        end_bytes = offset_bytes + storage.nbytes()
        for begin, end, event in self._read_rooms:
            if begin < end_bytes and offset_bytes < end:
                stream.wait_event(event)  # the previous value in this room must be back
        before = self._engine.mark(stream, timed=True)
        with torch._C._DisableTorchDispatch(), accelerators.on_stream(stream):  # no op of the program's
            self._to_room(bytes_of(storage), offset_bytes)
        event = self._out_events[offset_bytes] = self._marked(stream)
        self._under_way[event] = storage
        return StreamTicket(before, event, self, storage.nbytes())

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> StreamTicket:
        """Fill a newly allocated storage, after its copy out."""
        stream = self._engine.in_stream
        self._wait_for_compute(stream)
        stream.wait_event(self._out_events[offset_bytes])
        before = self._engine.mark(stream, timed=True)
        with torch._C._DisableTorchDispatch():  # a mode such as PyTorch's stream sanitizer takes `set_` for a write
            raw = bytes_of(storage)
            with accelerators.on_stream(stream):
                self._from_room(raw, offset_bytes)
            self._tell_allocator(raw)
        event = self._marked(stream)
        self._under_way[event] = storage
        self._read_rooms.append((offset_bytes, offset_bytes + storage.nbytes(), event))
        return StreamTicket(before, event, self, storage.nbytes())

    def _wait_for_compute(self, stream: torch.Stream) -> None:
        for compute in self.compute_streams():
            stream.wait_event(self._engine.mark(compute))

    def _marked(self, stream: torch.Stream) -> torch.Event:
        event = self._last[stream] = self._engine.mark(stream, timed=True)
        return event

    def _tell_allocator(self, raw: torch.Tensor) -> None:
        """Report every stream that reads the storage, which the allocator ties to the current one."""
        streams = self.compute_streams()
        if len(streams) > 1:
            for stream in streams:
                raw.record_stream(stream)

    def _to_room(self, raw: torch.Tensor, offset_bytes: int) -> None:
        with copy_range(True, raw):
            for place, part in self._rooms(offset_bytes, raw.numel()):
                part.copy_(raw[place : place + part.numel()], non_blocking=True)

    def _from_room(self, raw: torch.Tensor, offset_bytes: int) -> None:
        with copy_range(False, raw):
            for place, part in self._rooms(offset_bytes, raw.numel()):
                raw[place : place + part.numel()].copy_(part, non_blocking=True)

    def _rooms(self, offset_bytes: int, size_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        assert self._block is not None, "nothing is swapped under this plan"
        return self._block.pieces(offset_bytes, size_bytes)

    def close(self) -> None:
        """Return the block to the engine.

        Compute waits for the last copy in each direction: a step whose backward pass never ran may end with pending
        copies, and the memory that they read and fill is about to be reused.
        """
        for event in self._last.values():
            self.await_copy(event)
        self.clock.stop()
        if self._block is not None:
            self._block.in_use_until = tuple(self._last.values())
            self._engine.take_back(self._block, self._purpose)
            self._block = None
        self._under_way.clear()
        self._last.clear()
        self._out_events.clear()
        self._read_rooms.clear()


@dataclass
class _Aside(threading.local):
    """Whether the current thread's copies are not ordered after compute."""

    active: bool = field(default=False)


class StreamEngine:
    """Two copy streams, and pinned blocks that are reused from step to step.

    Args:
        device: The device, which must have streams.
        locking: How blocks are locked. None: as far as possible, unless `POOCH_PAGE_LOCKED=0`.

    Attributes:
        room: How much the blocks take.
        health: What is wrong with host memory.
    """

    has_two_lanes = True  # there is a stream for each direction

    def __init__(self, device: torch.device, locking: Locking | None = None) -> None:
        self.device, self._locking = device, locking or locking_wanted()
        self.room = TierRoom()
        self.health = TierHealth("pinned host memory", "free host memory", _explained)
        self.out_stream = accelerators.new_stream(device)
        self.in_stream = accelerators.new_stream(device)
        self._aside = _Aside()
        self._is_pageable = self._locking == "never"
        purposes: tuple[Purpose, ...] = ("step", "snapshot", "copies")
        self._free = {purpose: FreeRoom[PinnedBlock](give_block) for purpose in purposes}
        self._closed = False

    @property
    def description(self) -> str:
        """Description of the tier for reports."""
        return PAGEABLE if self._is_pageable else "pinned host memory"

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream on the engine's device, which may differ from the thread's current device."""
        return accelerators.current_stream(self.device)

    def is_aside(self) -> bool:
        """Whether the calling thread is inside `aside`."""
        return self._aside.active

    def mark(self, stream: torch.Stream, *, timed: bool = False) -> torch.Event:
        """Record an event after everything issued on a stream so far.

        Args:
            stream: The stream.
            timed: Whether to remember when the stream came to it.
        """
        event = accelerators.new_event(self.device, timed=timed)
        event.record(stream)
        return event

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> StreamArena:
        """Open an arena on a pinned block of at least `size_bytes`: a free one, or a new one. 0 bytes need no block."""
        if size_bytes == 0:
            return StreamArena(self, None, purpose)
        # Before a block is locked, those that are too small are unlocked, so that the host never has both.
        block = self._free[purpose].take(size_bytes) or self._new_block(size_bytes)
        for event in block.in_use_until:  # the previous step may have ended on another stream
            self.out_stream.wait_event(event)
        return StreamArena(self, block, purpose)

    def _new_block(self, size_bytes: int) -> PinnedBlock:
        self.room.check(size_bytes)
        block = take_block(size_bytes, self.device, self._locking)
        self.room.hold(block, block.size_bytes)
        self._look_at(block)
        return block

    def _look_at(self, block: PinnedBlock) -> None:
        """Tell once where memory cannot be locked, as copies are slower then than those that were measured."""
        if block.pageable_bytes > 0 and not self._is_pageable:
            self._is_pageable = True
            self.health.tell(
                f"{format_bytes(block.pageable_bytes)} of {format_bytes(block.size_bytes)} of host memory cannot be "
                f"page-locked ({block.why_pageable}), so copies there are slower and the host waits for them: look at "
                f"`ulimit -l` and at limits of the container, set a smaller host budget, or plan for it with "
                f"{SWITCHED_OFF}"
            )

    def probe(self) -> bool:
        """Return True: whether memory can be locked depends on how much of it is asked for."""
        return True

    @contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """Replace the compute stream with a new stream for this thread."""
        stream = accelerators.new_stream(self.device)
        self._aside.active = True
        try:
            with accelerators.on_stream(stream):
                yield stream.synchronize
        finally:
            self._aside.active = False

    def take_back(self, block: PinnedBlock, purpose: Purpose) -> None:
        """Take a step's block back. Nothing is unlocked here, since that would block on the next step."""
        if self._closed:
            give_block(block)
        else:
            self._free[purpose].give(block)

    def close(self) -> None:
        """Unlock the blocks once the device is done with them, or keep them for the next engine inside `blocks_kept`.

        Blocks of running steps follow when the steps end.
        """
        self._closed = True
        for free in self._free.values():
            free.clear()


def _explained(error: BaseException) -> TierError:
    """Return what is wrong with host memory, in one line that names the remedy."""
    if isinstance(error, TierError):
        return error
    text = f"copying to host memory failed ({type(error).__name__}: {first_line(error)}): repeat the step"
    return TierError(text, type(error).__name__)

"""The CPU engine: one copy thread, and an unnamed spill file per step, so that a kill leaves nothing behind.

The thread is one of C++ (`torchtools/copier`), or where that cannot be built, the one of Python that is here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, get_args

import torch

from ...ground.errors import TierError, first_line
from ...ground.units import round_up
from ...machine.values import Ticket
from ...torchtools import copier, moving_memory
from ...torchtools.copier import has_died
from ...torchtools.endings import end_with
from ...torchtools.malloc import raise_thresholds
from ...torchtools.moving_memory import memory_moves
from ...torchtools.ranges import copy_range
from ...torchtools.spill_directory import CHANGED, SpillDirectory
from .free_room import FreeRoom
from .health import LEAST_BYTES, CopyRates, TierHealth
from .protocol import Purpose
from .spill_file import ALIGNMENT_BYTES, CHUNK_BYTES, Mover, SpillFile, new_buffer
from .tier_room import TierRoom

# How often a thread that waits for a copy checks that the copy thread is alive.
LOOK_AGAIN_S = 0.2
MOST_COPIES_BYTES = 16 * 2**20  # of a file for copies that waits for the next step, where making one takes long
FIRST_LOOK = 256  # at so many copies of an arena those that have ended are forgotten


@dataclass
class CpuTicket:
    """One copy. The copy thread releases the storage before it reports completion."""

    storage: torch.UntypedStorage | None
    moved_bytes: int
    offset_bytes: int
    outwards: bool
    mover: Mover
    thread: threading.Thread
    rates: CopyRates
    error: BaseException | None = None
    copy_ms: float | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _is_finalizing = staticmethod(sys.is_finalizing)  # the names of this module may be gone by then

    def is_done(self) -> bool:
        """Whether the copy has ended."""
        return self._done.is_set()

    def wait(self) -> float:
        """Block until the copy is complete, and return how long that took in ms.

        If the copy thread has died, the copy ends with an error. There is no waiting while the interpreter shuts down,
        when threads no longer run, or in the copy thread itself, where the garbage collector may free a step: the copy
        holds what it needs until it ends.
        """
        if self._done.is_set() or self._is_finalizing() or threading.current_thread() is self.thread:
            return 0.0
        start = time.perf_counter()
        while not (sys.is_finalizing() or self._done.wait(LOOK_AGAIN_S)):
            if not self.thread.is_alive() and not self._done.is_set():
                self.error = has_died()
                self.storage = None
                self._done.set()
        return (time.perf_counter() - start) * 1000

    def run(self, buffer: mmap.mmap) -> None:
        """Perform the copy on the copy thread. An error is kept for the thread that waits."""
        try:
            assert self.storage is not None
            move = self.mover.write if self.outwards else self.mover.read
            start_s = time.perf_counter()
            move(self.storage, self.offset_bytes, buffer)
            elapsed_s = time.perf_counter() - start_s
            self.copy_ms = 1000 * elapsed_s
            self.rates.note(self.outwards, self.storage.nbytes(), elapsed_s)
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits)
            self.error = error.with_traceback(None)  # whose frames would hold the bytes as long as the ticket is held
        finally:
            self.storage = None
            self._done.set()


class _Refused:
    """A copy to a file of the parent's that a forked process would have made: what was to leave stays."""

    copy_ms, moved_bytes = None, 0

    def __init__(self) -> None:
        self.error = TierError("a forked process does not write to its parent's files", "fork")

    def is_done(self) -> bool:
        """Return True: it does not begin."""
        return True

    def wait(self) -> float:
        """Return at once."""
        return 0.0


class CopyRoom(Protocol):
    """Room in one file."""

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start copying a storage to the file, and keep both alive until somebody learns that the copy has ended."""

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start filling a storage from the file in the same way. The copy out comes first: copies are in order."""

    def finish(self) -> None:
        """Wait for all copies of the room."""


class Copier(Protocol):
    """A thread that copies. After a fork, or if it has died, the next copy starts another one."""

    def room(self, file: SpillFile, descriptor: int, is_checked: bool, /) -> CopyRoom:
        """Return room in a file, which is kept alive."""

    def is_alive(self) -> bool:
        """Whether the thread runs."""

    def stop(self) -> None:
        """Complete what was submitted, then end the thread."""


def new_copier(rates: CopyRates) -> Copier:
    """Return a thread that copies.

    Args:
        rates: Is told how fast copies are.

    Raises:
        TierError: If there is no memory for its buffer.
    """
    module = copier.LIBRARY.get()
    if module is None:
        return CopyThread(rates)
    return module.Copier(CHUNK_BYTES, LEAST_BYTES, rates.note, copier.packs_copies())  # type: ignore[no-any-return]


class _ThreadRoom:
    """Room in one file, used through a thread of Python."""

    def __init__(self, thread: CopyThread, mover: Mover) -> None:
        self._thread, self._mover = thread, mover
        self._last: CpuTicket | None = None

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        return self._submit(storage, offset_bytes, True)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        return self._submit(storage, offset_bytes, False)

    def _submit(self, storage: torch.UntypedStorage, offset_bytes: int, outwards: bool) -> CpuTicket:
        thread = self._thread
        worker = thread.ensure()
        ticket = CpuTicket(storage, storage.nbytes(), offset_bytes, outwards, self._mover, worker, thread.rates)
        thread.submit(ticket)
        self._last = ticket  # not before: nobody would end what an interrupt has kept from being submitted
        return ticket

    def finish(self) -> None:
        if self._last is not None:
            self._last.wait()
            self._last = None


class CopyThread:
    """Runs tickets in order, in a daemon thread that does not keep the interpreter alive.

    Args:
        rates: Is told how fast copies are.
    """

    def __init__(self, rates: CopyRates) -> None:
        self.rates = rates
        self._process = os.getpid()
        self._start()

    def _start(self) -> None:
        buffer = new_buffer()  # here, so that a lack of memory is raised in the caller
        self._tickets: queue.SimpleQueue[CpuTicket | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self._tickets, buffer), name="pooch-copy", daemon=True)
        self.thread.start()

    def room(self, file: SpillFile, descriptor: int, is_checked: bool) -> _ThreadRoom:
        """Return room in a file."""
        return _ThreadRoom(self, Mover(file, is_checked))

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self.thread.is_alive()

    def ensure(self) -> threading.Thread:
        """Return a live copy thread. After a fork, or if the thread has died, a new thread and queue are started."""
        if os.getpid() != self._process or not self.thread.is_alive():
            self._process = os.getpid()
            self._start()
        return self.thread

    def submit(self, ticket: CpuTicket) -> None:
        """Append a ticket to the queue."""
        self._tickets.put(ticket)

    def stop(self) -> None:
        """Complete what was submitted, then end the thread.

        The copy thread may call this itself, if the garbage collector frees an engine there; it does not join itself.
        """
        if os.getpid() == self._process:
            self._tickets.put(None)
            if threading.current_thread() is not self.thread:
                self.thread.join()


def _serve(tickets: queue.SimpleQueue[CpuTicket | None], buffer: mmap.mmap) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.run(buffer)
        del ticket


_HERE = nullcontext()


class CpuArena:
    """Room in one spill file, or none at all, used through the engine's copy thread."""

    __slots__ = ("__weakref__", "_engine", "_file", "_next_look", "_process", "_purpose", "_room", "_under_way")
    clock = None

    def __init__(self, engine: CpuEngine, file: SpillFile | None, purpose: Purpose) -> None:
        self._engine, self._process = engine, os.getpid()
        self._file, self._purpose = file, purpose
        self._room = None if file is None else engine.copier.room(file, file.descriptor, engine.check)
        self._under_way: dict[int, Ticket] = {}  # the last copy of each storage
        self._next_look = FIRST_LOOK

    def is_beside(self) -> bool:
        """Return False, since the CPU has no streams."""
        return False

    def at_home(self) -> AbstractContextManager[None]:
        """Return an empty context, since the CPU has no streams."""
        return _HERE

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """Do nothing, since the CPU has no streams."""

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start copying a storage to the file, unless it is that of the parent of this process."""
        if os.getpid() != self._process:
            return _Refused()
        assert self._room is not None, "the arena is closed, or has no room"
        with copy_range(True, storage):
            return self._started(self._room.copy_out(storage, offset_bytes), storage)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start filling a storage from the file."""
        assert self._room is not None, "the arena is closed, or has no room"
        with copy_range(False, storage):
            return self._started(self._room.copy_in(storage, offset_bytes), storage)

    def _started(self, ticket: Ticket, storage: torch.UntypedStorage) -> Ticket:
        if len(self._under_way) >= self._next_look:
            self.forget_ended()
        self._under_way[storage._cdata] = ticket
        if memory_moves():
            ticket.wait()
        return ticket

    def forget_ended(self) -> None:
        """Forget the copies that have ended. The native watch has begun some of them by itself."""
        self._under_way = {key: each for key, each in self._under_way.items() if not each.is_done()}
        self._next_look = max(FIRST_LOOK, 2 * len(self._under_way))

    def finish_copies_of(self, key: int) -> None:
        """Wait for the copies of a storage, whose `_cdata` is given."""
        ticket = self._under_way.get(key)
        if ticket is not None:
            ticket.wait()

    def close(self) -> None:
        """Wait for the last copy, then return the file to the engine."""
        if self._room is not None:
            self._room.finish()
            self._under_way.clear()
        file, self._file, self._room = self._file, None, None  # a reference to the arena must not keep the file
        if file is not None:
            self._engine.take_back(file, self._purpose)


class CpuEngine:
    """Spill files, reused from step to step, and the copy thread.

    Steps hold the engine, and may begin and end in any thread. An engine that is freed without being closed releases
    its files and its thread as well.

    Args:
        directory: Directory of the files. None uses POOCH_SPILL_DIRECTORY, or the system's temporary directory.
        check: Whether to compare a checksum of 64 bits of what is read back with that of what was written.

    Attributes:
        copier: The copy thread.
        room: How much the files take.
        health: What is wrong with the directory.

    Raises:
        TierError: If there is no memory for the copy buffer.
    """

    has_two_lanes = False  # one thread performs all copies

    def __init__(self, directory: str | Path | None = None, *, check: bool = True) -> None:
        self.check = check
        self._directory = SpillDirectory.of(directory)
        self.room = TierRoom()
        self.health = TierHealth(
            self._directory.name, self._directory.another, partial(_explained, self._directory, os.getpid())
        )
        self._free = {purpose: FreeRoom[SpillFile]() for purpose in get_args(Purpose)}
        # By running steps. Those alone hold them: what an interrupt has kept from ending must not keep its file.
        self._in_use: weakref.WeakSet[SpillFile] = weakref.WeakSet()
        self._closed = False
        self._process = os.getpid()
        self.copier = new_copier(self.health.rates)
        self._arenas: weakref.WeakSet[CpuArena] = weakref.WeakSet()
        self._finalizer = end_with(self, self.copier.stop)
        raise_thresholds()
        moving_memory.listen(self)

    @property
    def description(self) -> str:
        """Description of the tier for reports."""
        return f"spill file in {self._directory.path}"

    def probe(self) -> bool:
        """Whether a file can be made and written in the directory now. If not, what is wrong is noted and told."""
        try:
            file = SpillFile(self._directory, ALIGNMENT_BYTES)
            Mover(file, self.check).write(torch.UntypedStorage(ALIGNMENT_BYTES), 0, new_buffer())
        except (TierError, OSError) as error:
            self.health.failed(error)
            return False
        return True

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> CpuArena:
        """Open an arena of `size_bytes` on a free file of about that size, or a new one, which costs little.

        Without bytes it needs no file.
        """
        if not size_bytes:
            return CpuArena(self, None, purpose)
        if os.getpid() != self._process:  # a fork must not write to its parent's files
            self._process = os.getpid()
            self._in_use.clear()
            self._forget_free()
        padded = round_up(size_bytes, ALIGNMENT_BYTES) + ALIGNMENT_BYTES
        file = self._free[purpose].take(padded) or self._new_file(padded)
        self._in_use.add(file)
        arena = CpuArena(self, file, purpose)
        self._arenas.add(arena)
        return arena

    def before_move(self, key: int) -> Callable[[], None]:
        """Wait for the copies of a storage that is about to get other memory."""
        for arena in list(self._arenas):
            arena.finish_copies_of(key)
        return _nothing

    def _new_file(self, size_bytes: int) -> SpillFile:
        taken_bytes = size_bytes - ALIGNMENT_BYTES
        if not self.room.has(taken_bytes):
            self._forget_free()
        self.room.check(taken_bytes)
        file = SpillFile(self._directory, size_bytes)
        self.room.hold(file, taken_bytes)
        return file

    def _forget_free(self) -> None:
        for free in self._free.values():
            free.clear()

    @contextlib.contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """Do nothing: the copy thread runs beside compute anyway, and waiting for a ticket is enough."""
        yield lambda: None

    def take_back(self, file: SpillFile, purpose: Purpose) -> None:
        """Take a step's file back. A file that a fork inherited stays with the parent.

        Copies are needed in few steps, or in each of many recipes: a large file does not wait for them.
        """
        if file not in self._in_use:
            return
        self._in_use.discard(file)
        if not self._closed and (purpose != "copies" or file.size_bytes <= MOST_COPIES_BYTES):
            self._free[purpose].give(file)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Stop the thread and close the files as soon as no step is running."""
        self._closed = True
        if not list(self._in_use):
            self._finalizer()
            self._forget_free()
            moving_memory.listen_no_longer(self)


def _nothing() -> None:
    """What is to be done once a storage has other memory."""


def _explained(directory: SpillDirectory, process: int, error: BaseException) -> TierError:
    """Return what is wrong with a directory, in one line that names the remedy.

    Args:
        directory: The directory.
        process: The process that uses it, from which others may have been forked.
        error: What has failed.
    """
    if isinstance(error, OSError) and error.errno == CHANGED and os.getpid() != process:
        text = "the process that this one was forked from has gone on and written over what was away in both"
        return TierError(f"{text}: fork before training, or start processes by 'spawn'", "fork")
    if isinstance(error, TierError):
        return error
    if isinstance(error, OSError):
        return directory.trouble(error)
    text = f"copying to {directory.name} failed ({type(error).__name__}: {first_line(error)}): repeat the step"
    return TierError(text, type(error).__name__)

"""The CPU engine: one copy thread, and an unlinked spill file per step, so that a kill leaves nothing behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pooch.errors import TierError
from pooch.executor.engines.protocol import Purpose
from pooch.executor.engines.spill_file import ALIGNMENT_BYTES, Mover, SpillFile, new_buffer

# How often somebody who waits for a copy looks whether the thread that does it is still there.
LOOK_AGAIN_S = 0.2


@dataclass
class CpuTicket:
    """One copy; the thread lets go of the storage before it reports the end."""

    storage: torch.UntypedStorage | None
    offset_bytes: int
    outwards: bool
    mover: Mover
    thread: threading.Thread
    error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> float:
        """Block until the copy is complete; returns how long that took, in ms. A copy whose thread is no more ends with
        an error; one at the end of the interpreter, where threads stand still, is not waited for. Nor does its own
        thread wait, in which the garbage collector may let go of a step: the copy holds what it needs until its end.
        """
        if self._done.is_set() or threading.current_thread() is self.thread:
            return 0.0
        start = time.perf_counter()
        while not (sys.is_finalizing() or self._done.wait(LOOK_AGAIN_S)):
            if not self.thread.is_alive() and not self._done.is_set():
                self._give_up()
        return (time.perf_counter() - start) * 1000

    def _give_up(self) -> None:
        self.error = TierError("the thread that copies has died")
        self.storage = None
        self._done.set()

    def run(self, buffer: mmap.mmap) -> None:
        """Copy (on the copy thread); whatever goes wrong is kept for who waits."""
        try:
            assert self.storage is not None
            move = self.mover.write if self.outwards else self.mover.read
            move(self.storage, self.offset_bytes, buffer)
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits)
            self.error = error
        finally:
            self.storage = None
            self._done.set()


class _CopyThread:
    """Runs tickets one after the other; a daemon, so that it never keeps an interpreter alive."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._start()

    def _start(self) -> None:
        buffer = new_buffer()  # here, so that a lack of memory is told to who asks, not to the thread
        self._tickets: queue.SimpleQueue[CpuTicket | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self._tickets, buffer), name="pooch-copy", daemon=True)
        self.thread.start()

    def ensure(self) -> threading.Thread:
        """The thread that serves what is submitted next. A fork has the queue without the thread, and a thread may
        have died: either gets a new pair.
        """
        if os.getpid() != self._process or not self.thread.is_alive():
            self._process = os.getpid()
            self._start()
        return self.thread

    def submit(self, ticket: CpuTicket) -> None:
        """Put a ticket at the end of the queue."""
        self._tickets.put(ticket)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self.thread.is_alive()

    def stop(self) -> None:
        """Complete what was submitted, then end the thread. In the thread itself, where the garbage collector may find
        an engine that nobody has, it ends by itself.
        """
        if os.getpid() == self._process:
            self._tickets.put(None)
            if threading.current_thread() is not self.thread:
                self.thread.join()


def _serve(tickets: queue.SimpleQueue[CpuTicket | None], buffer: mmap.mmap) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.run(buffer)
        del ticket


class CpuArena:
    """Room in one spill file, served by the engine's copy thread."""

    clock = None

    def __init__(self, engine: CpuEngine, file: SpillFile) -> None:
        self._engine = engine
        self._file: SpillFile | None = file
        self._mover: Mover | None = Mover(file, engine.check)
        self._last: CpuTicket | None = None

    def is_beside(self) -> bool:
        """Never: the CPU has no streams."""
        return False

    def at_home(self) -> AbstractContextManager[None]:
        """Nothing to do."""
        return nullcontext()

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """Nothing to do."""

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        """Start copying a storage to the file."""
        return self._submit(storage, offset_bytes, True)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        """Start filling a storage from the file; the queue is in order, so its copy out comes first."""
        return self._submit(storage, offset_bytes, False)

    def _submit(self, storage: torch.UntypedStorage, offset_bytes: int, outwards: bool) -> CpuTicket:
        assert self._mover is not None, "the arena is closed"
        ticket = CpuTicket(storage, offset_bytes, outwards, self._mover, self._engine.thread.ensure())
        self._last = ticket
        self._engine.thread.submit(ticket)
        return ticket

    def close(self) -> None:
        """Wait for the last copy, then let the next step have the file."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        file, self._file, self._mover = self._file, None, None  # who holds the arena shall not hold the file
        if file is not None:
            self._engine.take_back(file)


class CpuEngine:
    """Spill files and the thread that serves them. Files are used again from step to step.

    Steps hold the engine, and may be begun and let go of in any thread. Whoever lets go of an engine without closing it
    gives its files and its thread back as well.

    Args:
        directory: where to put them; None: POOCH_SPILL_DIRECTORY, or the system's directory for temporary files.
        check: compare a checksum (XXH3, 64 bits) of what is read back with that of what was written.

    Raises:
        TierError: there is no memory for its copy buffer.
    """

    def __init__(self, directory: str | Path | None = None, *, check: bool = True) -> None:
        self.check = check
        self._directory = Path(directory or os.environ.get("POOCH_SPILL_DIRECTORY") or tempfile.gettempdir())
        self._free: list[SpillFile] = []
        self._size_bytes = 0
        self._in_use: set[SpillFile] = set()  # by steps under way; not a number, since adding to one is not atomic
        self._closed = False
        self._process = os.getpid()
        self.thread = _CopyThread()
        self._finalizer = weakref.finalize(self, self.thread.stop)
        self._finalizer.atexit = False

    @property
    def description(self) -> str:
        """What the tier is, for people."""
        return f"spill file in {self._directory}"

    @property
    def has_two_lanes(self) -> bool:
        """One thread does all copies."""
        return False

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> CpuArena:
        """A file with room for `size_bytes`: one that is free, or a new one, which costs little whatever it is for."""
        if os.getpid() != self._process:  # a fork must not write into the files of its parent
            self._process = os.getpid()
            self._in_use.clear()
            self._free.clear()
        padded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + ALIGNMENT_BYTES
        if padded > self._size_bytes:
            self._free.clear()
            self._size_bytes = padded
        try:
            file = self._free.pop()  # not asked for beforehand: another thread may take it
        except IndexError:
            file = SpillFile(self._directory, self._size_bytes)
        self._in_use.add(file)
        return CpuArena(self, file)

    @contextlib.contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """The copy thread runs beside compute anyway, and waiting for a ticket is all there is to wait for."""
        yield lambda: None

    def take_back(self, file: SpillFile) -> None:
        """A step is done with its file. One that a fork has from its parent stays the parent's."""
        if file not in self._in_use:
            return
        self._in_use.discard(file)
        if file.size_bytes == self._size_bytes and not self._closed:
            self._free.append(file)
        if self._closed:
            self.close()

    def close(self) -> None:
        """Stop the thread and let go of the files, as soon as no step is under way."""
        self._closed = True
        if not self._in_use:
            self._finalizer()
            self._free.clear()

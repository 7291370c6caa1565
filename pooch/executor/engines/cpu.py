"""The CPU engine: one copy thread and an unlinked spill file, so that nothing is left behind by a kill.

The file is opened for direct I/O where the file system offers it: the bytes then really leave memory (the page
cache would
keep them), and the disk moves them without a core. Buffers of PyTorch are not aligned for that, so chunks pass
through two
small aligned buffers.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch

from pooch.errors import TierError

ALIGNMENT_BYTES = 4096
CHUNK_BYTES = 4 * 2**20


@dataclass
class CpuTicket:
    """One copy; the thread lets go of the storage before it reports the end."""

    storage: torch.UntypedStorage | None
    offset_bytes: int
    outwards: bool
    file: SpillFile
    error: BaseException | None = None
    _done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> float:
        """Block until the copy is complete; returns how long that took, in ms."""
        if self._done.is_set():
            return 0.0
        start = time.perf_counter()
        self._done.wait()
        return (time.perf_counter() - start) * 1000

    def run(self, buffer: mmap.mmap) -> None:
        """Copy (on the copy thread); whatever goes wrong is kept for who waits."""
        try:
            assert self.storage is not None
            _move(self.file, self.storage, self.offset_bytes, self.outwards, buffer)
        except BaseException as error:  # noqa: BLE001  (handed to the thread that waits)
            self.error = error
        finally:
            self.storage = None
            self._done.set()


class SpillFile:
    """An unlinked file with room for one step."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor, self.direct = _open_unlinked(directory)
        try:
            if size_bytes:
                os.posix_fallocate(self.descriptor, 0, size_bytes)
        except OSError as error:
            os.close(self.descriptor)
            raise TierError(
                f"no room for {size_bytes} bytes of spill in {directory} ({error.strerror}): free some, or choose "
                f"another "
                "directory with spill_directory= or POOCH_SPILL_DIRECTORY"
            ) from error

    def close(self) -> None:
        """Give the file's room back to the file system."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


def _open_unlinked(directory: Path) -> tuple[int, bool]:
    try:
        descriptor, name = tempfile.mkstemp(prefix="pooch-", dir=directory)
    except OSError as error:
        raise TierError(
            f"cannot write a spill file in {directory} ({error.strerror}): choose another directory with "
            "spill_directory= or POOCH_SPILL_DIRECTORY"
        ) from error
    direct_flag = getattr(os, "O_DIRECT", 0)
    try:
        direct = os.open(name, os.O_RDWR | direct_flag) if direct_flag else -1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        direct = -1  # this file system has no direct I/O (tmpfs): go through its cache
    Path(name).unlink()
    if direct < 0:
        return descriptor, False
    os.close(descriptor)
    return direct, True


def _move(file: SpillFile, storage: torch.UntypedStorage, offset_bytes: int, outwards: bool, buffer: mmap.mmap) -> None:
    raw = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    chunk = numpy.frombuffer(buffer, dtype=numpy.uint8)
    for start in range(0, raw.size, CHUNK_BYTES):
        count = min(CHUNK_BYTES, raw.size - start)
        padded = -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if outwards:
            numpy.copyto(chunk[:count], raw[start : start + count])
            _write(file.descriptor, memoryview(buffer)[:padded], offset_bytes + start)
        else:
            _read(file.descriptor, memoryview(buffer)[:padded], offset_bytes + start, count)
            numpy.copyto(raw[start : start + count], chunk[:count])


def _write(descriptor: int, view: memoryview, offset_bytes: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset_bytes)
        if written <= 0:
            raise OSError(errno.EIO, "the spill file took no bytes")
        view, offset_bytes = view[written:], offset_bytes + written


def _read(descriptor: int, view: memoryview, offset_bytes: int, needed: int) -> None:
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [view[done:]], offset_bytes + done)
        if count <= 0:
            raise OSError(errno.EIO, "the spill file ended early")
        done += count


class _CopyThread:
    """Runs tickets one after the other; a daemon, so that it never keeps an interpreter alive."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._start()

    def _start(self) -> None:
        buffer = mmap.mmap(-1, CHUNK_BYTES)  # here, so that a lack of memory is told to who asks, not to the thread
        self._tickets: queue.SimpleQueue[CpuTicket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._tickets, buffer), name="pooch-copy", daemon=True)
        self._thread.start()

    def submit(self, ticket: CpuTicket) -> None:
        """Put a ticket at the end of the queue. A fork has the queue without the thread, so it gets a new pair."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._start()
        self._tickets.put(ticket)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Complete what was submitted, then end the thread."""
        if os.getpid() == self._process:
            self._tickets.put(None)
            self._thread.join()


def _serve(tickets: queue.SimpleQueue[CpuTicket | None], buffer: mmap.mmap) -> None:
    while (ticket := tickets.get()) is not None:
        ticket.run(buffer)
        del ticket


class CpuArena:
    """Room in one spill file, served by the engine's copy thread."""

    def __init__(self, engine: CpuEngine, file: SpillFile) -> None:
        self._engine, self._file = engine, file
        self._last: CpuTicket | None = None

    def in_order(self) -> bool:
        """Always: the CPU has no streams."""
        return True

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        """Start copying a storage to the file."""
        return self._submit(storage, offset_bytes, True)

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> CpuTicket:
        """Start filling a storage from the file; the queue is in order, so its copy out comes first."""
        return self._submit(storage, offset_bytes, False)

    def _submit(self, storage: torch.UntypedStorage, offset_bytes: int, outwards: bool) -> CpuTicket:
        ticket = CpuTicket(storage, offset_bytes, outwards, self._file)
        self._last = ticket
        self._engine.thread.submit(ticket)
        return ticket

    def close(self) -> None:
        """Wait for the last copy, then let the next step have the file."""
        if self._last is not None:
            self._last.wait()
            self._last = None
        self._engine.take_back(self._file)


class CpuEngine:
    """Spill files and the thread that serves them. Files are used again from step to step.

    Args:
        directory: where to put them; None: POOCH_SPILL_DIRECTORY, or the system's directory for temporary files.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = Path(directory or os.environ.get("POOCH_SPILL_DIRECTORY") or tempfile.gettempdir())
        self._free: list[SpillFile] = []
        self._size_bytes = 0
        self._open_arenas = 0
        self._closed = False
        self._process = os.getpid()
        self.thread = _CopyThread()
        self._finalizer = weakref.finalize(self, self.thread.stop)
        self._finalizer.atexit = False

    @property
    def description(self) -> str:
        """What the tier is, for people."""
        return f"spill file in {self._directory}"

    def open_arena(self, size_bytes: int) -> CpuArena:
        """A file with room for `size_bytes`: one that is free, or a new one."""
        if os.getpid() != self._process:  # a fork must not write into the files of its parent
            self._process, self._open_arenas = os.getpid(), 0
            self._close_files()
        padded = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + ALIGNMENT_BYTES
        if padded > self._size_bytes:
            self._close_files()
            self._size_bytes = padded
        file = self._free.pop() if self._free else SpillFile(self._directory, self._size_bytes)
        self._open_arenas += 1
        return CpuArena(self, file)

    @contextlib.contextmanager
    def aside(self) -> Iterator[Callable[[], None]]:
        """The copy thread runs beside compute anyway, and waiting for a ticket is all there is to wait for."""
        yield lambda: None

    def take_back(self, file: SpillFile) -> None:
        """A step is done with its file."""
        self._open_arenas -= 1
        if file.size_bytes == self._size_bytes:
            self._free.append(file)
        else:
            file.close()
        if self._closed:
            self.close()

    def _close_files(self) -> None:
        for file in self._free:
            file.close()
        self._free.clear()

    def close(self) -> None:
        """Stop the thread and close the files, as soon as no step is under way."""
        self._closed = True
        if self._open_arenas == 0:
            self._finalizer()
            self._close_files()

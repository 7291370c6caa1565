"""The unnamed file that the CPU engine swaps to, and copying the bytes of a storage to and from it.

Direct I/O is used where the file system supports it: the bytes then really leave memory instead of staying in the page
cache, and the disk transfers them without a CPU core. PyTorch's memory is not aligned for direct I/O, so chunks pass
through an aligned buffer. They are in the CPU's cache at that point, so their checksum costs next to nothing.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy
import torch
import xxhash

from ...ground.units import round_up
from ...torchtools.copier import ENDED_EARLY, OTHER_BYTES, TOOK_NOTHING, no_buffer
from ...torchtools.endings import end_with
from ...torchtools.spill_directory import SpillDirectory
from ...torchtools.tensors import bytes_in_place

ALIGNMENT_BYTES = 4096
CHUNK_BYTES = 4 * 2**20


class SpillFile:
    """An unnamed file with room for one step, closed with the last reference to it, which a copy may hold.

    Args:
        directory: The directory that provides the room.
        size_bytes: Size of the room, allocated at once.

    Raises:
        TierError: If the directory cannot be written, or does not have enough room.
    """

    def __init__(self, directory: SpillDirectory, size_bytes: int) -> None:
        self.size_bytes, self.fitted_at = size_bytes, 0
        self.descriptor = directory.open_unnamed()
        close = end_with(self, os.close, self.descriptor)
        self.direct = _moved_directly(self.descriptor)
        try:
            if size_bytes:
                os.posix_fallocate(self.descriptor, 0, size_bytes)
        except OSError as error:
            close()
            raise directory.trouble(error, size_bytes) from error

    def move_through_cache(self) -> bool:
        """Use the page cache from now on, and return whether direct I/O was in use."""
        was_direct, self.direct = self.direct, False
        if was_direct:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return was_direct


def _moved_directly(descriptor: int) -> bool:
    """Switch the open file to direct I/O. Reopening it by name could open a different file."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system (tmpfs, say) does not support it: use the page cache
    return True


def new_buffer() -> mmap.mmap:
    """Allocate aligned memory for one chunk.

    Raises:
        TierError: If there is no memory for it.
    """
    try:
        return mmap.mmap(-1, CHUNK_BYTES)
    except OSError as error:
        raise no_buffer(CHUNK_BYTES, error) from error


class Mover:
    """Copies the storages of one step to and from a file, and remembers checksums of what it wrote.

    Args:
        file: The spill file.
        check: Whether to compare a checksum of what is read with that of what was written.
    """

    def __init__(self, file: SpillFile, check: bool) -> None:
        self._file, self._check = file, check
        self._sums: dict[int, int] = {}

    def write(self, storage: torch.UntypedStorage, offset_bytes: int, buffer: mmap.mmap) -> None:
        """Copy a storage to the file.

        Raises:
            OSError: If the file cannot be written.
        """
        raw, chunk = bytes_in_place(storage), numpy.frombuffer(buffer, dtype=numpy.uint8)
        digest = xxhash.xxh3_64()
        for start, count, padded in _chunks(raw.size):
            numpy.copyto(chunk[:count], raw[start : start + count])
            if self._check:
                digest.update(memoryview(buffer)[:count])
            _write(self._file, memoryview(buffer)[:padded], offset_bytes + start)
        self._sums[offset_bytes] = digest.intdigest()

    def read(self, storage: torch.UntypedStorage, offset_bytes: int, buffer: mmap.mmap) -> None:
        """Fill a storage with what was written at that offset.

        Raises:
            OSError: If the file cannot be read, or does not contain what was written.
        """
        raw, chunk = bytes_in_place(storage), numpy.frombuffer(buffer, dtype=numpy.uint8)
        digest = xxhash.xxh3_64()
        for start, count, padded in _chunks(raw.size):
            _read(self._file, memoryview(buffer)[:padded], offset_bytes + start, count)
            if self._check:
                digest.update(memoryview(buffer)[:count])
            numpy.copyto(raw[start : start + count], chunk[:count])
        if self._check and digest.intdigest() != self._sums.get(offset_bytes):
            raise OSError(*OTHER_BYTES)


def _chunks(size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield the start, size and padded size of each chunk, in bytes. Direct I/O needs the padding."""
    for start in range(0, size_bytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, size_bytes - start)
        yield start, count, round_up(count, ALIGNMENT_BYTES)


# After a short transfer the rest may begin where direct I/O cannot, as at a limit of file sizes: then, and where a file
# system only pretends to support direct I/O, the page cache serves.


def _write(file: SpillFile, view: memoryview, offset_bytes: int) -> None:
    while view:
        try:
            written = os.pwrite(file.descriptor, view, offset_bytes)
        except OSError as error:
            if error.errno == errno.EINVAL and file.move_through_cache():
                continue
            raise
        if written <= 0:
            raise OSError(*TOOK_NOTHING)
        view, offset_bytes = view[written:], offset_bytes + written


def _read(file: SpillFile, view: memoryview, offset_bytes: int, needed: int) -> None:
    done = 0
    while done < needed:
        try:
            count = os.preadv(file.descriptor, [view[done:]], offset_bytes + done)
        except OSError as error:
            if error.errno == errno.EINVAL and file.move_through_cache():
                continue
            raise
        if count <= 0:
            raise OSError(*ENDED_EARLY)
        done += count

"""The unlinked file that the CPU engine swaps to, and moving the bytes of a storage to and from it.

The file is opened for direct I/O where the file system offers it: the bytes then really leave memory (the page cache
would keep them), and the disk moves them without a core. Buffers of PyTorch are not aligned for that, so chunks pass
through an aligned buffer. They are in the processor's cache there, so a checksum of them costs next to nothing.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import xxhash

from pooch.errors import TierError
from pooch.torchtools.tensors import bytes_in_place

ALIGNMENT_BYTES = 4096
CHUNK_BYTES = 4 * 2**20


class SpillFile:
    """An unlinked file with room for one step; closed with the last reference to it, which may be that of a copy.

    Args:
        directory: where it lies, without a name. size_bytes: of its room, taken at once.

    Raises:
        TierError: the directory cannot be written, or has not so much room.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = _open_unnamed(directory)
        close = weakref.finalize(self, os.close, self.descriptor)
        close.atexit = False
        self.direct = _moved_directly(self.descriptor)
        try:
            if size_bytes:
                os.posix_fallocate(self.descriptor, 0, size_bytes)
        except OSError as error:
            close()
            raise TierError(
                f"no room for {size_bytes} bytes of spill in {directory} ({error.strerror}): free some, or choose "
                "another directory with spill_directory= or POOCH_SPILL_DIRECTORY"
            ) from error


def _open_unnamed(directory: Path) -> int:
    """A file that has no name, or had one for a moment where the system knows no such files."""
    try:
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        except (AttributeError, OSError):  # nor can some file systems; what else is wrong, the other way says as well
            descriptor, name = tempfile.mkstemp(prefix="pooch-", dir=directory)
            Path(name).unlink()
            return descriptor
    except OSError as error:
        raise TierError(
            f"cannot write a spill file in {directory} ({error.strerror}): choose another directory with "
            "spill_directory= or POOCH_SPILL_DIRECTORY"
        ) from error


def _moved_directly(descriptor: int) -> bool:
    """Switch to direct I/O, in the open file: by its name it would be whatever somebody has put there since."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # this file system has none (tmpfs): go through its cache
    return True


def new_buffer() -> mmap.mmap:
    """Aligned memory for one chunk.

    Raises:
        TierError: there is not even that much.
    """
    try:
        return mmap.mmap(-1, CHUNK_BYTES)
    except OSError as error:
        raise TierError(
            f"no {CHUNK_BYTES} bytes of host memory for a copy buffer ({error.strerror}): free some memory"
        ) from error


class Mover:
    """Moves storages to and from one file, for one step, and knows what it wrote.

    Args:
        file: where to. check: compare a checksum of what is read with that of what was written.
    """

    def __init__(self, file: SpillFile, check: bool) -> None:
        self._file, self._check = file, check
        self._sums: dict[int, int] = {}

    def write(self, storage: torch.UntypedStorage, offset_bytes: int, buffer: mmap.mmap) -> None:
        """Copy a storage to the file.

        Raises:
            OSError: the file took it not, or not all of it.
        """
        raw, chunk = bytes_in_place(storage), numpy.frombuffer(buffer, dtype=numpy.uint8)
        digest = xxhash.xxh3_64()
        for start, count, padded in _chunks(raw.size):
            numpy.copyto(chunk[:count], raw[start : start + count])
            if self._check:
                digest.update(memoryview(buffer)[:count])
            _write(self._file.descriptor, memoryview(buffer)[:padded], offset_bytes + start)
        self._sums[offset_bytes] = digest.intdigest()

    def read(self, storage: torch.UntypedStorage, offset_bytes: int, buffer: mmap.mmap) -> None:
        """Fill a storage with what was written at that offset.

        Raises:
            OSError: the file cannot be read, or holds other bytes than were written.
        """
        raw, chunk = bytes_in_place(storage), numpy.frombuffer(buffer, dtype=numpy.uint8)
        digest = xxhash.xxh3_64()
        for start, count, padded in _chunks(raw.size):
            _read(self._file.descriptor, memoryview(buffer)[:padded], offset_bytes + start, count)
            if self._check:
                digest.update(memoryview(buffer)[:count])
            numpy.copyto(raw[start : start + count], chunk[:count])
        if self._check and digest.intdigest() != self._sums.get(offset_bytes):
            raise OSError(errno.EIO, "the spill file gave back other bytes than were written to it")


def _chunks(size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(start, bytes, bytes padded for direct I/O) of each chunk."""
    for start in range(0, size_bytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, size_bytes - start)
        yield start, count, -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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

"""Offloading as a peer: every saved tensor is copied out at once and back when it is read.

There is one copy per storage: a storage that is saved twice is moved once. On the CPU the bytes go to an unlinked file,
on a GPU to host memory. Nothing is overlapped and nothing is recomputed.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import torch

from pooch.torchtools.accelerators import has_streams
from pooch.torchtools.spill_directory import SpillDirectory
from pooch.torchtools.standing_aside import StepHooks
from pooch.torchtools.tensors import Geometry, bytes_in_place, has_plain_storage, new_storage, storage_key


@dataclass
class _Entry:
    """One storage that left the device: its bytes are in the file from `offset` on (CPU) or in `host` (GPU), and `back`
    is the storage on the device, as long as something holds one.
    """

    size_bytes: int
    device: torch.device
    offset: int = 0
    host: torch.Tensor | None = None
    back: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(frozen=True)
class _Handle:
    entry: _Entry
    geometry: Geometry


@dataclass
class OffloadStore:
    """Takes every saved storage off the device and brings it back when it is read.

    Raises:
        TierError: if the directory cannot be written or read. It says what is wrong.
    """

    _directory: SpillDirectory = field(default_factory=SpillDirectory.of)
    _file: IO[bytes] | None = None
    _end: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)

    def put(self, tensor: torch.Tensor) -> object:
        """Copies the tensor's storage out, once for all tensors that share it."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._copy_out(tensor.untyped_storage())
            entry.back = weakref.ref(tensor.untyped_storage())  # not copied back while the program holds it
            weakref.finalize(tensor.untyped_storage(), self._entries.pop, key, None).atexit = False
        return _Handle(entry, Geometry.of(tensor))

    def get(self, handle: object) -> torch.Tensor:
        """Returns the tensor; all readers share its storage."""
        assert isinstance(handle, _Handle)
        storage = handle.entry.back() if handle.entry.back is not None else None
        if storage is None or storage.nbytes() != handle.entry.size_bytes:  # gone, or emptied by the program
            storage = self._copy_in(handle.entry)
            handle.entry.back = weakref.ref(storage)
        return handle.geometry.on(storage)

    def _copy_out(self, storage: torch.UntypedStorage) -> _Entry:
        entry = _Entry(storage.nbytes(), storage.device, self._end)
        if has_streams(storage.device):
            entry.host = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu()
            return entry
        view, position = bytes_in_place(storage).data, self._end
        if self._file is None:
            self._file = os.fdopen(self._directory.open_unnamed(), "r+b", buffering=0)
        try:
            while view:
                written = os.pwrite(self._file.fileno(), view, position)
                view, position = view[written:], position + written
        except OSError as error:
            raise self._directory.trouble(error, storage.nbytes()) from error
        self._end = position
        return entry

    def _copy_in(self, entry: _Entry) -> torch.UntypedStorage:
        if entry.host is not None:
            return entry.host.to(entry.device).untyped_storage()
        storage = new_storage(entry.size_bytes, entry.device)
        view, position = bytes_in_place(storage).data, entry.offset
        assert self._file is not None
        try:
            while view:
                count = os.preadv(self._file.fileno(), [view], position)
                if count == 0:
                    raise OSError(errno.EIO, "the file that holds offloaded tensors ended early")
                view, position = view[count:], position + count
        except OSError as error:
            raise self._directory.trouble(error) from error
        return storage


@contextmanager
def saved_tensors_offloaded(model: torch.nn.Module) -> Iterator[None]:
    """Context manager in which saved tensors leave the device, except parameters, buffers and their views."""
    store = OffloadStore()
    staying = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers()) if has_plain_storage(tensor)}

    def pack(tensor: torch.Tensor) -> object:
        if not has_plain_storage(tensor) or storage_key(tensor) in staying or not tensor.untyped_storage().nbytes():
            return tensor
        with torch._C._DisableTorchDispatch():
            return store.put(tensor.detach())

    def unpack(handle: object) -> torch.Tensor:
        if isinstance(handle, torch.Tensor):
            return handle
        with torch._C._DisableTorchDispatch():
            return store.get(handle)

    with StepHooks(pack, unpack):
        yield

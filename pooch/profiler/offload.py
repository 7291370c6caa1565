"""A store that keeps no saved tensor on the device: for profiling models that do not fit.

One copy per storage: a storage saved twice moves once. On the CPU the bytes go to an unlinked file, on a
GPU to host memory.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, field

import torch

from pooch.torchtools.tensors import storage_key


@dataclass
class _Entry:
    """One storage that left: `host` holds its bytes on a GPU, `offset` says where they lie in the file on the CPU."""

    size_bytes: int
    device: torch.device
    offset: int = 0
    host: torch.Tensor | None = None
    back: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(frozen=True)
class _Handle:
    entry: _Entry
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class OffloadStore:
    """Takes every saved storage off the device and brings it back when it is read."""

    _file: object = field(default_factory=tempfile.TemporaryFile)
    _end: int = 0
    _entries: dict[int, _Entry] = field(default_factory=dict)

    def put(self, tensor: torch.Tensor) -> object:
        """Copy the tensor's storage out, once for all tensors that share it."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._copy_out(tensor.untyped_storage())
            weakref.finalize(tensor.untyped_storage(), self._entries.pop, key, None).atexit = False
        return _Handle(entry, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def get(self, handle: object) -> torch.Tensor:
        """The tensor again, with its geometry; its storage is shared by all who read it."""
        assert isinstance(handle, _Handle)
        storage = handle.entry.back() if handle.entry.back is not None else None
        if storage is None:
            storage = self._copy_in(handle.entry)
            handle.entry.back = weakref.ref(storage)
        tensor = torch.empty(0, dtype=handle.dtype, device=handle.entry.device)
        return tensor.set_(storage, handle.offset, handle.size, handle.stride)

    def _copy_out(self, storage: torch.UntypedStorage) -> _Entry:
        entry = _Entry(storage.nbytes(), storage.device, self._end)
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if storage.device.type == "cuda":
            entry.host = raw.cpu()
            return entry
        view, position = raw.numpy().data, self._end
        while view:
            written = os.pwrite(self._file.fileno(), view, position)  # type: ignore[attr-defined]
            view, position = view[written:], position + written
        self._end = position
        return entry

    def _copy_in(self, entry: _Entry) -> torch.UntypedStorage:
        if entry.host is not None:
            return entry.host.to(entry.device).untyped_storage()
        raw = torch.empty(entry.size_bytes, dtype=torch.uint8)
        view, position = raw.numpy().data, entry.offset
        while view:
            count = os.preadv(self._file.fileno(), [view], position)  # type: ignore[attr-defined]
            if count == 0:
                raise OSError("the file that holds offloaded tensors ended early")
            view, position = view[count:], position + count
        return raw.untyped_storage()

"""Copies of tensor contents that are not tensors, so that memory measurements do not count them as the user's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..ground.errors import ProfileError, TierError
from ..ground.units import format_bytes
from .spill_directory import SpillDirectory
from .tensors import storage_key, tensors_with_memory

_SMALL_BYTES = 2**20  # larger contents go to a file: a step that barely fits has no room for a second copy
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What a tensor covers of its storage, and a copy of its bytes unless the file has them.

    The storage is not held: where the tensor is given other data (`tensor.data = other`), the former may be freed.
    """

    tensor: torch.Tensor
    shape: torch.Size
    strides: tuple[int, ...]
    small: bytes | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes from the first that the tensor covers to the last one."""
        begin, end = _extent(self.tensor)
        return end - begin

    def chunks(self) -> Iterator[torch.Tensor]:
        """Yields the current bytes in pieces, in the device's memory."""
        storage = self.tensor.untyped_storage()
        first, last = _extent(self.tensor)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for begin in range(first, last, _CHUNK_BYTES):
            yield whole[begin : min(begin + _CHUNK_BYTES, last)]

    def take_shape(self) -> None:
        """Gives the tensor room for its former contents if it was given data of another shape."""
        tensor = self.tensor
        if tensor.shape != self.shape or tensor.stride() != self.strides:
            tensor.data = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device)


class KeptContents:
    """The current contents of tensors: small ones as bytes in host memory, large ones in an unnamed file.

    Tensors may be on any device; those without memory, such as fake tensors, are skipped.

    Raises:
        ProfileError: if the file cannot be written.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._directory = SpillDirectory.of()
        self._file: IO[bytes] | None = None
        self._stretches: list[_Stretch] = []
        self._opaque: list[tuple[torch.Tensor, torch.Tensor]] = []  # sparse tensors and the like are cloned
        seen: set[tuple[int, int, int]] = set()
        try:
            for tensor in tensors:
                self._keep(tensor, seen)
        except BaseException:
            self.close()
            raise

    def _keep(self, tensor: torch.Tensor, seen: set[tuple[int, int, int]]) -> None:
        parts, is_hidden = tensors_with_memory(tensor)
        if is_hidden or tensor.layout is not torch.strided:  # an op in place may give a sparse tensor other parts
            self._opaque.append((tensor, tensor.detach().clone()))
            return
        for part in parts:
            begin, end = _extent(part)
            key = storage_key(part), begin, end
            if begin < end and key not in seen:
                seen.add(key)
                self._stretches.append(self._kept(_Stretch(part, part.shape, part.stride())))

    def _kept(self, stretch: _Stretch) -> _Stretch:
        size_bytes = stretch.size_bytes
        if size_bytes <= _SMALL_BYTES:
            return replace(stretch, small=b"".join(bytes(_host(chunk)) for chunk in stretch.chunks()))
        try:
            if self._file is None:
                self._file = os.fdopen(self._directory.open_unnamed(), "w+b")
            for chunk in stretch.chunks():
                self._file.write(_host(chunk).data)
            self._file.flush()
        except OSError as error:
            trouble = self._directory.trouble(error, size_bytes)
            raise ProfileError(f"buffers of {format_bytes(size_bytes)} cannot be saved: {trouble}") from error
        except TierError as error:
            raise ProfileError(f"buffers of {format_bytes(size_bytes)} cannot be saved: {error}") from error
        return stretch

    def restore(self) -> None:
        """Restores contents that have changed."""
        if self._file is not None:
            self._file.seek(0)
        for stretch in self._stretches:
            stretch.take_shape()
            position = 0
            for chunk in stretch.chunks():
                size_bytes = chunk.numel()
                kept = self._file_bytes(size_bytes) if stretch.small is None else stretch.small[position:][:size_bytes]
                _write_changed(chunk, kept)
                position += size_bytes
        with torch.no_grad():
            for tensor, clone in self._opaque:
                tensor.copy_(clone)

    def _file_bytes(self, size_bytes: int) -> bytes:
        assert self._file is not None
        try:
            read = self._file.read(size_bytes)
            if len(read) != size_bytes:
                raise OSError(errno.EIO, "the file was truncated")
        except OSError as error:
            raise ProfileError(f"buffers cannot be read back: {self._directory.trouble(error)}") from error
        return read

    def close(self) -> None:
        """Deletes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the first byte of its storage that a tensor covers, and the byte after the last one."""
    has_memory = tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
    if not has_memory or tensor.numel() == 0:
        return 0, 0
    steps = sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (steps + 1) * tensor.element_size()


def _host(chunk: torch.Tensor) -> numpy.ndarray:
    found: numpy.ndarray = chunk.cpu().numpy()
    return found


def _write_changed(chunk: torch.Tensor, kept: bytes) -> None:
    if _host(chunk).data != kept:
        chunk.copy_(torch.frombuffer(bytearray(kept), dtype=torch.uint8))

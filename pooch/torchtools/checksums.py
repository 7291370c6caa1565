"""Checksums of the bytes of storages, on the device where they are."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy
import torch
import xxhash

from .tensors import memory_address

SAMPLED_WORDS = 256
WHOLE_BYTES = 64 * 2**10  # up to here a sample is the whole storage, which is read about as fast
CHECKSUM_BYTES = 16 * 2**10  # of the device, at most, while one is taken there
_WORD_BYTES = 8
_SIDE = 512  # words; with more rows PyTorch takes memory for sums over columns that are spread over the device
_READ_ONLY = 0x100
_MIXER = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number

_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype, _memory.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


def checksum(storage: torch.UntypedStorage) -> int:
    """Returns a checksum of 64 bits of all bytes of a storage: XXH3 on the CPU, at the speed of memory.

    Elsewhere it is a reduction on the device, for which the caller waits: sums over the rows and over the columns of
    the bytes, taken as squares of integers, weighted by their position. A flipped bit changes a sum, and a value that
    moved changes the sum of its row or of its column.

    Args:
        storage: the storage, which the calling thread may read.
    """
    if storage.device.type != "cpu":
        with torch._C.DisableTorchFunction():
            return _reduced(storage)
    return xxhash.xxh3_64_intdigest(_memory(memory_address(storage), storage.nbytes(), _READ_ONLY))


def sample_checksum(storage: torch.UntypedStorage) -> int:
    """Returns a checksum of the whole of a small storage on the CPU, and of `SAMPLED_WORDS` words spread over a large
    one. It costs microseconds, and notices what changes many bytes, such as other random numbers.

    Args:
        storage: the storage, on the CPU.
    """
    size_bytes = storage.nbytes()
    memory = _memory(memory_address(storage), size_bytes, _READ_ONLY)
    if size_bytes <= WHOLE_BYTES:
        return xxhash.xxh3_64_intdigest(memory)
    words = numpy.frombuffer(memory, dtype=numpy.uint64, count=size_bytes // _WORD_BYTES)
    stride = (words.size // SAMPLED_WORDS) | 1  # odd, so that it meets all columns of a matrix of even width
    return xxhash.xxh3_64_intdigest(words[::stride].tobytes())


def checksum_of(storage: torch.UntypedStorage, is_sample: bool) -> int:
    """Returns `sample_checksum` or `checksum` of a storage."""
    return sample_checksum(storage) if is_sample else checksum(storage)


def checksum_with(sample: Callable[[torch.UntypedStorage], int], storage: torch.UntypedStorage, is_sample: bool) -> int:
    """Returns the same with another checksum of samples, which is compared with others of its kind alone.

    Args:
        sample: returns the checksum of a sample.
        storage: the storage.
        is_sample: whether a sample is enough.
    """
    return sample(storage) if is_sample else checksum(storage)


def _reduced(storage: torch.UntypedStorage) -> int:
    """Square by square, in a few KiB: a sum over the columns of all at once takes twice the memory of the storage."""
    count, device = storage.nbytes() // _WORD_BYTES, storage.device
    weights = torch.arange(1, _SIDE + 1, device=device).mul_(_MIXER).bitwise_or_(1)
    sums, total = torch.empty_like(weights), torch.zeros((), dtype=torch.int64, device=device)

    def fold(length: int) -> None:
        total.mul_(_MIXER).add_(sums[:length].mul_(weights[:length]).sum())

    for begin in range(0, count, _SIDE**2):
        length = min(_SIDE**2, count - begin)
        words = torch.empty(0, dtype=torch.int64, device=device).set_(storage, begin, (length,), (1,))
        rows = length // _SIDE
        if rows:
            square = words[: rows * _SIDE].view(rows, _SIDE)
            torch.sum(square, 0, out=sums)
            fold(_SIDE)
            torch.sum(square, 1, out=sums[:rows])
            fold(rows)
        if length % _SIDE:
            sums[: length % _SIDE].copy_(words[rows * _SIDE :])
            fold(length % _SIDE)
    rest = storage.nbytes() - count * _WORD_BYTES
    if rest:
        tail = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, count * _WORD_BYTES, (rest,), (1,))
        sums[:rest].copy_(tail)
        fold(rest)
    return int(total.item())

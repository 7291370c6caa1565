"""Recognizes errors that mean that device memory ran out, and by how much."""

from __future__ import annotations

import errno
import re

import torch

from ..ground.units import parse_bytes

_CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA_REQUEST = re.compile(r"Tried to allocate ([\d.]+ [KMG]i?B)")
_CUDA_FREE = re.compile(r"of which ([\d.]+ [KMG]i?B) is free")
# PyTorch's CPU allocator, oneDNN, MKL, the C++ library and CUDA's libraries have no error type of their own for this.
_SAID = re.compile(
    r"DefaultCPUAllocator"
    r"|could not (create a primitive(?! descriptor)|create a memory object|initialize a memory object)"
    r"|std::bad_alloc|bad allocation"
    r"|(out of|not enough|insufficient|allocate|allocating) (\w+ )?memory|memory allocation|can't start new thread"
    r"|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error means that memory ran out, in any of the forms that PyTorch and its libraries use."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def forgotten(error: BaseException) -> BaseException:
    """Returns the error after removing the tracebacks, whose frames hold what the failed attempt allocated.

    The same applies to the errors that caused it.
    """
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        following.__traceback__ = None
        following = following.__cause__ or following.__context__
    return error


def missing_bytes(error: BaseException) -> int | None:
    """Returns the requested bytes that were not available, or None if the error does not say."""
    text = str(error)
    request = _CPU_REQUEST.search(text)
    if request is not None:
        return int(request.group(1))
    requested_bytes, free_bytes = _said(_CUDA_REQUEST, text), _said(_CUDA_FREE, text)
    if requested_bytes is None:
        return None
    if free_bytes is None or free_bytes >= requested_bytes:  # enough was free, but fragmented
        return requested_bytes
    return requested_bytes - free_bytes


def _said(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None or float(found.group(1).split()[0]) == 0:
        return None
    number = parse_bytes(found.group(1))
    return None if number is None else int(number)

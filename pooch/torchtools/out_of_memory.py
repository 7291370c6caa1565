"""Telling that device memory ran out, and by how much."""

from __future__ import annotations

import re

import torch

from pooch.units import parse_budget

_CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")
_CUDA_REQUEST = re.compile(r"Tried to allocate ([\d.]+ [KMG]i?B)")
_CUDA_FREE = re.compile(r"of which ([\d.]+ [KMG]i?B) is free")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that device memory ran out (the CPU allocator has no error type of its own)."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def missing_bytes(error: BaseException) -> int | None:
    """Bytes that were asked for in vain, less those that were free; None where the error does not say."""
    text = str(error)
    request = _CPU_REQUEST.search(text)
    if request is not None:
        return int(request.group(1))
    asked_bytes, free_bytes = _said(_CUDA_REQUEST, text), _said(_CUDA_FREE, text)
    if asked_bytes is None:
        return None
    if free_bytes is None or free_bytes >= asked_bytes:  # enough was free, but in pieces
        return asked_bytes
    return asked_bytes - free_bytes


def _said(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None or float(found.group(1).split()[0]) == 0:
        return None
    return parse_budget(found.group(1), 0)

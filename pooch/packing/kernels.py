"""The skyline decoder and the search: compiled where there is a C++ compiler, in Python elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..native import BuildError, built_library
from .instance import Instance, Integers
from .python_search import decode as decode_in_python
from .python_search import exhaust as exhaust_in_python
from .python_search import search as search_in_python

Order = NDArray[np.int32]
NO_ROUND_LIMIT = 2**62
SOURCE = Path(__file__).with_name("search.cpp")

_I32, _I64 = ctypes.c_int32, ctypes.c_int64
_INTS = np.ctypeslib.ndpointer(np.int32, flags="C_CONTIGUOUS")
_LONGS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_INSTANCE: list[Any] = [_I32, _I32, _INTS, _INTS, _LONGS, _LONGS]
_SEARCH: list[Any] = [_I32, _INTS, _I64, _I64, ctypes.c_uint64, _I64, ctypes.c_double, _I32, _LONGS]


class Kernels(Protocol):
    """What finds offsets of an instance's blocks."""

    is_native: bool

    def decode(self, instance: Instance, order: Order) -> Integers:
        """Best fit on a skyline, with ties decided by the order."""

    def search(
        self,
        instance: Instance,
        orders: Sequence[Order],
        seed: int,
        max_rounds: int,
        limit_s: float,
        start: Integers | None = None,
    ) -> tuple[Integers, int]:
        """Search from these orders until the bound or a limit is reached; return the offsets and the rounds begun.

        `start` is a layout to begin with, if no order gives a better one.
        """

    def exhaust(self, instance: Instance, ceiling: int, max_nodes: int) -> Integers | Literal[False] | None:
        """Look for an arena of at most `ceiling` bytes: offsets, False if there is none, None after `max_nodes`."""


class NativeKernels:
    """The compiled ones."""

    is_native = True

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode, self._search = library.pooch_packing_decode, library.pooch_packing_search
        self._exhaust = library.pooch_packing_exhaust
        self._exhaust.argtypes, self._exhaust.restype = [*_INSTANCE, _I64, _I64, _LONGS], _I32
        self._decode.argtypes, self._decode.restype = [*_INSTANCE, _INTS, _LONGS], _I64
        self._search.argtypes, self._search.restype = [*_INSTANCE, *_SEARCH], _I64

    def decode(self, instance: Instance, order: Order) -> Integers:
        """See `Kernels`."""
        offsets = np.zeros(len(instance.sizes), dtype=np.int64)
        self._decode(*_arguments(instance), np.ascontiguousarray(order, dtype=np.int32), offsets)
        return offsets

    def search(
        self,
        instance: Instance,
        orders: Sequence[Order],
        seed: int,
        max_rounds: int,
        limit_s: float,
        start: Integers | None = None,
    ) -> tuple[Integers, int]:
        """See `Kernels`."""
        offsets = np.zeros(len(instance.sizes), dtype=np.int64) if start is None else start.astype(np.int64)
        starts = np.ascontiguousarray(np.stack(orders), dtype=np.int32)
        rounds = self._search(
            *_arguments(instance), len(orders), starts, instance.bound_bytes, instance.granule_bytes, seed,
            max_rounds, limit_s, start is not None, offsets,
        )  # fmt: skip
        return offsets, int(rounds)

    def exhaust(self, instance: Instance, ceiling: int, max_nodes: int) -> Integers | Literal[False] | None:
        """See `Kernels`."""
        offsets = np.zeros(len(instance.sizes), dtype=np.int64)
        found = self._exhaust(*_arguments(instance), ceiling, max_nodes, offsets)
        return offsets if found == 1 else None if found < 0 else False


class PythonKernels:
    """The same in Python: the same offsets for the same rounds, many times slower."""

    is_native = False

    def decode(self, instance: Instance, order: Order) -> Integers:
        """See `Kernels`."""
        return np.array(decode_in_python(instance, order.tolist()), dtype=np.int64)

    def search(
        self,
        instance: Instance,
        orders: Sequence[Order],
        seed: int,
        max_rounds: int,
        limit_s: float,
        start: Integers | None = None,
    ) -> tuple[Integers, int]:
        """See `Kernels`."""
        starts = [order.tolist() for order in orders]
        offsets, rounds = search_in_python(
            instance, starts, seed, max_rounds, limit_s, None if start is None else start.tolist()
        )
        return np.array(offsets, dtype=np.int64), rounds

    def exhaust(self, instance: Instance, ceiling: int, max_nodes: int) -> Integers | Literal[False] | None:
        """See `Kernels`."""
        found = exhaust_in_python(instance, ceiling, max_nodes)
        return np.array(found, dtype=np.int64) if isinstance(found, list) else found


def _arguments(instance: Instance) -> tuple[object, ...]:
    return (
        len(instance.sizes), instance.n_times, instance.lower, instance.upper, instance.sizes, instance.alignments
    )  # fmt: skip


@cache
def kernels() -> Kernels:
    """Return the compiled kernels, or those in Python where they cannot be built."""
    try:
        library = built_library("packing", SOURCE)
        try:
            return NativeKernels(ctypes.CDLL(str(library)))
        except (OSError, AttributeError):  # a file that a full disk or a crash left behind
            return NativeKernels(ctypes.CDLL(str(built_library("packing", SOURCE, again=True))))
    except (BuildError, OSError, AttributeError):
        return PythonKernels()

"""The skyline decoder and the search, compiled from C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from ..ground.native import BuildError, Signatures, bound_functions, built_library
from .instance import Instance, Integers, Order

SOURCE = Path(__file__).with_name("search.cpp")
HEADERS = tuple(Path(__file__).with_name(name) for name in ("instance.h", "tree.h"))
RANKINGS = 7  # in tree.h

_I32, _I64 = ctypes.c_int32, ctypes.c_int64
_INTS = np.ctypeslib.ndpointer(np.int32, flags="C_CONTIGUOUS")
_LONGS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_INSTANCE = [_I32, _I32, _INTS, _INTS, _LONGS, _LONGS, _LONGS]
_SEARCH = [_I32, _INTS, _I64, _I64, ctypes.c_uint64, _I64, ctypes.c_double, _I32, _LONGS, _LONGS]
_SIGNATURES: Signatures = {
    "decode": ([*_INSTANCE, _INTS, _LONGS], _I64),
    "search": ([*_INSTANCE, *_SEARCH], _I64),
    "exhaust": ([*_INSTANCE, _I64, _I64, _I32, _LONGS], _I32),
}


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found.

    Attributes:
        offsets: of the instance's blocks.
        rounds: of search that were begun.
        refuted_bytes: no arena is as small as this; 0 where nothing is known.
    """

    offsets: Integers
    rounds: int = 0
    refuted_bytes: int = 0


class Kernels:
    """What finds offsets of an instance's blocks."""

    def __init__(self, library: Path) -> None:
        self._functions = bound_functions(ctypes.CDLL(str(library)), "pooch_packing", _SIGNATURES)

    def decode(self, instance: Instance, order: Order) -> Integers:
        """Best fit on a skyline, with ties decided by the order."""
        offsets = np.zeros(len(instance.sizes), dtype=np.int64)
        self._functions["decode"](*_arguments(instance), order, offsets)
        return offsets

    def search(
        self,
        instance: Instance,
        orders: Sequence[Order],
        seed: int,
        max_rounds: int,
        limit_s: float,
        start: Integers | None = None,
    ) -> Searched:
        """Search from these orders until the bound or a limit is reached.

        `start` is a layout to begin with, if no order gives a better one.
        """
        offsets = np.zeros(len(instance.sizes), dtype=np.int64) if start is None else start.copy()
        refuted_bytes = np.zeros(1, dtype=np.int64)
        rounds = self._functions["search"](
            *_arguments(instance), len(orders), np.stack(orders), instance.bound_bytes, instance.granule_bytes, seed,
            max_rounds, limit_s, start is not None, offsets, refuted_bytes,
        )  # fmt: skip
        return Searched(offsets, int(rounds), int(refuted_bytes[0]))

    def exhaust(
        self, instance: Instance, ceiling: int, max_looks: int, ranking: int = 0
    ) -> Integers | Literal[False] | None:
        """Look for an arena of at most `ceiling` bytes, in the order of one of the `RANKINGS`.

        Returns offsets, False if there is none, or None after `max_looks` at blocks.
        """
        offsets = np.zeros(len(instance.sizes), dtype=np.int64)
        found = self._functions["exhaust"](*_arguments(instance), ceiling, max_looks, ranking, offsets)
        return offsets if found == 1 else None if found < 0 else False


def _arguments(instance: Instance) -> tuple[object, ...]:
    return (
        len(instance.sizes), instance.n_times, instance.lower, instance.upper, instance.lifetimes, instance.sizes,
        instance.alignments,
    )  # fmt: skip


@cache
def kernels() -> Kernels | None:
    """Return the compiled kernels, or None where they cannot be built."""
    try:
        library = built_library("packing", SOURCE, headers=HEADERS)
        try:
            return Kernels(library)
        except (OSError, AttributeError):  # a file that a full disk or a crash left behind
            return Kernels(built_library("packing", SOURCE, headers=HEADERS, again=True))
    except (BuildError, OSError, AttributeError):
        return None

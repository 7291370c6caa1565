"""Recording what a step asks the allocator for, and serving steps from an arena."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...ground.native import Signatures, bound_functions

Integers = NDArray[np.int64]
ALIVE = -1
NO_PLACE = -1
ALL = 2**62
_LONGS = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
_SIGNATURES: Signatures = {
    "record": ([], None),
    "recorded": ([], ctypes.c_int64),
    "read": ([_LONGS, _LONGS], None),
    "serve": ([ctypes.c_int64, _LONGS, _LONGS, _LONGS, ctypes.c_int64, ctypes.c_int], ctypes.c_int),
    "requests": ([], ctypes.c_int64),
    "begin_step": ([ctypes.c_int64, ctypes.c_int64], None),
    "stop": ([], None),
    "counters": ([_LONGS], None),
    "mapped_bytes": ([], ctypes.c_int64),
    "live_blocks": ([], ctypes.c_int64),
    "contains": ([ctypes.c_void_p], ctypes.c_int),
}


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """What one step asked for, in the thread that trains.

    Attributes:
        sizes: bytes of each request, in order.
        deaths: number of the request before which each block was freed; `ALIVE` if it outlived the step.
    """

    sizes: Integers
    deaths: Integers


@dataclass(frozen=True, slots=True)
class ArenaCounters:
    """What became of the requests since the arena serves.

    Attributes:
        steps: that were begun.
        placed: requests at their place in the arena.
        unplaced: recognised, but not placed by the layout, because their block outlives the step.
        unrecognised: of another size than the recorded request.
        collided: whose place was taken by a live block.
        beyond: after the last recorded request.
        elsewhere: from other threads.
        placed_bytes: sum over `placed`.
        other_bytes: sum over all others of the thread that trains.
        broken_canaries: bytes behind blocks that something wrote to; only counted where canaries are asked for.
    """

    steps: int = 0
    placed: int = 0
    unplaced: int = 0
    unrecognised: int = 0
    collided: int = 0
    beyond: int = 0
    elsewhere: int = 0
    placed_bytes: int = 0
    other_bytes: int = 0
    broken_canaries: int = 0

    @property
    def fallbacks(self) -> int:
        """Requests of the thread that trains that have a place in a recorded step and did not get it, or are new."""
        return self.unrecognised + self.collided + self.beyond

    @property
    def requests(self) -> int:
        """All requests of the thread that trains."""
        return self.placed + self.unplaced + self.fallbacks

    def since(self, earlier: ArenaCounters) -> ArenaCounters:
        """The difference to earlier counters."""
        return ArenaCounters(*(getattr(self, each.name) - getattr(earlier, each.name) for each in fields(self)))


class ArenaCalls:
    """What the arenas of all devices have in common.

    Args:
        functions: of the compiled library, by name. Also an attribute.
    """

    def __init__(self, functions: dict[str, Any]) -> None:
        self.functions = functions

    def recorded(self) -> RecordedStep:
        """End the recording, and return it."""
        return self._read(self.functions["recorded"]())

    def _read(self, count: int) -> RecordedStep:
        step = RecordedStep(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64))
        self.functions["read"](step.sizes, step.deaths)
        return step

    def recorded_so_far(self) -> RecordedStep:
        """What was recorded up to now; the recording goes on."""
        return self._read(self.functions["requests"]())

    def stop(self) -> None:
        """Record and serve no more. An arena with live blocks stays until they are freed."""
        self.functions["stop"]()

    def counters(self) -> ArenaCounters:
        """What became of the requests since the arena serves."""
        found = np.zeros(len(fields(ArenaCounters)), dtype=np.int64)
        self.functions["counters"](found)
        return ArenaCounters(*found.tolist())


class ArenaFunctions(ArenaCalls):
    """The functions of the compiled allocator that deal with arenas. There is one arena that serves in a process.

    They do nothing while the allocator is not installed.
    """

    alignment_bytes = 64  # that of PyTorch's own CPU allocator

    def __init__(self, library: ctypes.PyDLL) -> None:
        super().__init__(bound_functions(library, "pooch_arena", _SIGNATURES))

    def record(self) -> None:
        """Begin to record what the calling thread asks for. An arena that serves is taken off."""
        self.functions["record"]()

    def serve(
        self,
        sizes: Integers,
        offsets: Integers,
        rooms: Integers,
        arena_bytes: int,
        *,
        canaries: bool = False,
        first: int = 0,
        end: int = ALL,
    ) -> bool:
        """Serve the calling thread from a new arena; an earlier one is taken off. Its first step begins now.

        Args:
            sizes: bytes of each request of a step, in order.
            offsets: of their places in bytes, multiples of 64; `NO_PLACE` for a request that has none.
            rooms: bytes of their places, at least those of the request.
            arena_bytes: of the arena.
            canaries: whether to write a pattern into the rest of each place, and look for it when the block is freed.
            first: as of `begin_step`.
            end: as of `begin_step`.

        Returns:
            Whether the system had room for the arena.
        """
        whole = [np.ascontiguousarray(each, dtype=np.int64) for each in (sizes, offsets, rooms)]
        served = self.functions["serve"](len(whole[0]), *whole, arena_bytes, int(canaries))
        if served:
            self.begin_step(first, end)
        return bool(served)

    def begin_step(self, first: int = 0, end: int = ALL) -> None:
        """Begin a step of the calling thread, or while steps are recorded, record this thread from now on.

        Args:
            first: number of the recorded request that its next one is; more than 0 in the middle of a step of several
                calls.
            end: number of the first recorded request that it does not make.
        """
        self.functions["begin_step"](first, end)

    def mapped_bytes(self) -> int:
        """Bytes of all arenas, also of those that were taken off and still have live blocks."""
        return int(self.functions["mapped_bytes"]())

    def live_blocks(self) -> int:
        """Number of blocks that live in arenas."""
        return int(self.functions["live_blocks"]())

    def contains(self, pointer: int) -> bool:
        """Whether an address lies in an arena."""
        return bool(self.functions["contains"](pointer))

"""The counting allocator: live bytes of the CPU at no cost, and a call for room before a limit is passed."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from ...ground.native import BuildError, Signatures, bound_functions
from ..stand_ins import Place, StandIns
from .arena import ArenaFunctions
from .building import built_library

NO_LIMIT = 2**63 - 1
MakeRoom = Callable[[int], None]
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_SIGNATURES: Signatures = {
    "install": ([], ctypes.c_int),
    "remove": ([], None),
    "address": ([], ctypes.c_int64),
    "live_address": ([], ctypes.c_int64),
    "peak_address": ([], ctypes.c_int64),
    "knows": ([ctypes.c_void_p], ctypes.c_int),
    "set_limit": ([ctypes.c_int64, _Callback], None),
    "give_up": ([], None),
    "resume": ([], None),
    "missed_address": ([], ctypes.c_int64),
    "end_request": ([], None),
    "take_interrupt": ([], ctypes.c_int),
    "ask_for_room": ([ctypes.c_int], None),
}


def _counted(original: Any) -> Any:
    """Copies as `copy.deepcopy` makes them: PyTorch takes memory for these past the allocator that is in place."""

    @wraps(original)
    def clone(storage: torch.UntypedStorage) -> Any:
        allocator = counting_allocator()
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu" or isinstance(allocator, str):
            return original(storage)
        return allocator.copied(storage) if allocator.is_in_use else original(storage)

    return clone


_COPIES = StandIns(Place(torch.UntypedStorage, "clone", _counted))


class CountingAllocator:
    """The process's CPU allocator, once installed. There is one for the process: see `counting_allocator`.

    It counts what PyTorch allocates on the CPU from its installation on. Blocks from before are not known to it,
    neither while they live nor when they are freed.

    Attributes:
        library: the compiled library.
        live: the place of `live_bytes`, for those who look in every step: `live.value`.
        peak: the place of `peak_bytes`.
        arena: recording of steps, and the arena that serves them, while the allocator is installed.
        give_up: Has no allocation ask for room, until `resume` or another limit is set.
        resume: Has allocations ask again.
        missed: The place of the most by which the limit was passed while room was given up. Who reads it sets it to 0.
    """

    def __init__(self, library: ctypes.PyDLL) -> None:
        self.library = library
        self._functions = bound_functions(library, "pooch_allocator", _SIGNATURES)
        self.arena = ArenaFunctions(library)
        self._make_room: MakeRoom | None = None
        self._callback = _Callback(self._ask)  # one for good: another thread may be about to call it at any time
        self.live = ctypes.c_int64.from_address(self._functions["live_address"]())
        self.peak = ctypes.c_int64.from_address(self._functions["peak_address"]())
        self.missed = ctypes.c_int64.from_address(self._functions["missed_address"]())
        self.give_up: Callable[[], None] = self._functions["give_up"]
        self.resume: Callable[[], None] = self._functions["resume"]
        self._users = dict[Hashable, bool]()  # and whether they read the peak
        self._lock = threading.RLock()  # the garbage collector may remove a user while one is added
        self._failure: BaseException | None = None

    def live_bytes(self) -> int:
        """Return how many bytes are live."""
        return self.live.value

    def peak_bytes(self) -> int:
        """Return the most that were live since `reset_peak`."""
        return self.peak.value

    def reset_peak(self) -> None:
        """Begin to look for the peak from now on."""
        self.peak.value = self.live.value

    def copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage on the CPU, with memory from this allocator."""
        copy: torch.UntypedStorage = torch.UntypedStorage(storage.nbytes(), allocator=self._functions["address"]())
        return copy.copy_(storage)

    @property
    def is_in_use(self) -> bool:
        """Whether anything has installed it and not yet removed it."""
        return bool(self._users)

    @property
    def has_reader(self) -> bool:
        """Whether somebody reads the peak, which has one reader at a time."""
        return any(self._users.values())

    def install(self, user: Hashable, *, reads_peak: bool = True) -> bool:
        """Put the allocator in place for a user, who calls `remove` even if this call was interrupted.

        Args:
            user: The user.
            reads_peak: Whether the user resets the peak and reads it.

        Returns:
            False if another allocator than PyTorch's is in place. The user has nothing to remove then.
        """
        with self._lock:
            self._users[user] = reads_peak
            if self._functions["install"]():
                _COPIES.use(self)
                return True
            self._users.pop(user, None)
            return False

    def remove(self, user: Hashable) -> None:
        """Put PyTorch's own allocator back with the last user. Blocks that are still alive stay valid.

        Calling it again, or for somebody who never was a user, does nothing.
        """
        with self._lock:
            self._users.pop(user, None)
            if not self._users:
                self.lift_limit()  # of somebody who was freed without lifting it: nobody counts for it any more
                self._functions["remove"]()
                _COPIES.leave(self)

    def set_limit(self, bytes_: int, make_room: MakeRoom) -> None:
        """Have `make_room(missing_bytes)` called before an allocation would raise the live bytes over the limit.

        It is called in the thread that allocates, in the middle of an operator, if that thread asks for room. The
        allocation goes ahead afterwards in any case. What `make_room` raises cannot be raised there, and is kept for
        `raise_failure`.
        """
        self._make_room = make_room
        self._functions["set_limit"](bytes_, self._callback)

    @property
    def has_limit(self) -> bool:
        """Whether somebody is asked to make room."""
        return self._make_room is not None

    def lift_limit(self, make_room: MakeRoom | None = None) -> None:
        """Have nothing called from now on.

        Args:
            make_room: Whose limit it is: nothing happens if that of somebody else has replaced it. None: anybody's.
        """
        if make_room is not None and make_room is not self._make_room:
            return
        self._functions["set_limit"](NO_LIMIT, self._callback)
        self._functions["take_interrupt"]()
        self._make_room = self._failure = None

    def _ask(self, missing_bytes: int) -> None:
        make_room = self._make_room
        try:
            if make_room is not None:
                make_room(missing_bytes)
        except BaseException as error:  # noqa: BLE001  (raised in `raise_failure`)
            if self._failure is None or isinstance(error, KeyboardInterrupt):
                self._failure = error
        self._functions["end_request"]()

    def raise_failure(self) -> None:
        """Raise what was raised while room was made, if anything was since the last call. An interrupt goes first."""
        was_interrupted = self._functions["take_interrupt"]()
        failure, self._failure = self._failure, None
        if was_interrupted:
            raise KeyboardInterrupt
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # else it would hold this frame, which holds it, and with them the step that it ended

    def keep_interrupt(self) -> None:
        """Have `raise_failure` raise Ctrl-C that came at the begin or end of making room, which Python only prints."""
        self._failure = KeyboardInterrupt()

    def knows(self, pointer: int) -> bool:
        """Whether a live block was allocated, and so counted, since the installation."""
        return bool(self._functions["knows"](pointer))

    def ask_for_room(self, asks: bool) -> None:
        """Set whether allocations of the calling thread ask for room."""
        self._functions["ask_for_room"](int(asks))


@cache
def counting_allocator() -> CountingAllocator | str:
    """Return the process's counting allocator, not installed yet, or in a few words why there is none."""
    try:
        library = built_library()
        try:
            return _loaded(library)
        except (OSError, AttributeError):  # a file that a full disk or a crash left behind
            return _loaded(built_library(again=True))
    except (BuildError, OSError, AttributeError) as error:
        return str(error)


def _loaded(library: Path) -> CountingAllocator:
    # PyDLL: the calls are too short to release the interpreter's lock, and callbacks take it themselves.
    return CountingAllocator(ctypes.PyDLL(str(library)))

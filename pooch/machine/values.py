"""A value of a step, and where its bytes are.

A value is what a storage holds between two writes. Its state follows from three fields:

    state       storage   ticket   is_copied   what comes next
    here        yes       no       no          a copy out begins (leaving), or its bytes are dropped (unmade)
    leaving     yes       yes      no          the copy arrives (clean) or fails (here)
    clean       yes       no       yes         its bytes are dropped (away), or an op writes over it (here)
    away        no        no       yes         a copy in begins (returning)
    returning   yes       yes      yes         the copy arrives (clean) or fails (away)
    unmade      no        no       no          its recipe runs again (here)

`Store` makes the moves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

State = Literal["here", "leaving", "clean", "away", "returning", "unmade"]
# A storage is opaque: torch's on a device, a modelled one in a simulation.
Storage = Any


class Memory(Protocol):
    """The memory of a device."""

    def new(self, size_bytes: int) -> Storage:
        """Allocate a storage, which may ask for room first."""

    def is_held_elsewhere(self, storage: Storage) -> bool:
        """Whether more than one reference holds a storage, so that dropping one frees nothing."""


class Ticket(Protocol):
    """A pending copy."""

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, or None. Only meaningful after `wait`."""

    @property
    def copy_ms(self) -> float | None:
        """What the copy itself took in ms, whether anybody waited for it or not. None as long as it is not known."""

    @property
    def moved_bytes(self) -> int:
        """How many bytes the copy moves: fewer than the storage has if they are packed. Known after `wait`."""

    def is_done(self) -> bool:
        """Whether the copy has ended, so that `wait` blocks nobody."""

    def wait(self) -> float:
        """Make compute wait for the copy, and return for how many ms the caller was blocked."""


class Place(Protocol):
    """Room in the tier for the bytes of one value."""

    def copy_out(self, storage: Storage) -> Ticket:
        """Start copying a storage here."""

    def copy_in(self, storage: Storage) -> Ticket:
        """Start filling a storage from here."""

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended: why it failed, or None."""

    def release(self) -> None:
        """Give the room back."""


class Owner(Protocol):
    """The step of a value: it knows the value's recipe, and has room in the tier.

    What has a body here is for values that have their room already, and cannot be made again.
    """

    @property
    def thread(self) -> int:
        """Number of the thread that runs the step. Values of which any thread may move the bytes have none."""
        return threading.get_ident()

    def take_place(self, size_bytes: int) -> Place | None:
        """Return room for a value, or None if the tier has no more."""
        return None

    def replay_ms(self, number: int) -> float:
        """Return the time in ms to replay a value from what is at hand now, or infinity if it cannot be replayed."""
        return math.inf

    def make_again(self, number: int) -> Storage:
        """Replay a value, and return its storage."""

    def remember(self, value: Value) -> None:
        """Remember what a value's replay is to be compared with, as its bytes are about to be dropped."""
        return

    def moved(self, value: Value) -> Iterable[Value]:
        """Forget the costs of replays that need a value, as it has come or gone, and return what they make."""
        return ()

    def gained(self, gained_ms: float) -> None:
        """Note by how much copying what was dropped would have taken longer than replaying it."""
        return

    def released(self, number: int) -> bool | None:
        """Note that autograd holds no handle on a value any more, and return whether it is kept for a plan."""
        return False


class Level(IntEnum):
    """How closely a replay is looked at. `BANNED` is not replayed at all."""

    NONE = 0
    SAMPLE = 1
    WHOLE = 2
    COPIED = 3
    BANNED = 4


@dataclass(slots=True)
class Witness:
    """What is remembered of a value that leaves in order to be made again: a checksum, and perhaps a copy.

    Attributes:
        key: Its recipe.
        level: How closely the replay is looked at.
        checksum: Returns the checksum of a storage, given whether a sample of its bytes is enough.
        digest: Checksum of its bytes, of a sample of them up to `Level.SAMPLE`.
        storage: Its bytes while the program still holds them, at which time they may still change.
        place: Its copy in the tier, or None.
        ticket: The copy under way.
    """

    key: Hashable
    level: Level
    checksum: Callable[[Storage, bool], int]
    digest: int = 0
    storage: Storage | None = None
    place: Place | None = None
    ticket: Ticket | None = None

    def take(self, storage: Storage) -> None:
        """Remember the bytes of a storage."""
        self.digest = self.checksum(storage, self.level == Level.SAMPLE)

    def agrees(self, storage: Storage) -> bool:
        """Whether a storage holds the bytes that are remembered."""
        return self.checksum(storage, self.level == Level.SAMPLE) == self.digest

    def start_copy(self, place: Place, storage: Storage) -> None:
        """Begin to copy the bytes to the tier."""
        self.place, self.ticket = place, place.copy_out(storage)

    def finish_copy(self) -> float:
        """Wait for the copy, which may have failed, and return for how many ms the caller was blocked."""
        ticket = self.ticket
        if ticket is None:
            return 0.0
        waited_ms = ticket.wait()
        self.ticket = None  # only now: an interrupt of the wait must not forget the copy
        if self.place is not None:
            self.place.copied(ticket.error)
        if ticket.error is not None:
            self.release()
        return waited_ms

    def leave(self, storage: Storage) -> float:
        """Remember the bytes as they are now, when the program has released them or is about to lose them.

        A copy that was begun earlier is made again if they have changed since. Returns for how many ms the caller was
        blocked.
        """
        self.storage = None
        waited_ms = self.finish_copy()
        before = self.digest
        self.take(storage)
        if self.place is not None and before != self.digest:
            self.ticket = self.place.copy_out(storage)
            waited_ms += self.finish_copy()
        return waited_ms

    def restore(self, storage: Storage) -> bool:
        """Fill a storage with the copy, and return whether it holds the right bytes then."""
        if self.place is None:
            return False
        ticket = self.ticket = self.place.copy_in(storage)  # kept, in case an interrupt comes while it is waited for
        ticket.wait()
        self.ticket = None
        return ticket.error is None and self.checksum(storage, False) == self.digest

    def release(self) -> None:
        """Give the room of the copy back, once no copy works on it."""
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket = None
        place, self.place = self.place, None
        if place is not None:
            place.release()


class Value:
    """One value in one step, wherever its bytes are.

    Attributes:
        number: Its number in the step.
        owner: Returns the step, which can replay it, or None once that is gone.
        handles: Number of saved tensors of autograd on it.
        size_bytes: Size of its storage.
        storage: Its bytes on the device, or None.
        place: Its room in the tier, or None.
        is_copied: Whether the tier holds its bytes.
        ticket: The copy under way, if any: in, if `is_copied`, else out.
        witness: What a replay of it is compared with, or None.
        changed: Whether an op wrote over it after it was saved.
        is_pinned: Whether its storage stays, since its contents may change without anything that tells.
        is_busy: Whether it is being read or brought back, so that it must stay.
        is_shared: Whether autograd holds the storage for its earlier contents too.
        saved_at: Position of its saving among all saves under one budget. A backward pass reads the latest first.
        home: Returns the storage in which the program holds it, or None once the program has released it.
        in_program: Returns the storage that autograd saved, as long as the program holds it, or None.
        handed_out: Whether the program obtained its address, so that it has to stay in place.
        outlives_steps: Whether it is a parameter, a gradient, a buffer, state of an optimizer or data.
    """

    __slots__ = (
        "__weakref__", "changed", "handed_out", "handles", "home", "in_program", "is_busy", "is_copied", "is_pinned",
        "is_shared", "number", "owner", "place", "saved_at", "size_bytes", "storage", "ticket", "witness",
    )  # fmt: skip

    outlives_steps = False

    def __init__(self, number: int, owner: Owner | None = None, storage: Storage | None = None) -> None:
        self.number = number
        self.owner: Callable[[], Owner | None] = _nobody if owner is None else weakref.ref(owner)
        self.handles = 0
        self.storage = storage
        self.size_bytes: int = 0 if storage is None else storage.nbytes()
        self.place: Place | None = None
        self.is_copied = False
        self.ticket: Ticket | None = None
        self.witness: Witness | None = None
        self.changed = self.is_pinned = self.is_busy = self.is_shared = False
        self.saved_at = 0
        self.home: Callable[[], Storage | None] = _nothing
        self.in_program: Callable[[], Storage | None] = _nothing
        self.handed_out = False

    @property
    def state(self) -> State:
        """Where its bytes are; see the head of this file."""
        if self.storage is None:
            return "away" if self.is_copied else "unmade"
        if self.ticket is not None:
            return "returning" if self.is_copied else "leaving"
        return "clean" if self.is_copied else "here"

    def is_held_elsewhere(self, memory: Memory) -> bool:
        """Whether anything but this holds its storage, so that dropping it would free nothing.

        Only the thread that runs its step may let go of a storage: PyTorch ends the process if one thread takes or
        releases the Python object of a storage while another one releases the storage in C++.

        Args:
            memory: The device's memory.
        """
        if self.ticket is not None:
            self.ticket.is_done()  # a copy that has ended holds the storage until somebody asks
        storage, owner = self.storage, self.owner()
        if storage is None or self.is_shared or (owner is not None and owner.thread != threading.get_ident()):
            return True
        return memory.is_held_elsewhere(storage)

    @property
    def is_gone(self) -> bool:
        """Whether the program has released what it may hold for longer than a step."""
        return False

    @property
    def is_outdated(self) -> bool:
        """Whether it was written to since the copy began that is under way."""
        return False

    def arrived(self) -> None:
        """Note that its bytes have come, and that whoever reads them may do so."""

    def forget_witness(self) -> None:
        """Forget what its replay is compared with: it is here again, or read no more."""
        witness, self.witness = self.witness, None
        if witness is not None:
            witness.release()


def _nobody() -> None:
    return None


def _nothing() -> None:
    return None

"""A modelled device and tier: storages hold a token instead of bytes, and copies end late, fail or are interrupted.

Nothing here knows torch. All that happens by chance follows from one seed.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from pooch.errors import TierError
from pooch.machine.account import MakeRoom

GARBAGE = -1
SIZES = (64, 256, 1024, 4096)


class OutOfMemory(Exception):
    """The modelled device has no memory left."""


@dataclass(frozen=True)
class Faults:
    """How often things go wrong, each as a probability.

    Attributes:
        copy_fails: That a copy out ends with an error.
        no_room: That the tier has no room for a value.
        interrupted: That Ctrl-C comes while memory is taken, or a copy begins or is waited for.
        out_of_memory: That an allocation fails.
        replay_differs: That a replay gives something else than the op did.
    """

    copy_fails: float = 0.0
    no_room: float = 0.0
    interrupted: float = 0.0
    out_of_memory: float = 0.0
    replay_differs: float = 0.0

    @property
    def tier_is_sound(self) -> bool:
        """Whether every value can be copied."""
        return not (self.copy_fails or self.no_room)


class Chance:
    """All that happens by chance in one run."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random, self.faults = random.Random(seed), faults
        self.is_calm = False  # while a step is cleaned up

    def happens(self, probability: float) -> bool:
        """Whether something of this probability happens now."""
        return probability > 0 and not self.is_calm and self.random.random() < probability

    def interrupt(self) -> None:
        """Raise Ctrl-C, if it comes now."""
        if self.happens(self.faults.interrupted):
            raise KeyboardInterrupt


class ModelledStorage:
    """Memory of the device. It is free again when nothing refers to it.

    Attributes:
        contents: A token for the bytes in it.
        number: Number of the value in it, as far as the program knows.
        is_in_parts: Whether an op wrote over it after it was saved.
        held_by_program: How many references the program has.
    """

    def __init__(self, memory: ModelledMemory, size_bytes: int) -> None:
        self.size_bytes, self.contents, self.held_by_program = size_bytes, GARBAGE, 0
        self.number, self.is_in_parts = GARBAGE, False
        self.readers = 0  # copies out that are under way
        weakref.finalize(self, memory.freed, size_bytes).atexit = False

    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size_bytes

    def data_ptr(self) -> int:
        """A number that no other living storage has."""
        return id(self)


class ModelledMemory:
    """The memory of the device, and the account of it: allocations ask for room."""

    asks = True

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.live_bytes = self.peak_bytes = 0
        self.budget_bytes: int | None = None
        self._make_room: MakeRoom = lambda _: None
        self.after: Callable[[], None] = lambda: None  # called after each allocation

    def new(self, size_bytes: int) -> ModelledStorage:
        """Allocate, after room was made."""
        self._chance.interrupt()
        if self.budget_bytes is not None and self.live_bytes + size_bytes > self.budget_bytes:
            self._make_room(self.live_bytes + size_bytes - self.budget_bytes)
        self._chance.interrupt()
        if self._chance.happens(self._chance.faults.out_of_memory):
            raise OutOfMemory
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.after()
        return ModelledStorage(self, size_bytes)

    def freed(self, size_bytes: int) -> None:
        """Note that a storage is gone."""
        self.live_bytes -= size_bytes

    def is_held_elsewhere(self, storage: ModelledStorage) -> bool:
        """Whether the program holds a storage."""
        return storage.held_by_program > 0

    # The account of bytes: see `pooch.machine.account.LiveBytes`.

    def now(self) -> int:
        return self.live_bytes

    recent = now

    def look(self) -> None:
        return None

    def peak(self) -> int:
        return self.peak_bytes

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        self.budget_bytes, self._make_room = budget_bytes, make_room

    def ask(self, asks: bool) -> None:
        return

    def recount(self) -> None:
        return

    let_go = raise_failure = close = recount

    def blind_ms(self) -> None:
        return None


@dataclass
class ModelledTicket:
    """A copy, which ends when it is waited for, or some time before."""

    tier: ModelledTier
    size_bytes: int
    finish: Callable[[], None]
    fails: bool
    error: BaseException | None = None
    _is_over: bool = False

    def is_done(self) -> bool:
        """Whether it has ended by now."""
        if not self._is_over and self.tier.chance.random.random() < 0.5:
            self.end()
        return self._is_over

    def wait(self) -> float:
        """Let it end."""
        self.tier.chance.interrupt()
        self.end()
        return self.size_bytes / self.tier.bytes_per_ms

    def end(self) -> None:
        """End the copy."""
        if self._is_over:
            return
        self._is_over = True
        if self.fails:
            self.error = OSError("the tier has failed")
        self.finish()
        self.finish = lambda: None  # it holds the storage no longer


@dataclass(eq=False)
class ModelledPlace:
    """Room for one value. Once it is given back, others write over it."""

    tier: ModelledTier
    size_bytes: int
    contents: int = GARBAGE
    is_released: bool = False
    under_way: list[ModelledTicket] = field(default_factory=list)

    def copy_out(self, storage: ModelledStorage) -> ModelledTicket:
        """Begin to copy a storage here; its contents are read at any time until the copy ends."""
        assert not self.is_released, "a copy goes to room that was given back"
        assert storage.nbytes() == self.size_bytes
        self.tier.chance.interrupt()
        storage.readers += 1
        early = storage.contents

        def finish() -> None:
            storage.readers -= 1
            # What is written over while it is copied is neither what it was nor what it is.
            self.contents = storage.contents if storage.contents == early else GARBAGE
            if ticket.fails:
                self.contents = GARBAGE

        fails = self.tier.chance.happens(self.tier.chance.faults.copy_fails)
        ticket = ModelledTicket(self.tier, self.size_bytes, finish, fails)
        self.under_way.append(ticket)
        return ticket

    def copy_in(self, storage: ModelledStorage) -> ModelledTicket:
        """Begin to fill a storage from here. Until that ends, it holds garbage."""
        assert not self.is_released, "a copy comes from room that was given back"
        self.tier.chance.interrupt()
        storage.contents = GARBAGE

        def finish() -> None:
            storage.contents = GARBAGE if self.is_released else self.contents

        ticket = ModelledTicket(self.tier, self.size_bytes, finish, False)
        self.under_way.append(ticket)
        return ticket

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy ended."""
        if error is not None:
            self.tier.failed(error)

    def release(self) -> None:
        """Give the room back: once, and with no copy under way."""
        assert not self.is_released, "room was given back twice"
        assert all(ticket._is_over for ticket in self.under_way), "room was given back in the middle of a copy"
        self.is_released, self.contents = True, GARBAGE
        self.tier.in_use -= 1


class ModelledTier:
    """The swap tier, and what is wrong with it."""

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.in_use, self.bytes_per_ms = 0, 1e3
        self.fault: TierError | None = None

    def take(self, size_bytes: int) -> ModelledPlace | None:
        """Room for a value, or None."""
        if self.chance.happens(self.chance.faults.no_room):
            return None
        self.in_use += 1
        return ModelledPlace(self, size_bytes)

    def failed(self, error: BaseException, *, is_told: bool = True) -> TierError:
        """Note a fault."""
        self.fault = TierError(str(error))
        return self.fault

"""A modelled device whose storages hold a token for their contents, and whose copies end late, fail or are interrupted.

It is that of `pooch.simulator.modelled` apart from this. All that happens by chance follows from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pooch.ir import Link
from pooch.machine.account import MakeRoom
from pooch.simulator import modelled

GARBAGE = -1
SIZES = (64, 256, 1024, 4096)
LINK = Link("a modelled tier", 0.0, 0.0, 1.0, 1.0)  # copies end by chance


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


class ModelledStorage(modelled.ModelledStorage):
    """Memory of the device.

    Attributes:
        contents: A token for the bytes in it.
        number: Number of the value in it, as far as the program knows.
        is_in_parts: Whether an op wrote over it after it was saved.
        readers: Number of copies out that are under way.
    """

    def __init__(self, memory: ModelledMemory, size_bytes: int) -> None:
        super().__init__(memory, size_bytes)
        self.contents, self.number, self.is_in_parts, self.readers = GARBAGE, GARBAGE, False, 0


class ModelledMemory(modelled.ModelledMemory):
    """The memory of the device, where allocations fail.

    Attributes:
        after: Called after each allocation.
        asked: How often room was asked for.
        has_given_up: Whether nobody is asked, as nothing could leave.
    """

    def __init__(self, chance: Chance) -> None:
        super().__init__()
        self._chance = chance
        self.after: Callable[[], None] = lambda: None
        self.asked = self._missed_bytes = 0
        self.has_given_up = False

    def new(self, size_bytes: int) -> ModelledStorage:
        """Allocate, after room was made."""
        self._chance.interrupt()
        self.ask_for(size_bytes)
        self._chance.interrupt()
        if self._chance.happens(self._chance.faults.out_of_memory):
            raise OutOfMemory
        storage = ModelledStorage(self, size_bytes)
        self.after()
        return storage

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Ask for room before live bytes pass the budget, and count how often."""

        def asked(missing_bytes: int) -> None:
            self.asked += 1
            make_room(missing_bytes)

        self.has_given_up = False
        super().hold(budget_bytes, asked)

    def ask_for(self, more_bytes: int) -> None:
        """Ask for room, unless nothing can leave, or note how much is missing."""
        if not self.has_given_up:
            super().ask_for(more_bytes)
        elif self.budget_bytes is not None:
            self._missed_bytes = max(self._missed_bytes, self.live_bytes + more_bytes - self.budget_bytes)

    def give_up(self) -> None:
        """Ask nobody from now on."""
        self.has_given_up = True

    def resume(self) -> None:
        """Ask again."""
        self.has_given_up = False

    def missed_bytes(self) -> int:
        """The most by which the budget was passed while nobody was asked, since `reset_peak`."""
        return self._missed_bytes

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""
        super().reset_peak()
        self._missed_bytes = 0


@dataclass
class ModelledTicket:
    """A copy, which ends when it is waited for, or some time before."""

    tier: ModelledTier
    size_bytes: int
    finish: Callable[[], None]
    fails: bool
    error: BaseException | None = None
    _is_over: bool = False

    @property
    def moved_bytes(self) -> int:
        """What it moves."""
        return self.size_bytes

    @property
    def copy_ms(self) -> float | None:
        """What it took."""
        return self.size_bytes / self.tier.bytes_per_ms if self._is_over else None

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


class ModelledPlace(modelled.ModelledPlace):
    """Room for one value. Once it is given back, others write over it."""

    tier: ModelledTier

    def __init__(self, tier: ModelledTier, size_bytes: int) -> None:
        super().__init__(tier, size_bytes)
        self.contents, self.is_released = GARBAGE, False
        self.under_way: list[ModelledTicket] = []

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

    def release(self) -> None:
        """Give the room back: once, and with no copy under way."""
        assert not self.is_released, "room was given back twice"
        assert all(ticket._is_over for ticket in self.under_way), "room was given back in the middle of a copy"
        self.is_released, self.contents = True, GARBAGE
        super().release()


class ModelledTier(modelled.ModelledTier):
    """The swap tier, and what is wrong with it."""

    def __init__(self, chance: Chance) -> None:
        super().__init__(modelled.ModelledClock(LINK))
        self.chance, self.bytes_per_ms = chance, 1e3

    def take(self, size_bytes: int) -> ModelledPlace | None:
        """Room for a value, or None."""
        if self.chance.happens(self.chance.faults.no_room):
            return None
        self.in_use += 1
        return ModelledPlace(self, size_bytes)

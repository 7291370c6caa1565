"""What the executor asks of a copy engine.

Ordering rules that every engine keeps:
1. A copy out starts after everything that was issued before `copy_out` has been computed.
2. After `wait` on a ticket, whatever is computed next sees the copy complete; its source may be let go of.
3. A copy in writes into memory that was taken before `copy_in`, and starts after the copy out of the same room.
4. Room in an arena is not shared by two values of a step at the same time: a copy out starts after the copy in of the
   value that had the room before.
5. Room that is used again by a later step is written only after the earlier step's copies are complete.
6. Compute is whatever is issued on the arena's stream, the one that was current when it was opened. What the program
   does on other streams besides is its own affair, as long as it works on nothing of the plan. Where it does, that
   stream is `joined`: from then on copies wait for it too, and it waits for copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from pooch.executor.engines.step_clock import StepClock

Purpose = Literal["step", "snapshot"]  # what an arena is for: the values of a step, or what is kept aside to repeat it


class Ticket(Protocol):
    """One copy under way."""

    @property
    def error(self) -> BaseException | None:
        """Why the copy failed, or None; only meaningful after `wait`."""

    def wait(self) -> float:
        """Make compute wait for the copy; returns the ms that the caller was blocked."""


class Arena(Protocol):
    """Room in the tier for one step."""

    @property
    def clock(self) -> StepClock | None:
        """Times of the step from the device itself; None where the host does all that is done."""

    def is_beside(self) -> bool:
        """Whether the calling thread computes on another stream than the arena's; asked before each op."""

    def at_home(self) -> AbstractContextManager[None]:
        """Inside, the calling thread computes on the arena's stream, and its own stream waits for that afterwards."""

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """The calling thread's stream works on values of the plan: on these now, maybe on others later."""

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start copying a storage to the tier."""

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start filling a storage from the tier."""

    def close(self) -> None:
        """Give the room back; copies under way are completed first."""


class CopyEngine(Protocol):
    """Opens arenas on one device."""

    @property
    def description(self) -> str:
        """What the tier is, for people."""

    @property
    def has_two_lanes(self) -> bool:
        """Whether a copy out and a copy in can be under way at the same time."""

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> Arena:
        """Take room for one step. Each purpose has room of its own, so that none takes from another what it would have
        to get anew in mid-step.

        Raises:
            TierError: there is not enough of it.
        """

    def aside(self) -> AbstractContextManager[Callable[[], None]]:
        """Copies issued by this thread inside are ordered after nothing that computes; yields what waits for them."""

    def close(self) -> None:
        """Stop threads and give everything back."""

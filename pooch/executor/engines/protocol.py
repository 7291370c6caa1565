"""The interface of a copy engine.

Every engine guarantees this order:
1. A copy out starts after everything issued before `copy_out` has been computed.
2. After `wait` on a ticket, whatever is computed next sees the copy complete, and its source may be released.
3. A copy in writes into memory that was allocated before `copy_in`, and starts after the copy out of the same room.
4. Two values of a step never share room in an arena at the same time: a copy out starts after the copy in of the value
   that had the room before.
5. Room that is reused by a later step is written only after the earlier step's copies are complete.
6. Compute is what is issued on the arena's stream, the one that was current when the arena was opened. Work of the
   program on other streams is ignored unless it touches planned values. A stream that does must `join`: from then on
   copies wait for it, and it waits for copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from ...machine.values import Ticket
from .health import TierHealth
from .step_clock import StepClock
from .tier_room import TierRoom

# The values of a step, a snapshot that allows to repeat it, or copies of what is recomputed until that is proven.
Purpose = Literal["step", "snapshot", "copies"]


class Arena(Protocol):
    """Room in the tier for one step."""

    @property
    def clock(self) -> StepClock | None:
        """Times of the step as measured on the device, or None if the host computes."""

    def is_beside(self) -> bool:
        """Whether the calling thread computes on a stream other than the arena's. Called before each op."""

    def at_home(self) -> AbstractContextManager[None]:
        """Let the calling thread compute on the arena's stream inside; its own stream waits for that afterwards."""

    def join(self, storages: list[torch.UntypedStorage]) -> None:
        """Order copies with the calling thread's stream from now on, since it works on these planned storages."""

    def copy_out(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start copying a storage to the tier."""

    def copy_in(self, storage: torch.UntypedStorage, offset_bytes: int) -> Ticket:
        """Start filling a storage from the tier."""

    def close(self) -> None:
        """Release the room. Pending copies are completed first."""


class CopyEngine(Protocol):
    """Opens arenas on one device."""

    @property
    def description(self) -> str:
        """Description of the tier for reports."""

    @property
    def has_two_lanes(self) -> bool:
        """Whether a copy out and a copy in can run at the same time."""

    @property
    def room(self) -> TierRoom:
        """How much of the tier the engine holds, and may hold."""

    @property
    def health(self) -> TierHealth:
        """What is wrong with the tier."""

    def probe(self) -> bool:
        """Whether the tier can be used now, as far as a look tells. If not, `health` notes why."""

    def open_arena(self, size_bytes: int, purpose: Purpose = "step") -> Arena:
        """Take room for one step.

        Args:
            size_bytes: Size of the room.
            purpose: Each purpose has its own room, so that none has to allocate again in the middle of a step.

        Raises:
            TierError: If there is not enough room.
        """

    def aside(self) -> AbstractContextManager[Callable[[], None]]:
        """Do not order this thread's copies inside after compute. Yields a function that waits for them."""

    def close(self) -> None:
        """Stop threads and release everything."""

"""What it costs that a value leaves: to copy it out and in, or to replay it."""

from __future__ import annotations

from .eviction import EvictionPolicy
from .recipes import NEVER_MS
from .speed import CopySpeed
from .store import Store
from .values import Value


class LeavingCosts:
    """The costs of both ways, in ms; infinity where a way is none.

    Args:
        policy: Says which ways there are.
        speed: How fast copies are.
        store: Says whether the budget grows with the step, which may forbid replays.
    """

    def __init__(self, policy: EvictionPolicy, speed: CopySpeed, store: Store) -> None:
        self._policy, self._speed, self._store = policy, speed, store

    def cheapest_ms(self, value: Value) -> float:
        """Return what the cheaper way of leaving costs."""
        return min(self.copy_ms(value), self.replay_ms(value))

    def copy_ms(self, value: Value) -> float:
        """Return what it costs to copy a value, which takes less if the tier has it."""
        if not self._policy.may_copy:
            return NEVER_MS
        ticket = value.ticket
        is_written = value.is_copied or (ticket is not None and ticket.is_done())
        return self._speed.leaving_ms(value.size_bytes, is_written=is_written)

    def replay_ms(self, value: Value) -> float:
        """Return what it costs to make a value again."""
        owner, growing = value.owner(), self._store.growing
        may_drop = self._policy.may_drop and (growing is None or growing.replays)
        return owner.replay_ms(value.number) if owner is not None and may_drop else NEVER_MS

"""What is known about the arena of a run, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ...ground.units import format_bytes
from .arena import ArenaCounters

ArenaState = Literal["waiting", "recording", "packing", "serving", "off"]


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """The arena of a run.

    Attributes:
        state: "waiting" for a warm step, "recording" steps, "packing" their blocks beside training, "serving" steps, or
            "off".
        reason: why it is off; empty otherwise.
        arena_bytes: of the arena that serves, or served last. 0 before the first.
        bound_bytes: the highest sum of live bytes in the arena: no arena could be smaller.
        blocks: requests of a step that have a place.
        unplaced_blocks: requests of a step that have none, because their blocks outlive the step.
        calls: calls of the model after which requests repeat, and which were packed as one step.
        layouts: number of layouts that were made so far.
        counters: of requests since the arena serves.
    """

    state: ArenaState
    reason: str = ""
    arena_bytes: int = 0
    bound_bytes: int = 0
    blocks: int = 0
    unplaced_blocks: int = 0
    calls: int = 1
    layouts: int = 0
    counters: ArenaCounters = field(default_factory=ArenaCounters)

    @property
    def share_placed(self) -> float:
        """Share of the requests that have a place in the layout, or are not part of it, that got their place."""
        asked = self.counters.placed + self.counters.fallbacks
        return self.counters.placed / asked if asked else 1.0

    def line(self) -> str:
        """The arena in one line."""
        if not self.arena_bytes:
            return f"none: {self.reason}" if self.reason else f"none yet, {self.state}"
        over = self.arena_bytes / self.bound_bytes - 1 if self.bound_bytes else 0.0
        counters = self.counters
        of_calls = f" of {self.calls} calls" if self.calls > 1 else ""
        return (
            f"{self.state}, {format_bytes(self.arena_bytes)} ({over:.2%} over the bound), {self.blocks} blocks"
            f"{of_calls}, {counters.steps} steps: {self.share_placed:.2%} of requests at their place, "
            f"{counters.fallbacks} not ({counters.unrecognised} unknown, {counters.collided} collided, "
            f"{counters.beyond} beyond the step), {counters.unplaced} of blocks that outlive a step"
        )

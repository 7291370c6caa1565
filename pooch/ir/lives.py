"""The memory of a step as blocks with addresses and lifetimes: predicted from a plan, or measured. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Life:
    """A block of memory, from its allocation to its release.

    Attributes:
        decision: what is done with it: "kept", "swapped", "recomputed", or what it is where nothing is decided.
        label: of its value, or what made it.
        why: the reason of the decision, or "".
        number: id of its value, index of its op, or -1.
        address: its place, in bytes from the beginning of its region.
        size_bytes: its bytes.
        begin: where in the order of all events it is allocated. Releases at the same place come first.
        end: where it is released; None: it outlives the step.
        begin_us: the same as times.
        end_us: the same as times.
    """

    decision: str
    label: str
    why: str
    number: int
    address: int
    size_bytes: int
    begin: int
    end: int | None
    begin_us: int
    end_us: int


@dataclass(frozen=True, slots=True)
class StepLives:
    """All blocks of a step.

    Attributes:
        name: of the workload, and whether this was predicted or measured.
        outside_bytes: what is there throughout, in a region of its own.
        region_bytes: size of the region in which the blocks lie.
        lives: the blocks.
    """

    name: str
    outside_bytes: int
    region_bytes: int
    lives: tuple[Life, ...]

    @property
    def peak_bytes(self) -> int:
        """Highest sum of live bytes."""
        changes: dict[int, list[int]] = {}
        for life in self.lives:
            changes.setdefault(life.begin, [0, 0])[1] += life.size_bytes
            if life.end is not None:
                changes.setdefault(life.end, [0, 0])[0] += life.size_bytes
        live = peak = self.outside_bytes
        for place in sorted(changes):
            released, allocated = changes[place]
            live += allocated - released
            peak = max(peak, live)
        return peak

"""What copies are thought to take, where no test may depend on how fast they are."""

from __future__ import annotations

from collections.abc import Callable

from pooch.machine import CopySpeed


def costing(cost_ms: Callable[[int], float]) -> dict[str, Callable[..., float]]:
    """Return what to put in place of methods of `CopySpeed`, by their names.

    Args:
        cost_ms: Returns the time of a copy of a size in one direction.
    """

    def back_ms(_: CopySpeed, size_bytes: int) -> float:
        return cost_ms(size_bytes)

    def leaving_ms(_: CopySpeed, size_bytes: int, *, is_written: bool) -> float:
        return cost_ms(size_bytes) * (1 if is_written else 2)

    return {"back_ms": back_ms, "leaving_ms": leaving_ms}

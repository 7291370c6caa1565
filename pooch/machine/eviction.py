"""Which saved value leaves when memory runs short and no plan decides: a score, the lowest leaves first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .values import Value

# Given a value, what the cheaper way of leaving costs in ms (infinity if there is none), and the distance to its next
# use: its score.
Score = Callable[[Value, float, float], float]
Sample = Callable[[list[Value]], list[Value]]
_SOFTENING = 20  # positions in the order of saving


def distance(current: float, saved: float) -> float:
    """About how far ahead a value's next use is: positions in the order of saving, at least 1.

    A backward pass reads values in reverse order of saving. While it runs, `current` is the position of the value that
    it read last; in the forward pass, that of the value saved last, and the distance is the value's staleness.
    """
    return max(1.0, current - saved)


def online_score(cost_ms: float, size_bytes: int, ahead: float) -> float:
    """What the cheaper way of leaving costs, per byte and per square root of the distance to the next use.

    The square root, because the distance is certain in the backward pass alone: in the forward pass, everything waits
    longer than this, and the peak lies before all of it. For the same reason, twenty are added to it.

    Args:
        cost_ms: of the cheaper way.
        size_bytes: that it frees.
        ahead: see `distance`.
    """
    return cost_ms / (max(1, size_bytes) * math.sqrt(ahead + _SOFTENING))


def priced_score(price: float, current: float, saved: float) -> float:
    """`online_score` of what costs `price` per byte, at a position of the backward pass: see `distance`."""
    return price / math.sqrt(max(1.0, current - saved) + _SOFTENING)


def ours(value: Value, cost_ms: float, ahead: float) -> float:
    """Pooch's own score."""
    return online_score(cost_ms, value.size_bytes, ahead)


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """By what rule values leave. Without arguments: Pooch's own, by which real steps run.

    Attributes:
        score: The lowest leaves first, among equals what was saved first. It may grow as others leave, but not shrink.
        may_copy: Whether values may leave by copy.
        may_drop: Whether values may be dropped, to be made again.
        sample: Of those that can leave, given in the order of their saving, those that are looked at before one of
            them leaves. None: all.
    """

    score: Score = ours
    may_copy: bool = True
    may_drop: bool = True
    sample: Sample | None = None


OURS = EvictionPolicy()


class Rule:
    """The policy of one modelled step, which is told what happens to the step's values: Pooch's own, or one derived."""

    policy = OURS

    def dropped(self, number: int) -> None:
        """Note that a value was dropped."""

    def made_again(self, number: int) -> None:
        """Note that a value that was dropped is back, or that nobody wants it any more."""

    def accessed(self, number: int) -> None:
        """Note that a value was made, read, or brought back."""

"""The kinds of steps that are remembered, within limits: a program may meet new shapes for as long as it runs."""

from __future__ import annotations

from ..ground.bounded import RecentlyUsed
from ..ir import Profile
from .known import Family, Known
from .signature import StepKey

MOST_SHAPES = 1024  # kinds of steps
MOST_OPS = 2**19  # of their profiles together: an op takes about 1 KiB, with its part of the plan


class KnownShapes:
    """What is known of each kind of step. What did not come for the longest time is forgotten, beyond the limits.

    The kind that came last, which a running step holds, is never forgotten. A family of steps is remembered as long as
    any of its shapes is.

    Attributes:
        forgotten: Number of kinds that were forgotten so far.
    """

    def __init__(self) -> None:
        self._known: RecentlyUsed[StepKey, Known] = RecentlyUsed(MOST_SHAPES)
        self._families: dict[tuple[object, ...], Family] = {}
        self.forgotten = 0

    def find(self, key: StepKey) -> Known | None:
        """Return what is known of a kind of step that comes now, or None."""
        return self._known.get(key)

    def look(self, key: StepKey) -> Known | None:
        """Return what is known of a kind of step, or None."""
        return self._known.look(key)

    def add(self, key: StepKey, known: Known) -> None:
        """Remember a kind of step, which comes now."""
        self.family(key).shapes += 1
        for forgotten, _ in self._known.put(key, known):
            self._left(forgotten)

    def family(self, key: StepKey) -> Family:
        """Return what is known of the family of a kind of step."""
        return self._families.setdefault(key.family, Family())

    def has_grown(self) -> None:
        """Forget what is beyond the limit of ops, as a profile has come in."""
        while len(self._known) > 1 and self._ops() > MOST_OPS:
            self._left(self._known.forget_oldest()[0])

    def _ops(self) -> int:
        recorded = [profile for family in self._families.values() for profile in family.recorded.values()]
        own = [known.profile for known in self._known.values() if known.profile is not None]
        distinct: dict[int, Profile] = {id(profile): profile for profile in (*recorded, *own)}
        return sum(len(profile.ops) for profile in distinct.values())

    def _left(self, key: StepKey) -> None:
        self.forgotten += 1
        family = self._families[key.family]
        family.shapes -= 1
        if not family.shapes:
            del self._families[key.family]

    def __len__(self) -> int:
        return len(self._known)

    def values(self) -> list[Known]:
        """Return what is known of each kind."""
        return self._known.values()

    def items(self) -> list[tuple[StepKey, Known]]:
        """Return each kind and what is known of it."""
        return self._known.items()

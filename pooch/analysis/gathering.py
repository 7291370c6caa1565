"""Where replays can read the parameters that FSDP gathers: inside of the windows of their unit."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.profile import GatheredUnit, Profile


class Gathering:
    """The windows of a profile's units, over the anchors at which a schedule can act.

    Sets of anchors are bits of one number, since there is one for each value, and steps have thousands of both.

    Args:
        profile: the measured step.
        anchor_slots: ascending.
    """

    def __init__(self, profile: Profile, anchor_slots: Sequence[int]) -> None:
        self._bits = {slot: 1 << place for place, slot in enumerate(anchor_slots)} if profile.gathered else {}
        self._unit_of: dict[int, GatheredUnit] = {value: unit for unit in profile.gathered for value in unit.values}
        there = {unit: self._anchors_within(unit) for unit in profile.gathered}
        self._there = {value: there[unit] for value, unit in self._unit_of.items()}

    def _anchors_within(self, unit: GatheredUnit) -> int:
        inside = (bit for slot, bit in self._bits.items() if any(first <= slot <= last for first, last in unit.windows))
        return sum(inside)

    def at(self, slot: int) -> int:
        """The set of one anchor; it is empty if no schedule can act in that slot."""
        return self._bits.get(slot, 0)

    def is_gathered(self, value: int) -> bool:
        """Whether it is a parameter that FSDP gathers again for the backward pass."""
        return value in self._unit_of

    def is_there(self, value: int, anchors: int) -> bool:
        """Whether a gathered parameter is there at all anchors of a set, of which there has to be one at least."""
        return anchors != 0 and anchors & ~self._there[value] == 0

    def why_missing(self, value: int) -> str:
        """Why a replay that reads a gathered parameter is refused."""
        name = self._unit_of[value].name
        unit = f"unit {name}" if name else "the root unit"
        return f"it reads a parameter that FSDP gathers for {unit}, which may be gone by then"

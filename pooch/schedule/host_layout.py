"""Places swapped values in the tier; values that are there at different times may share room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..ground.units import round_up
from ..ir import Action
from ..ir.schedule import TIER_ALIGNMENT_BYTES
from ..packing import Block, bound_of, pack

NEVER = 1 << 60
_NO_LIMIT_S = 1e6  # the packer only decodes its orders, so that the same schedule has the same tier every time


@dataclass(frozen=True, slots=True)
class TierStay:
    """The slots between which the tier has to hold a value.

    Attributes:
        value: its id.
        first_slot: of its copy out.
        last_slot: of the wait after which it is back for good. `NEVER`: it does not come back, as an unexpected reader
            may still need it.
    """

    value: int
    first_slot: int
    last_slot: int


def tier_stays(actions: Iterable[Action], swapped: Sequence[int]) -> list[TierStay]:
    """Return when each swapped value is in the tier, in order of their copies out."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    moved = frozenset(swapped)
    for action in actions:
        if action.kind in ("replay", "drop") or action.target not in moved:
            continue
        if action.kind == "copy_out":
            first[action.target] = action.slot
        last[action.target] = action.slot if action.kind == "wait" else NEVER
    stays = (TierStay(value, first.get(value, 0), last.get(value, NEVER)) for value in swapped)
    return sorted(stays, key=lambda stay: (stay.first_slot, stay.value))


def lay_out(
    actions: Iterable[Action], swapped: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Give each swapped value room, at multiples of `TIER_ALIGNMENT_BYTES`; `sizes` are in bytes, by id.

    Room is reused by a copy out in a later slot than the wait that brought the previous value back. By then, compute
    has waited for the copy in, and copies out run after compute, so the two never overlap on any engine. The smallest
    free room that suffices is taken; the rest of it stays free. Where that wastes room, the packer of arenas does it:
    a few milliseconds, which lowering hundreds of schedules should not take for nothing.

    Returns:
        (value, offset in bytes) in order of `swapped`, and the size of the tier.
    """
    stays = tier_stays(actions, swapped)
    rooms, top = _best_fit(stays, sizes)
    blocks = [_block(stay, sizes) for stay in stays]
    if top > bound_of(blocks):
        packed = pack(blocks, max_rounds=0, time_limit_s=_NO_LIMIT_S)
        if packed.arena_bytes < top:
            top = packed.arena_bytes
            rooms = {stay.value: offset for stay, offset in zip(stays, packed.offsets, strict=True)}
    return tuple((value, rooms[value]) for value in swapped), top


def _block(stay: TierStay, sizes: Sequence[int]) -> Block:
    size_bytes = round_up(sizes[stay.value], TIER_ALIGNMENT_BYTES)
    return Block(stay.first_slot, stay.last_slot + 1, size_bytes, TIER_ALIGNMENT_BYTES)


def _best_fit(stays: Sequence[TierStay], sizes: Sequence[int]) -> tuple[dict[int, int], int]:
    """Return the offset of each value, and the size of the tier."""
    ending = sorted(stays, key=lambda stay: stay.last_slot)
    rooms: dict[int, tuple[int, int]] = {}  # value -> (bytes, offset)
    free: list[tuple[int, int]] = []  # (bytes, offset), the smallest first
    top = ended = 0
    for stay in stays:
        while ending[ended].last_slot < stay.first_slot:
            insort(free, rooms[ending[ended].value])
            ended += 1
        size_bytes = round_up(sizes[stay.value], TIER_ALIGNMENT_BYTES)
        place = bisect_left(free, (size_bytes, -1))
        if place < len(free):
            room_bytes, offset = free.pop(place)
            if room_bytes > size_bytes:
                insort(free, (room_bytes - size_bytes, offset + size_bytes))
        else:
            offset, top = top, top + size_bytes
        rooms[stay.value] = (size_bytes, offset)
    return {value: offset for value, (_, offset) in rooms.items()}, top

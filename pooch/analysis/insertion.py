"""A step with ops that the profiled one does not have, such as collectives."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..ir.profile import Op, Phase, Profile, Value


@dataclass(frozen=True, slots=True)
class Insertion:
    """An op to insert, which neither reads nor writes values.

    Attributes:
        before: slot of the profile that it precedes. Several before one slot keep their order.
        name: of the op.
        phase: that it belongs to; forward ops before the first backward op come before backward ones.
        refusal: why it cannot be replayed.
        module: path of the module that it belongs to.
    """

    before: int
    name: str
    phase: Phase
    refusal: str
    module: str = ""


def with_inserted(profile: Profile, insertions: Sequence[Insertion]) -> tuple[Profile, list[int]]:
    """The step with more ops, each of which takes no time and has the bytes that are live at its entry.

    Args:
        profile: of the step, without one in slices (`split`) beside it.
        insertions: in ascending order.

    Returns:
        The profile, and the slots of the inserted ops in it.
    """
    places = [each.before for each in insertions]

    def moved(slot: int) -> int:
        """The new slot of an op; slots below 0 mean that there is none."""
        return slot if slot < 0 else slot + bisect_right(places, slot)

    forward = sum(each.phase == "forward" for each in insertions)
    slots = [each.before + number for number, each in enumerate(insertions)]
    ops = {moved(op.index): replace(op, index=moved(op.index)) for op in profile.ops}
    for slot, each in zip(slots, insertions, strict=True):
        entry_bytes = profile.ops[each.before].entry_bytes
        ops[slot] = Op(
            slot, each.name, each.phase, each.module, 0.0, entry_bytes, entry_bytes, refusal=each.refusal
        )  # fmt: skip
    made = replace(
        profile,
        ops=tuple(ops[slot] for slot in range(len(ops))),
        values=tuple(_moved_value(value, moved) for value in profile.values),
        anchors=tuple((moved(slot), ids) for slot, ids in profile.anchors),
        forward_ops=profile.forward_ops + forward,
        model_begin=profile.model_begin + bisect_left(places, profile.model_begin),
        model_end=profile.model_end + bisect_left(places, profile.model_end),
    )
    return made, slots


def _moved_value(value: Value, moved: Callable[[int], int]) -> Value:
    return replace(
        value,
        producer=moved(value.producer),
        overwritten_at=moved(value.overwritten_at),
        release=moved(value.release),
        first_unpack=moved(value.first_unpack),
        death=moved(value.death),
        touches=None if value.touches is None else tuple(moved(slot) for slot in value.touches),
    )

"""The schedule: a plan lowered to actions at slots, which is both simulated and executed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..ground.units import format_bytes, plural

ActionKind = Literal["copy_out", "free", "empty", "refill", "copy_in", "wait", "replay", "drop"]
TIER_ALIGNMENT_BYTES = 4096  # of a value's room, as direct I/O requires


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do at the entry of a slot, just before its op.

    Attributes:
        slot: at whose entry it happens; in the backward pass, only anchors of the profile.
        kind: what happens:
            "copy_out": start copying value `target` to the tier (its contents are complete).
            "free": wait until the copy of `target` is complete, then release it and its device bytes.
            "empty": (forward pass) free the device bytes of value `target`, which the program still holds; for a
                swapped value, once its copy is complete.
            "refill": (forward pass) allocate the emptied storage of `target` again and start copying back.
            "copy_in": allocate device bytes for `target` and start copying it back.
            "wait": wait until `target` is back.
            "replay": run forward op `target` again and keep the outputs named in `outputs`.
            "drop": release the schedule's hold on value `target`: a replayed intermediate, or a source that was held
                for replays. A value that autograd still holds stays until its death.
        target: id of a value, or for "replay" the index of an op.
        outputs: for "replay": ids of the written values that stay.
        in_place: for "replay": ids of read values that the op may overwrite, since they are not needed any more; other
            in-place ops replay on a copy.
    """

    slot: int
    kind: ActionKind
    target: int
    outputs: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """All actions of a step.

    Attributes:
        actions: in execution order.
        sources: kept (or fixed, not external) values that the runtime holds until their "drop", because a replay reads
            them.
        recomputed: values that a replay makes instead of autograd saving them.
        swapped: values that are copied out and back.
        host_offsets: (value, offset in bytes) of each swapped value in the tier.
        host_bytes: size of the tier that the schedule needs.
    """

    actions: tuple[Action, ...]
    sources: tuple[int, ...]
    recomputed: tuple[int, ...]
    swapped: tuple[int, ...]
    host_offsets: tuple[tuple[int, int], ...]
    host_bytes: int

    def __repr__(self) -> str:
        moved = f"{len(self.swapped):,} swapped, {len(self.recomputed):,} recomputed"
        return f"Schedule({plural(len(self.actions), 'action')}, {moved}, {format_bytes(self.host_bytes)} in the tier)"

"""The schedule: a plan lowered to actions tied to slots. What is executed and what is simulated is the same
schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActionKind = Literal["copy_out", "free", "empty", "refill", "copy_in", "wait", "replay", "drop"]
TIER_ALIGNMENT_BYTES = 4096  # of a value's room: what direct I/O asks for


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do at the entry of a slot, just before its op.

    Attributes:
        slot: at whose entry it happens. Backward actions only stand at anchor slots of the profile.
        kind: and what `target` is:
            "copy_out": start copying value `target` to the tier (its contents are complete).
            "free": wait until the copy of `target` is complete, then let go of it; its device bytes go with it.
            "empty": (forward pass) take the device bytes from value `target`, which the program still holds; a swapped
                one once its copy is complete.
            "refill": (forward pass) give the emptied storage of `target` device bytes again and start copying back.
            "copy_in": take device bytes for `target` and start copying it back.
            "wait": wait until `target` is back.
            "replay": run forward op `target` again. The outputs named in `outputs` stay; others are dropped.
            "drop": let go of the schedule's own hold on value `target`: a replayed intermediate, or a source
                that was held for replays. A value that autograd still holds stays until its death.
        outputs: for "replay": ids of the written values that stay resident.
        in_place: for "replay": ids of read values whose storage the op may overwrite (they are not needed any more);
            other in-place ops replay on a fresh copy.
    """

    slot: int
    kind: ActionKind
    target: int
    outputs: tuple[int, ...] = ()
    in_place: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """All actions of a step, in order of slot and, within a slot, in order of execution.

    Attributes:
        actions: in execution order.
        sources: kept (or fixed, not external) values that the runtime holds from their birth until their "drop",
            because a replay reads them.
        recomputed: values that autograd does not get and that a replay makes.
        swapped: values that a copy takes out and brings back.
        host_offsets: (value, offset in bytes) of each swapped value in the tier.
        host_bytes: size of the tier that the schedule needs.
    """

    actions: tuple[Action, ...]
    sources: tuple[int, ...]
    recomputed: tuple[int, ...]
    swapped: tuple[int, ...]
    host_offsets: tuple[tuple[int, int], ...]
    host_bytes: int

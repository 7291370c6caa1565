"""The plan as the runtime looks things up in it; made once when a plan is applied."""

from __future__ import annotations

from dataclasses import dataclass

from pooch.executor.recognition import OpRecogniser
from pooch.ir import Action, ExpectedOp, Plan


@dataclass(frozen=True, slots=True)
class ActionTable:
    """Lookups of one plan.

    Attributes:
        expected: forward ops of the region, in order.
        first_slot: slot of the first of them.
        actions: {slot: actions at its entry, in order}.
        anchor_of: {value id: slot at whose entry the backward pass first reads it}, for slots that have actions.
        swapped, recomputed, sources: as in the schedule.
        emptied: values whose bytes leave while the program still holds them.
        dropped: values that the schedule lets go of by a "drop" of its own.
        held_values: values that may be read by replays at several slots, so that an early drop could hurt a later one.
        replay_slots: slots at whose entry something is replayed.
        replayed: slots of ops whose calls have to be remembered.
        producer_of: {value id: slot of the op that makes it}.
        offsets, room_bytes: {value id: offset in the tier, and how many bytes it was planned with}. host_bytes: size of
            the tier.
        recogniser: tells whether an op is the expected one.
    """

    expected: tuple[ExpectedOp, ...]
    first_slot: int
    actions: dict[int, tuple[Action, ...]]
    anchor_of: dict[int, int]
    swapped: frozenset[int]
    recomputed: frozenset[int]
    sources: frozenset[int]
    emptied: frozenset[int]
    dropped: frozenset[int]
    held_values: frozenset[int]
    replay_slots: frozenset[int]
    replayed: frozenset[int]
    producer_of: dict[int, int]
    offsets: dict[int, int]
    room_bytes: dict[int, int]
    host_bytes: int
    recogniser: OpRecogniser

    @property
    def does_nothing(self) -> bool:
        """Everything is kept: the step runs without hooks."""
        return not self.actions

    @classmethod
    def of(cls, plan: Plan) -> ActionTable:
        """Index a plan."""
        schedule = plan.schedule
        actions: dict[int, list[Action]] = {}
        for action in schedule.actions:
            actions.setdefault(action.slot, []).append(action)
        return cls(
            expected=plan.expected,
            first_slot=plan.first_slot,
            actions={slot: tuple(listed) for slot, listed in actions.items()},
            anchor_of={value: slot for slot, values in plan.anchors if slot in actions for value in values},
            swapped=frozenset(schedule.swapped),
            recomputed=frozenset(schedule.recomputed),
            sources=frozenset(schedule.sources),
            emptied=frozenset(a.target for a in schedule.actions if a.kind == "empty"),
            dropped=frozenset(a.target for a in schedule.actions if a.kind == "drop"),
            held_values=frozenset((*schedule.sources, *schedule.swapped, *schedule.recomputed)),
            replay_slots=frozenset(a.slot for a in schedule.actions if a.kind == "replay"),
            replayed=frozenset(a.target for a in schedule.actions if a.kind == "replay"),
            producer_of={v: plan.first_slot + i for i, op in enumerate(plan.expected) for v in op.writes},
            offsets=dict(schedule.host_offsets),
            room_bytes={decision.value: decision.size_bytes for decision in plan.choices},
            host_bytes=schedule.host_bytes,
            recogniser=OpRecogniser(plan.expected),
        )

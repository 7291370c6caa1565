"""The plan as a guide: what it has a step do, and when.

It recognises the ops of the step, and runs the actions of each slot once. Where the step leaves the path of the plan it
falls silent: what it holds stays readable, and pressure alone decides from there on.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir import Action, ExpectedOp
from ..machine import Call, Recipes
from ..machine.recipes import NEVER_MS
from ..torchtools.recurrent_dropout import InitialisationWatch
from ..torchtools.tensors import fingerprint, functional_name
from .planned_values import PlannedValues
from .replay import RecordedCall, is_emptied

# Why a step leaves the path: what was expected, and what came.
Departure = tuple[str, str]


class PlanGuide:
    """What a plan has one step do.

    Args:
        values: The values that it moves. Also an attribute.
        recipes: The calls of the step.

    Attributes:
        table: The plan, indexed for lookups.
        cursor: Where the step is on the path.
        acted, done: Slots whose actions have begun, and those in which they are done.
        replays_ahead: Slots with replays that are still to come, the next one last.
        reads_others: Whether the op that runs reads what the plan does not have where it is to run again.
    """

    def __init__(self, values: PlannedValues, recipes: Recipes) -> None:
        self.values, self.table, self.cursor, self._recipes = values, values.table, values.cursor, recipes
        self._initialisation, self.reads_others = InitialisationWatch(), False
        self.acted: set[int] = set()
        self.done: set[int] = set()
        self.replays_ahead = sorted(values.table.replay_slots, reverse=True)
        self._moves = {
            "copy_out": values.copy_out, "free": values.free, "empty": values.empty, "refill": values.emptied.refill,
            "copy_in": values.copy_in, "wait": values.wait,
        }  # fmt: skip

    # Ops --------------------------------------------------------------------------------------------------------------

    @property
    def on_path(self) -> bool:
        """Whether the step still does what the plan expects."""
        return self.cursor.on_path

    @property
    def slot(self) -> int:
        """Slot of the next op that is expected."""
        return self.table.first_slot + self.cursor.position

    def expects(self, facts: Any) -> bool:
        """Whether an op has the name of the next one that is expected.

        Another one produces nothing (`.item()`) or leaves the path.
        """
        expected, position = self.table.expected, self.cursor.position
        return position < len(expected) and self._is_same(expected[position].name, facts.name)

    def _is_same(self, expected: str, actual: str) -> bool:
        """Whether one of two names or fingerprints may stand for the other.

        Some of PyTorch's functions write in place unless a dispatch mode is there, as one was when the step was
        profiled. Without a mode, attention adds its mask by `add_` and not by `add`: the same values in the same order.
        """
        return expected == actual or (self.cursor.is_native and functional_name(expected) == functional_name(actual))

    def record(self, call: RecordedCall, reads: tuple[int, ...], *, can_be_late: bool) -> None:
        """Keep the call of the next op, which the plan replays.

        Args:
            call: The call.
            reads: The values of the step that it reads.
            can_be_late: Whether it can run at other times than the plan's too. What reads parameters that FSDP gathers
                cannot, so pressure does not count on it.
        """
        time_ms = 0.0 if can_be_late else NEVER_MS
        self._recipes.add(self.values.calls.kept(self.cursor.position, call, reads, time_ms))

    def recognise(
        self, func: Any, name: str, outputs: list[torch.Tensor], made: tuple[torch.Tensor, ...]
    ) -> ExpectedOp | Departure | None:
        """Return the planned op that ran, why the step leaves the path with it, or None if the plan does not mind it.

        Args:
            func: The operator.
            name: Its name.
            outputs: The tensors among its results.
            made: Those of them, and of its arguments, that hold something new.
        """
        position = self.cursor.position
        if position >= len(self.table.expected):
            return "the end of the region", fingerprint(name, outputs)
        expected = self.table.expected[position]
        is_expected = self.table.recogniser.is_expected(position, func, name, outputs, self._is_same)
        if is_expected and len(made) == len(expected.writes):
            if self.reads_others:
                return f"{name} on the values that it had when planned", f"{name} on others"
            self.cursor.position = position + 1
            return expected
        if self._initialisation.takes(name, made):
            return None
        return expected.fingerprint, fingerprint(name, outputs)

    def missing_op(self) -> Departure | None:
        """Return why the step leaves the path as its region ends here, or None if all that was expected has run."""
        if self.cursor.position >= len(self.table.expected):
            return None
        return self.table.expected[self.cursor.position].fingerprint, "the end of the region"

    # Actions ----------------------------------------------------------------------------------------------------------

    def is_to_act(self, slot: int) -> bool:
        """Whether the slot's actions have not finished; another thread may be running them."""
        return slot not in self.done

    def act(self, slot: int) -> None:
        """Run the actions at the entry of a slot once. A second caller waits until they have finished."""
        with self.values.lock:
            if slot in self.acted:
                return
            self.acted.add(slot)
            while self.replays_ahead and self.replays_ahead[-1] in self.acted:
                self.replays_ahead.pop()
            actions = self.table.actions.get(slot, ())
            # Without the parameters that replays read, they wait until their results are read: they may be there then.
            are_gathered = self._are_gathered(actions)
            for action in actions:
                if are_gathered or action.kind not in ("replay", "drop"):
                    self.run(action)
            self.done.add(slot)

    def _are_gathered(self, actions: tuple[Action, ...]) -> bool:
        """Whether FSDP has filled the storages that the replays of a slot read, as it had when it was profiled."""
        if not self.table.gathered:
            return True
        calls = (self._call(action.target) for action in actions if action.kind == "replay")
        return not any(is_emptied(call.call) for call in calls if call is not None)

    def _call(self, slot: int) -> Call | None:
        """Return the call of a slot, unless the forward pass left the path before its op ran."""
        return self._recipes.of(self.table.expected[slot - self.table.first_slot].writes[0])

    def run(self, action: Action) -> None:
        """Run one action. The caller holds the lock."""
        move = self._moves.get(action.kind)
        if move is not None:
            move(self.values.planned[action.target])
        elif action.kind == "replay":
            call = self._call(action.target)
            if call is not None:
                self.values.replay(action, call)
        elif not self._is_read_later(action):
            self.values.drop(action.target)

    def _is_read_later(self, drop: Action) -> bool:
        """Whether slots run out of order, and a replay that was to come before a drop is still to come."""
        number, table = drop.target, self.table
        may_be_read = number in table.sources or number in table.swapped or number in table.recomputed
        return may_be_read and bool(self.replays_ahead) and self.replays_ahead[-1] < drop.slot

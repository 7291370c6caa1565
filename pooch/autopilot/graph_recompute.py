"""What compiled graphs make again in their backward graphs under `pooch.auto`, where the user allows other rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..api.recompute import MadeAgain, calls_of_graph
from ..torchtools.graph_gaps.recompute import ROOMS, GraphMemory, Room


class GraphRecompute:
    """Says how much room there is for a graph that is compiled in a step, and notes what is made of it.

    Args:
        room: Returns the budget or None if it is not known yet, its share of what the step takes, what is live during
            all of the step, and the models; or None if no step runs in the calling thread.

    Attributes:
        spared_bytes: By how much less the step takes than without.
        made_again: What was made of graphs so far.
    """

    def __init__(self, room: Callable[[], StepRoom | None]) -> None:
        self._room = room
        self.made_again, self._is_told = MadeAgain(), True
        self._in_step, self._saved_bytes = 0, 0  # graphs that were compiled in the step, and what they save
        self.spared_bytes = 0
        ROOMS.append(self.room)

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._in_step = self._saved_bytes = 0
        self.spared_bytes = 0

    def room(self) -> Room | None:
        """Return the room for a graph that is compiled now."""
        found = self._room()
        if found is None:
            return None
        taken_bytes = found.taken_bytes + self._saved_bytes
        return Room(found.budget_bytes, found.share, taken_bytes, partial(self._calls, found.models), self._note)

    def _calls(self, models: Sequence[torch.nn.Module], static_bytes: int) -> int:
        """Return how many graphs share the room, of those that were not compiled in the step."""
        return max(1, calls_of_graph(models, static_bytes) - self._in_step)

    def _note(self, whole: GraphMemory, memory: GraphMemory, calls: int) -> None:
        self.spared_bytes += whole.of_calls(calls) - memory.of_calls(calls)
        self._in_step, self._saved_bytes = self._in_step + 1, self._saved_bytes + memory.saved_bytes
        before, self.made_again = self.made_again, self.made_again.with_graph(whole, memory)
        self._is_told = self._is_told and before is self.made_again

    def untold(self) -> str | None:
        """Return what is to be told since this was last called, or None."""
        is_told, self._is_told = self._is_told, True
        return None if is_told else str(self.made_again)

    def stop(self) -> None:
        """Give no room any more. May be repeated."""
        if self.room in ROOMS:
            ROOMS.remove(self.room)


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What a step has room for.

    Attributes:
        budget_bytes: The budget, or None if it is not known yet.
        share: Of what the step takes, which the budget will be; 1 if it is none.
        taken_bytes: What is live during all of the step, with the optimizer's state to come.
        models: The models.
    """

    budget_bytes: int | None
    share: float
    taken_bytes: int
    models: Sequence[torch.nn.Module]

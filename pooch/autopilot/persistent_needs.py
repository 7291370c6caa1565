"""How much what outlives steps takes, and how much room a budget has for it: the sums by which it stays or leaves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..executor.evictor import Evictor
from ..executor.slices import MOST_MOMENTS, TEMPORARIES, known_moments
from ..torchtools.tensors import find_tensors, gradient_of, tensor_bytes
from .optimizer_states import OptimizerStates, stepped_by

PLANNED_SHARE = 0.9  # of the room: where parameters and gradients alone take more, steps are not planned
TIGHT_SHARE = 0.75  # of the room: where what outlives steps takes more, the rest may be too little for a step
TRIAL_SHARE = 0.05  # of the room: where it takes less, a step that passes the budget would do so without it as well
SAFE_SHARE = 0.95  # of the room: what the last steps would have taken with the state, so that it need not leave
_SIMILAR_STEPS = 8
_MOST_TIMES = 16  # the size of its parameters: what an optimizer's step takes at most beside them, of whatever kind
_SLICES_IN_ROOM = 16
_LEAST_SLICE_BYTES = 2**18
_MOMENTS_WITH_TEMPORARIES = 2  # an optimizer that keeps as many computes with temporary tensors


@dataclass(frozen=True, slots=True)
class Taken:
    """What some parameters take.

    Attributes:
        parameters_bytes: They themselves.
        gradients_bytes: The gradients of those that are trained, whether they are there or not.
        to_come_bytes: Those of these that are not there.
    """

    parameters_bytes: int
    gradients_bytes: int
    to_come_bytes: int

    @classmethod
    def by(cls, parameters: Iterable[torch.Tensor]) -> Taken:
        """Add up what parameters take, each once."""
        distinct = {id(parameter): parameter for parameter in parameters}.values()
        trained = [parameter for parameter in distinct if parameter.requires_grad]
        return cls(
            sum([parameter.nbytes for parameter in distinct]),
            sum([parameter.nbytes for parameter in trained]),
            sum([parameter.nbytes for parameter in trained if gradient_of(parameter) is None]),
        )


class PersistentNeeds:
    """Whether what outlives steps has room in a budget, beside what else is there.

    Args:
        evictor: Knows what is live.
        states: The state that optimizers have and have yet to make.
    """

    def __init__(self, evictor: Evictor, states: OptimizerStates) -> None:
        self._evictor, self._states = evictor, states
        self._rises_bytes: deque[int] = deque(maxlen=_SIMILAR_STEPS)  # of the last steps
        self._most_given_bytes = -1  # to a step

    def step_ended(self, rise_bytes: int) -> None:
        """Note by how much the peak of a step was above what was live before it."""
        self._rises_bytes.append(rise_bytes)

    def room_bytes(self, here_bytes: int, budget_bytes: int | None = None) -> int:
        """Return what of a budget is not taken by other things than what may leave, of which so much is here."""
        budget_bytes = self._evictor.budget_bytes if budget_bytes is None else budget_bytes
        return max(0, budget_bytes - max(0, self._evictor.live.now() - here_bytes))

    def slice_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how much a slice of an optimizer's step may have."""
        return max(_LEAST_SLICE_BYTES, self.room_bytes(Taken.by(parameters).parameters_bytes) // _SLICES_IN_ROOM)

    def can_stay(self, parameters: Iterable[torch.Tensor], here_bytes: int) -> bool:
        """Return whether parameters and their gradients leave enough room for a step.

        Args:
            parameters: The parameters.
            here_bytes: What is here of all that may leave.
        """
        taken = Taken.by(parameters)
        return taken.parameters_bytes + taken.gradients_bytes <= PLANNED_SHARE * self.room_bytes(here_bytes)

    def share_is_passed_by(self, parameters: Iterable[torch.Tensor], start_bytes: int, share: float, least: int) -> int:
        """Return the budget that parameters and gradients will pass alone at the end of a first backward pass, or 0.

        Args:
            parameters: The parameters.
            start_bytes: What was live before the step.
            share: What the budget is of what the step takes.
            least: The bytes that the budget has in any case.
        """
        taken = Taken.by(parameters)
        end_bytes = max(start_bytes, taken.parameters_bytes) + taken.to_come_bytes
        budget_bytes = max(least, int(share * end_bytes))
        return budget_bytes if end_bytes > PLANNED_SHARE * budget_bytes else 0

    def is_tight(self, parameters: Iterable[torch.nn.Parameter], budget_bytes: int) -> bool:
        """Return whether parameters, gradients and the optimizer's first step may leave too little room for a step."""
        parameters = list(parameters)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        taken = Taken.by(parameters)
        here_bytes, needed_bytes = taken.parameters_bytes, taken.parameters_bytes + taken.to_come_bytes
        beside_bytes = self.room_bytes(here_bytes, budget_bytes)
        beside_bytes = beside_bytes or self.room_bytes(here_bytes + self._states.bytes_of(trained), budget_bytes)
        room_bytes = int(TIGHT_SHARE * (beside_bytes or budget_bytes))
        most_bytes = (MOST_MOMENTS + TEMPORARIES) * taken.gradients_bytes
        if not needed_bytes <= room_bytes < needed_bytes + most_bytes:
            return needed_bytes > room_bytes
        return needed_bytes + self._states.stepping_bytes(trained) > room_bytes

    def most_given_bytes(self, arguments: object) -> int | None:
        """Return how many bytes a step is given if they are more than any before it was given, else None.

        Args:
            arguments: What the model is called with, in any nesting.
        """
        given_bytes = sum(map(tensor_bytes, find_tensors(arguments)))
        if given_bytes <= self._most_given_bytes:
            return None
        self._most_given_bytes = given_bytes
        return given_bytes

    def may_be_tight(self, parameters: Iterable[torch.nn.Parameter], given_bytes: int) -> bool:
        """Return whether a step that is like none before may need what may leave in it.

        Args:
            parameters: The parameters.
            given_bytes: What the model is called with.
        """
        taken = Taken.by(parameters)
        needed_bytes = taken.parameters_bytes + taken.to_come_bytes + given_bytes
        return needed_bytes > TRIAL_SHARE * self.room_bytes(taken.parameters_bytes + given_bytes)

    def is_passed_by_step(self, optimizer: torch.optim.Optimizer, budget_bytes: int, share: float) -> bool:
        """Return whether an optimizer's step would pass the budget with the state that comes to be in it.

        Args:
            optimizer: The optimizer, which is about to step.
            budget_bytes: The budget.
            share: What more the budget will have for each byte of that state.
        """
        live_bytes = self._evictor.live.now()
        most_bytes = _MOST_TIMES * sum(each.nbytes for each in stepped_by(optimizer))
        if live_bytes + most_bytes <= budget_bytes:
            return False  # without looking closer
        state_bytes, others_bytes = self._states.made_by_step(optimizer, self._evictor.device)
        return live_bytes + state_bytes + others_bytes > budget_bytes + share * state_bytes

    def too_large(
        self, optimizer: torch.optim.Optimizer, here_bytes: int, budget_bytes: int | None = None
    ) -> tuple[int, int, int] | None:
        """Return the bytes of a parameter whose step alone takes more than there is room for, that, and the room.

        None: there is none, or it is not known what the optimizer takes. An op of those that are known reads two
        tensors of a parameter's size beside the temporary ones.

        Args:
            optimizer: The optimizer.
            here_bytes: What is here of all that may leave.
            budget_bytes: The budget. None: as it is now.
        """
        if (known_moments(optimizer) or 0) < _MOMENTS_WITH_TEMPORARIES:
            return None
        device = self._evictor.device
        largest_bytes = max((each.nbytes for each in stepped_by(optimizer) if each.device == device), default=0)
        needed_bytes, room_bytes = (2 + TEMPORARIES) * largest_bytes, self.room_bytes(here_bytes, budget_bytes)
        return (largest_bytes, needed_bytes, room_bytes) if needed_bytes > room_bytes else None

    def missing_bytes(self, here_bytes: int, budget_bytes: int | None) -> float:
        """Return how much has to leave for a step like the last ones to fit. Infinity if there were too few of them.

        Args:
            here_bytes: What is here of what may leave.
            budget_bytes: The budget, or None if it is not known yet.
        """
        if budget_bytes is None or len(self._rises_bytes) < _SIMILAR_STEPS:
            return math.inf
        spare_bytes = (1 - SAFE_SHARE) * self.room_bytes(here_bytes, budget_bytes)  # what others have is no less then
        return self._evictor.live.now() + max(self._rises_bytes) + spare_bytes - budget_bytes

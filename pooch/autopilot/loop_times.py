"""What the steps of a loop take beside what plans know of: optimizers, and moving what outlives steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps

import torch

SETTLING_STEPS = 9  # before which more may leave than has to
MEASURED_STEPS = 4
_MOST_STEPS = 8  # that count
_UNLIKE_STEPS = (1, 2)  # before which there was none, or one whose optimizer has made its state
MOVING = "moving parameters, gradients and the optimizer's state"
LEAVING = "what leaves and comes back"  # in steps without a plan, of which moving is a part
OnParameters = Callable[[Sequence[torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class Beside:
    """What a step takes beside the ops of its forward and backward pass.

    Attributes:
        optimizer_ms: What optimizers compute after it.
        moving_ms: What moving parameters, gradients and state takes.
        within_ms: What of that comes before the optimizers' steps.
    """

    optimizer_ms: float = 0.0
    moving_ms: float = 0.0
    within_ms: float = 0.0

    def __add__(self, other: Beside) -> Beside:
        return Beside(
            self.optimizer_ms + other.optimizer_ms,
            self.moving_ms + other.moving_ms,
            self.within_ms + other.within_ms,
        )


_NOTHING = Beside()


class LoopTimes:
    """Measures that, in the thread that trains.

    Args:
        stall_ms: Returns how long the step that runs or ended last has waited for copies.
        untimed: The type of a device that the process does not wait for, so that its times are not known, or "".

    Attributes:
        moves: Whether anything may leave that outlives steps.
        moving_in_optimizers_ms: How much longer the optimizers' steps have taken so far, as that has to be there.
    """

    def __init__(self, stall_ms: Callable[[], float] = lambda: 0.0, untimed: str = "") -> None:
        self._stall_ms, self._untimed = stall_ms, untimed
        self.moves, self.moving_in_optimizers_ms = False, 0.0
        self._begun: tuple[int, float] | None = None  # the optimizer that steps, and since when
        self._computing: tuple[float, float] | None = None  # since when a slice computes, and what was waited for then
        self._computed_ms: float | None = None  # by slices. None: there was none
        self._untaken = self._step = _NOTHING
        self._last: deque[Beside] = deque(maxlen=_MOST_STEPS)
        self._steps = self._steps_with_moves = 0

    @property
    def is_measuring(self) -> bool:
        """Whether something moves, and what that takes is not known yet."""
        return self.moves and self._steps_with_moves < SETTLING_STEPS + MEASURED_STEPS

    def missing(self, *, has_hooks: bool = True) -> str:
        """What a prediction that is made now leaves out, in words, or "".

        Args:
            has_hooks: Whether it has what hooks cost.
        """
        left_out = [] if has_hooks else ["what hooks cost"]
        left_out += [f"what {MOVING} takes"] if self.is_measuring else []
        comes, is_it = ("come", "are") if len(left_out) > 1 else ("comes", "is")
        why = f"not measured on {self._untimed}" if self._untimed and has_hooks else "still being measured"
        return f"{' and '.join(left_out)} {comes} on top, and {is_it} {why}" if left_out else ""

    @property
    def beside(self) -> Beside:
        """What a step takes on average of the last ones, without moving as long as that is not known."""
        count, found = max(1, len(self._last)), sum(self._last, _NOTHING)
        moving_ms, within_ms = (0.0, 0.0) if self.is_measuring else (found.moving_ms / count, found.within_ms / count)
        return Beside(found.optimizer_ms / count, moving_ms, within_ms)

    def measure_anew(self) -> None:
        """Measure moving once more, as another share of what outlives steps leaves from now on."""
        self._steps_with_moves = min(self._steps_with_moves, SETTLING_STEPS - 1)

    def step_begins(self) -> None:
        """Note that a step begins, so that all of the one before is known."""
        self._steps += 1
        self._steps_with_moves += self.moves and not self._untimed
        if self._steps in _UNLIKE_STEPS or self._steps_with_moves == SETTLING_STEPS:
            self._last.clear()
        else:
            self._last.append(self._step)
        self._step, self._begun = _NOTHING, None

    def waited(self, waited_ms: float) -> None:
        """Note that the step that is running has waited for what was moved."""
        self._step += Beside(0.0, waited_ms, waited_ms)

    def take(self) -> Beside:
        """Return what optimizers have taken since this was last asked."""
        taken, self._untaken = self._untaken, _NOTHING
        return taken

    # Steps of optimizers ----------------------------------------------------------------------------------------------

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step."""
        self._begun, self._computed_ms = (id(optimizer), time.perf_counter()), None

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has made a step. One that had a step of the loop within it is not counted."""
        begun, self._begun = self._begun, None
        if begun is None or begun[0] != id(optimizer) or self._untimed:
            return
        whole_ms = (time.perf_counter() - begun[1]) * 1000
        computed_ms = whole_ms if self._computed_ms is None else min(whole_ms, self._computed_ms)
        self.moving_in_optimizers_ms += whole_ms - computed_ms
        found = Beside(computed_ms, whole_ms - computed_ms)
        self._step, self._untaken = self._step + found, self._untaken + found

    def before(self, called: OnParameters) -> OnParameters:
        """Return what does the same as what is called before a slice, and notes that the slice computes then."""

        @wraps(called)
        def call(parameters: Sequence[torch.Tensor]) -> None:
            called(parameters)
            self._computing = time.perf_counter(), self._stall_ms()

        return call

    def after(self, called: OnParameters) -> OnParameters:
        """Return what does the same as what is called after a slice, and notes before that it has computed."""

        @wraps(called)
        def call(parameters: Sequence[torch.Tensor]) -> None:
            if self._computing is not None:
                (since_s, waited_ms), self._computing = self._computing, None
                waited_ms = self._stall_ms() - waited_ms
                elapsed_ms = (time.perf_counter() - since_s) * 1000
                self._computed_ms = (self._computed_ms or 0.0) + max(0.0, elapsed_ms - waited_ms)
            called(parameters)

        return call

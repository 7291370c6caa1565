"""What the user is told of steps, once each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..executor.evictor import Need
from ..ground.bounded import Topics
from ..ground.units import format_bytes

BACKWARD_IS_COMPILED = "its backward pass is compiled, so nothing is done: switch compiled autograd off"
OWN_HOOKS = "the program has saved tensor hooks of its own around it"
OWN_HOOKS_FIRST = "the program has saved tensor hooks of its own around the first call"
BY_OTHER_HOOKS = "the program has saved-tensor hooks of its own, so nothing is done: take them away"
CALLED_WITHIN = (
    "the model is called within what torch.compile has made of it, so its steps are not under the budget: give the "
    "compiled model, or compile it in place (model.compile())"
)
COMPILED = (
    "everything that can leave had left, and a compiled graph or an op needs the rest at once: compile under Pooch "
    "what was compiled before it, compile blocks of the model (block.compile()), raise the budget or lower the batch "
    "size"
)
MORE_THAN_RECORDED = (
    "it was expected to fit, but did more than when it was recorded; the next such step is recorded again"
)
_BEGINS_UNCALLED = "from here on, a step begins when a tensor is first saved for a backward pass"
UNCALLED_AMONG_OTHERS = (
    f"a step that called no governed model was not under the budget, and exceeded it: {_BEGINS_UNCALLED}"
)
_SINGLE_OPS = "what single ops need"
NOTHING_LEFT = (
    "everything that can leave had left, and the rest is parameters, gradients, the optimizer's state, inputs, what "
    f"the program holds and {_SINGLE_OPS}; raise the budget or lower the batch size"
)
OTHER_THREAD = (
    "another thread took it, and activations only leave when the thread of the step allocates; raise the budget, or "
    "let fewer threads compute at the same time"
)
OTHER_TRAINS = (
    "another thread trains at the same time, and nothing that its step holds can leave; raise the budget, or train in "
    "one thread at a time"
)
PLAN_NEEDS_MORE = (
    "its plan needs more than the budget, and what it keeps was too little to make up for that; raise the budget or "
    "lower the batch size"
)
_CLEARLY_MORE = 1.1
_OTHERWISE = 0.1  # of the budget that was told, by which that which is free has to change to be told again
_MOST_CHANGES = 10  # that are told: others may come and go all day


class Remarks:
    """Tells each thing once.

    Args:
        tell: Called with one line each.
        warn: Called with those of them that the user should look at. None: as the others.

    Attributes:
        made_again: Tells that compiled graphs make values again.
        tier: Tells what is wrong with the swap tier.
        silence: Tells what is not governed.
    """

    def __init__(self, tell: Callable[[str], None], warn: Callable[[str], None] | None = None) -> None:
        self._tell = self.made_again = tell
        self._warn = self.tier = self.silence = warn or tell
        self._told = Topics()
        self._margin_bytes = 0
        self._told_bytes = self._changes = 0
        self._told_budget = ""

    def over_budget(self, peak_bytes: int, budget_bytes: int, why: str, reason: str = "") -> None:
        """Tell of a peak over the budget, once for each reason.

        Args:
            peak_bytes: The peak.
            budget_bytes: The budget.
            why: The reason, as it is told.
            reason: What tells it from other reasons where it has figures.
        """
        reason = reason or why
        if self._told.is_new(reason):
            self._warn(
                f"a step took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - budget_bytes)} over the budget of "
                f"{format_bytes(budget_bytes)}: {why}"
            )

    def over_between(self, peak_bytes: int, budget_bytes: int) -> None:
        """Tell, once, of a peak over the budget between two steps. The summary has the highest."""
        if self._told.is_new("between steps"):
            more = f"{format_bytes(peak_bytes - budget_bytes)} more than the budget of {format_bytes(budget_bytes)}"
            self._warn(
                f"{format_bytes(peak_bytes)} were live between two steps, {more}, as in optimizer.step() or an "
                "evaluation: not all that was there could leave"
            )

    def staying(self, what: str) -> None:
        """Tell what could not leave where the budget was passed."""
        self._warn(what)

    def before(self, live_bytes: int, budget_bytes: int) -> None:
        """Tell that more than the budget is live before it is held."""
        if live_bytes > budget_bytes:
            self._warn(
                f"{format_bytes(live_bytes)} were live before the budget of {format_bytes(budget_bytes)} was set, "
                "which could not bound them; from here on it is held, as far as what is there can leave"
            )

    def spills(self, budget_bytes: int, room_bytes: int) -> None:
        """Tell that the budget is more than the device has left, where nothing fails because of that."""
        if budget_bytes > room_bytes:
            self._warn(
                f"the budget of {format_bytes(budget_bytes)} is more than the {format_bytes(room_bytes)} that the "
                "device has for this process, and Windows' driver puts what does not fit into the host's memory "
                "without an error, which is slow: give budget='auto', or less"
            )

    def shared_memory(self, device: torch.device) -> None:
        """Tell that nothing is copied to the memory of the host, as it is that of the device."""
        self._tell(
            f"{device.type} shares the host's memory, so a copy there frees nothing: activations are recomputed or "
            "stay, and parameters, gradients and the optimizer's state stay"
        )

    def plan_left(self, why: str) -> None:
        """Tell that a step could not follow its plan, once for each reason."""
        if self._told.is_new(why):
            self._tell(f"a step could not follow its plan, and is recorded and planned again: {why}")

    def uncalled(self, *, is_first: bool) -> None:
        """Tell that steps begin without a call of a model, and that one has passed by.

        Args:
            is_first: Whether no step has begun with a call yet.
        """
        self._tell(uncalled(1) if is_first else UNCALLED_AMONG_OTHERS)

    def called_within_compiled(self) -> None:
        """Tell that a model is called within what was compiled of it."""
        if self._told.is_new(CALLED_WITHIN):
            self._warn(CALLED_WITHIN)

    def margin(self, found_bytes: int) -> None:
        """Tell by how much the budget may be passed where live bytes are not counted all the time."""
        if found_bytes > _CLEARLY_MORE * self._margin_bytes:
            self._margin_bytes = found_bytes
            self._warn(
                f"live bytes are counted now and then, so a step may exceed the budget by up to "
                f"{format_bytes(found_bytes)}: install a C++ compiler, or lower the budget by that"
            )

    def budget(self, budget_bytes: int, share: float) -> None:
        """Tell the budget that a share has turned out to be."""
        self._told_budget = format_bytes(budget_bytes)
        self._tell(
            f"the budget is {self._told_budget}: {share:.0%} of what the first step takes without Pooch, with "
            "the optimizer's state"
        )

    def free_memory(self, budget_bytes: int, text: str) -> None:
        """Tell the budget that is what is free, if that is clearly something else than what was told."""
        is_other = abs(budget_bytes - self._told_bytes) > _OTHERWISE * self._told_bytes
        if is_other and self._changes < _MOST_CHANGES:
            self._told_bytes, self._changes = budget_bytes, self._changes + 1
            more = "; further changes are followed, and not told" if self._changes == _MOST_CHANGES else ""
            self._tell(f"the budget is {text}{more}")

    def read_elsewhere(self, share: float) -> None:
        """Tell why a share does not become known."""
        why = (
            "the backward pass of a step runs in another thread than its forward pass: until one runs in the same "
            f"thread, the budget is {share:.0%} of what was counted so far, and nothing is planned; give it in bytes"
        )
        if self._told.is_new(why):
            self._tell(why)

    def larger_budget(self, budget_bytes: int) -> None:
        """Tell the budget where another optimizer has created its state since it was told, if that shows."""
        before, self._told_budget = self._told_budget, format_bytes(budget_bytes)
        if self._told_budget != before:
            self._tell(f"the budget is {self._told_budget} from now on: another optimizer has created its state")


def nothing_left(need: Need | None, excess_bytes: int) -> str:
    """Return that nothing more could leave, with the op that alone explains it, if one does.

    Args:
        need: The largest allocation for which the budget was passed, if it is known.
        excess_bytes: By how much it was passed.
    """
    if need is None or need.size_bytes < excess_bytes:
        return NOTHING_LEFT
    largest = f"{_SINGLE_OPS} ({format_bytes(need.size_bytes)} at once{need.place})"
    return NOTHING_LEFT.replace(_SINGLE_OPS, largest)


def uncalled(passes: int) -> str:
    """Return what is told where steps begin without a call of a model.

    Args:
        passes: Backward passes that were not under the budget.
    """
    ended = "a backward pass" if passes == 1 else f"{passes} backward passes"
    return f"{ended} ended before a governed model was called, and so not under the budget: {_BEGINS_UNCALLED}"

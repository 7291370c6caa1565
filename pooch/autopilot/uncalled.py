"""Steps of programs that call no governed module: they begin where something is first saved for a backward pass.

So it is with tensors that belong to no module, with `model.forward(...)`, and with a `__call__` of the model's own.
What is saved first belongs to an op that runs already. The step does not see that op, so what it saves is kept: its
result is something from outside, and the history of that must not hold the step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from traceback import walk_stack
from typing import Any, Protocol

import torch

from ..ground.weakly import weakly
from ..torchtools.mode_stacks import LooseStack
from ..torchtools.outside import changed_in_place
from ..torchtools.standing_aside import COMPILED, CompiledCalls, StepHooks, compiled_name
from .stacks import has_own_hooks

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_next_node: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_CALLS_IN_A_ROW = 3  # steps that begin with a call, after which none is expected without


class StepRegion(AbstractContextManager[None], Protocol):
    """What counts as a call, from the first saved tensor until the backward pass.

    Attributes:
        begins: Whether it belongs to a step.
    """

    begins: bool


class _Here(threading.local):
    """What there is of it in the calling thread.

    Attributes:
        waiting: Holds the hooks that wait for a saved tensor, or for the first one of the op after that.
        region: The region that one has begun.
        node: What autograd counts its next node by, as long as the op runs in which the region has begun.
    """

    waiting: LooseStack | None = None
    region: StepRegion | None = None
    node = -1


class UncalledSteps:
    """Begins steps without a call.

    Args:
        region: Makes a region, or returns None once nothing is governed any more.

    Attributes:
        are_usual: Whether every step is expected to begin so: one has, and no three in a row began with a call since.
    """

    def __init__(self, region: Callable[[], StepRegion | None]) -> None:
        self._new_region, self._here = region, _Here()
        self._waiting: list[LooseStack] = []  # of all threads
        self.are_usual, self._stay_usual, self._calls_in_a_row = False, False, 0

    def become_usual(self, *, among_others: bool = False) -> None:
        """Expect every step to begin without a call.

        Args:
            among_others: Whether other steps do begin with one, so that calls do not show that none will begin without.
        """
        self.are_usual, self._calls_in_a_row = True, 0
        self._stay_usual |= among_others

    def called(self) -> None:
        """Note that a step which was expected without a call begins with one."""
        self.leave()
        self._calls_in_a_row += 1
        self.are_usual = self._stay_usual or self._calls_in_a_row < _CALLS_IN_A_ROW

    @property
    def are_expected(self) -> bool:
        """Whether a step of the calling thread waits for its beginning, or has begun."""
        return self._here.waiting is not None or self._here.region is not None

    def expect(self) -> None:
        """Have the next step of the calling thread begin with the first tensor that is saved in it."""
        if not self.are_expected and not has_own_hooks():
            self._wait()

    def _wait(self) -> None:
        for stack in list(self._waiting):
            if not stack.is_here:
                self._close(stack)
        stack = LooseStack()
        self._waiting.append(stack)
        self._here.waiting = stack  # before hooks are in place, since Ctrl-C may come at any time
        stack.enter_context(StepHooks(self._pack, _unpack, calls=_FirstCalls(self._compiled_call_begins)))

    def leave(self) -> None:
        """Wait no longer in the calling thread, and leave the region that has begun there, if one has."""
        self._wait_no_longer()
        region, self._here.region = self._here.region, None
        if region is not None:
            region.__exit__(None, None, None)

    def _wait_no_longer(self) -> None:
        stack = self._here.waiting
        if stack is not None:
            self._close(stack)
            self._here.waiting = None

    def _close(self, stack: LooseStack) -> None:
        """Take hooks away, if they are of the calling thread or of one that has ended."""
        stack.close()
        if stack.is_over:
            self._waiting.remove(stack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Begin a step, and have its own hooks pack what the ops after this one save."""
        here, node = self._here, _next_node()
        if here.region is None:
            self.leave()
            self._begin()
            here.node = node
        elif node != here.node:
            self._wait_no_longer()
            own = _top_hooks(False)
            if own is not None:
                pack, unpack = own
                return unpack, pack(tensor)
        return tensor, tensor._version

    def _compiled_call_begins(self) -> bool:
        """Begin a step if none has begun, and wait no longer: its first op is over. Returns whether there is one."""
        if self._here.region is None and torch.is_grad_enabled() and compiled_name() == COMPILED:
            self.leave()
            self._begin()
        has_begun = self._here.region is not None
        if has_begun:
            self._wait_no_longer()
        return has_begun

    def _begin(self) -> None:
        if _is_transformed():
            self.expect()
            return
        region = self._new_region()
        if region is None:
            return
        with torch.enable_grad():  # as around the op: PyTorch calls hooks without
            region.__enter__()
        if region.begins:
            self._here.region, self._calls_in_a_row = region, 0
            if has_own_hooks():  # else nothing is done in the step
                self._wait()
        else:
            region.__exit__(None, None, None)
            self.expect()


class _FirstCalls(CompiledCalls):
    """Compiled calls of a step without a call, which the first of them begins unless an op has.

    Args:
        call_begins: A method that returns whether a step has begun, and takes the hooks that wait away then. Its object
            is not kept alive.
    """

    def __init__(self, call_begins: Callable[[], bool]) -> None:
        self._call_begins = weakly(call_begins)

    def begins(self, options: Callable[[], Mapping[str, Any]]) -> bool:
        """Leave the call to the hooks of the step."""
        return bool(self._call_begins())


def _is_transformed() -> bool:
    """Whether the calling thread is within a transform such as `torch.vmap`.

    While an op of one runs, PyTorch's own stack of them is hidden. What a step put in place there would not stay.
    """
    callers = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe(1)))
    return any(name.startswith("torch._functorch.") for name in callers)


def _unpack(packed: Any) -> torch.Tensor:
    first, second = packed
    if not isinstance(first, torch.Tensor):
        return first(second)  # type: ignore[no-any-return]
    if first._version != second:
        raise changed_in_place(first.type(), list(first.shape))
    return first

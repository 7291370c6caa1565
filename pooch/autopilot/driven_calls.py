"""What surrounds the calls that begin steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..torchtools.calls import CallContext, CallingThread
from .quiet import QuietCalls
from .running import RunningStep


class Driver(Protocol):
    """What runs the steps.

    Attributes:
        here: What the calling thread does.
    """

    here: Here

    @property
    def running(self) -> RunningStep | None:
        """The step that is running."""

    def begins_step(self, number: int, args: Any, kwargs: Any, quiet: QuietCalls | None) -> bool:
        """Whether an outermost call belongs to a step, which begins now if none is running."""

    def call_ended(self) -> None:
        """Do what follows a call."""

    def abandon(self) -> None:
        """End a step that failed."""


class Here(CallingThread):
    """What the calling thread does.

    Attributes:
        call: The outermost call of a governed module that it was in.
        is_beside: Whether its call is beside a step of another thread.
        quiet: What runs its steps for which nothing is to be done.
    """

    call: DrivenCall | QuietCall | None = None
    is_beside = False
    quiet: RunningStep | None = None

    def leave_call(self) -> None:
        """Have calls within the one that goes on, in which its step has ended, begin steps of their own."""
        if self.call is not None and self.is_within_call:
            self.call.is_left = self.call.is_ended = True


class DrivenCall(CallContext):
    """Surrounds one call of a governed module.

    It is no generator. One that an interrupt has kept from ending would end when it is collected, which may be in the
    middle of a later step.

    Args:
        driver: Runs the steps.
        number: Of the model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        quiet: The calls of the module that begin steps far away from the budget; None for what is no module.

    Attributes:
        begins: Whether it belongs to a step.
        is_ended: Whether all was done that follows the call.
    """

    def __init__(self, driver: Driver, number: int, args: Any, kwargs: Any, quiet: QuietCalls | None) -> None:
        super().__init__()
        self._driver, self._call = driver, (number, args, kwargs, quiet)
        self.begins = self._is_outermost = self.is_ended = False
        self._around: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        driver = self._driver
        here = driver.here
        if here.is_within_call:
            return
        call, self._call = self._call, _NO_CALL  # it must not hold the arguments, as it is known until the next one
        self.begins = driver.begins_step(*call)
        del call
        if not self.begins and not here.is_beside:
            return
        self._is_outermost, here.call = True, self
        running = driver.running
        if self.begins and running is not None:
            try:
                around = running.step.around_call()
                around.__enter__()
                self._around = around
            except BaseException:
                self.is_left = True
                driver.abandon()
                raise

    def __exit__(self, *exception: Any) -> None:
        if not self._is_outermost:
            return
        self.is_left = True
        around, self._around = self._around, None
        try:
            if around is not None:
                around.__exit__(*exception)
        except BaseException:
            self._driver.abandon()
            raise
        if self.begins and exception[0] is None:
            self._driver.call_ended()
        elif self.begins:
            self._driver.abandon()
        self.is_ended = True


_NO_CALL: tuple[int, Any, Any, QuietCalls | None] = (0, (), {}, None)


class QuietCall(CallContext):
    """Surrounds the call that begins a step far away from the budget. One serves all of them, one after the other.

    Attributes:
        is_ended: Whether all was done that follows the call.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self.is_left = self.is_ended = True

    def __enter__(self) -> None:
        self.is_left = self.is_ended = False
        self._driver.here.call = self

    def __exit__(self, *exception: Any) -> None:
        self.is_left = True
        if exception[0] is not None:
            self._driver.abandon()
        self.is_ended = True

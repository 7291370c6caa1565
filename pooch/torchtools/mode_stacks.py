"""Modes and hooks that stay in place after the code that has put them there.

Ctrl-C may come at the entry of any function, which then does nothing and is not called again. So whatever is put in
place here is noted before that, is taken away by something that may be repeated, and is noted until that has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .threads import OwnThread

Entered = TypeVar("Entered")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_dispatch: Any = torch.utils._python_dispatch


class Undoing:
    """What is to be undone, the latest first. What is interrupted on the way is undone again by the next `run`."""

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []

    def add(self, undo: Callable[[], object]) -> None:
        """Note what is to be undone.

        Args:
            undo: Undoes it, also a second time, and if it was not done at all.
        """
        self._undos.append(undo)

    def run(self) -> None:
        """Undo everything. Of several errors the first is raised once all is undone."""
        failure: Exception | None = None
        while self._undos:
            try:
                self._undos[-1]()
            except Exception as error:  # noqa: BLE001  (raised below)
                failure = failure or error
            self._undos.pop()
        if failure is not None:
            raise failure

    def forget(self) -> None:
        """Undo nothing."""
        self._undos.clear()


class LooseStack:
    """Dispatch modes and saved tensor hooks of a thread, which may be left while the program's own lie on top.

    Closing in another thread does nothing, as nothing of this stack is there; once the thread has ended, what was
    entered is abandoned. What is entered must not be a generator: see `Together`.
    """

    def __init__(self) -> None:
        self._thread = OwnThread()
        self._undoing = Undoing()
        self._entered: list[object] = []

    def enter_context(self, context: AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager, which is left by its `leave`, if it has one."""
        leave = getattr(context, "leave", None)
        if leave is not None:
            self._undoing.add(leave)
        self._entered.append(context)
        entered = context.__enter__()
        if leave is None:
            self._undoing.add(partial(context.__exit__, None, None, None))
        return entered

    def callback(self, undo: Callable[[], object]) -> None:
        """Have something called on closing, which may be called twice."""
        self._undoing.add(undo)

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one whose stacks these are."""
        return self._thread.is_here

    @property
    def is_over(self) -> bool:
        """Whether nothing is entered any more."""
        return not self._entered

    def close(self) -> None:
        """Leave everything that was entered. May be repeated, and has to be if it was interrupted."""
        if self.is_here:
            self._undoing.run()
            self._entered.clear()
        elif self._thread.has_ended:
            self._undoing.forget()  # its stacks are gone
            while self._entered:
                abandon(self._entered.pop())


def abandon(context: object) -> None:
    """Take back what a context manager has put in place for the whole process, in another thread than its own.

    Args:
        context: It may have a method `abandon` for that.
    """
    method: Callable[[], None] | None = getattr(context, "abandon", None)
    if method is not None:
        method()


class Together(AbstractContextManager[None]):
    """Context managers that are entered in order and left in reverse, as one.

    A generator could do that. But one that is never left, as its thread is gone, leaves when it is collected: in
    whatever thread that happens, from whose stacks it would take what lies on top.

    Args:
        contexts: Each has a `leave`, which takes it away wherever it lies, may be repeated, and may come without
            `__enter__`.
    """

    def __init__(self, *contexts: Any) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        try:
            for context in self._contexts:
                context.__enter__()
        except BaseException:
            self.leave()
            raise

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave all of them."""
        for context in reversed(self._contexts):
            context.leave()

    def abandon(self) -> None:
        """Take back what they have put in place for the whole process, as their thread has ended."""
        for context in reversed(self._contexts):
            abandon(context)


class UnnotedMode(TorchDispatchMode):
    """A dispatch mode that is put on the stack of the calling thread, which is all that is done.

    PyTorch's own way also notes for the whole process that some mode is in place, and notes again what was so before
    when it is left. Two threads whose modes overlap would leave that note in place for good, and a thread that ends
    within a mode as well. Without the note Dynamo compiles as if there were no mode.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        _dispatch._push_mode(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        take_mode_away(self)


def take_mode_away(mode: UnnotedMode) -> None:
    """Take a mode off the stack of the calling thread, wherever it lies on it, if it does.

    Modes of the program's above it are lifted and put back, of which they notice nothing.

    Args:
        mode: An `UnnotedMode`.
    """
    if not any(each is mode for each in _dispatch._get_current_dispatch_mode_stack()):
        return
    above: list[TorchDispatchMode] = []
    while (top := _dispatch._get_current_dispatch_mode()) is not mode:
        _dispatch._pop_mode()
        above.append(top)
    _dispatch._pop_mode()
    for each in reversed(above):
        _dispatch._push_mode(each)


def take_hooks_away(pair: tuple[Any, Any]) -> None:
    """Take a pair of saved tensor hooks off the stack of the calling thread, wherever it lies on it, if it does.

    Args:
        pair: The hooks.
    """
    above = []
    while (top := _top_hooks(True)) is not None and top[0] is not pair[0]:
        above.append(top)
        _pop_hooks()
    if top is not None:
        _pop_hooks()
    for each in reversed(above):
        _push_hooks(*each)

"""Modes and hooks that stay in place after the code that has put them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from .threads import OwnThread

Entered = TypeVar("Entered")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


class LooseStack(ExitStack):
    """An exit stack of dispatch modes and saved tensor hooks, which may close while the program's own lie on top.

    PyTorch keeps both on stacks of the thread, and leaving one takes away whatever is on top. So what lies there is
    lifted meanwhile. Closing in another thread does nothing, as nothing of this stack is there; once the thread has
    ended, what was entered is abandoned. What is entered must not be a generator: see `Together`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = OwnThread()
        self._mode: TorchDispatchMode | None = None
        self._entered: list[object] = []
        self._entered_modes: list[TorchDispatchMode] = []
        self._hooks: Any = None

    def enter_context(self, cm: AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager, and remember what it puts on the stacks."""
        before = _get_current_dispatch_mode()
        entered = super().enter_context(cm)
        self._entered.append(cm)
        self._mode, self._hooks = _get_current_dispatch_mode(), _top_hooks(False)
        if self._mode is not None and self._mode is not before:
            self._entered_modes.append(self._mode)
        return entered

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one whose stacks these are."""
        return self._thread.is_here

    def close(self) -> None:
        """Leave everything that was entered."""
        if self.is_here:
            with _modes_lifted(self._mode), _hooks_lifted(self._hooks):
                super().close()
            self._mode = self._hooks = None
            self._entered.clear()
            self._entered_modes.clear()
        elif self._thread.has_ended:
            self.pop_all()  # its stacks are gone
            while self._entered:
                abandon(self._entered.pop())
            while self._entered_modes:
                _forget(self._entered_modes.pop())


def abandon(context: object) -> None:
    """Take back what a context manager has put in place for the whole process, in another thread than its own.

    Args:
        context: It may have a method `abandon` for that.
    """
    method: Callable[[], None] | None = getattr(context, "abandon", None)
    if method is not None:
        method()


def _forget(mode: TorchDispatchMode) -> None:
    """Take back what PyTorch notes for the whole process when a mode is entered, without the stack that it was on."""
    if not torch._C._len_torch_dispatch_stack():  # else the modes of this thread will
        torch.utils._python_dispatch._push_mode(mode)
        TorchDispatchMode.__exit__(mode, None, None, None)


class Together(AbstractContextManager[None]):
    """Context managers that are entered in order and left in reverse, as one.

    A generator could do that. But one that is never left, as its thread is gone, leaves when it is collected: in
    whatever thread that happens, from whose stacks it would take what lies on top.
    """

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._entered = contexts, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for context in self._contexts:
                entered.enter_context(context)
            self._entered = entered.pop_all()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.__exit__(*exception)

    def abandon(self) -> None:
        """Take back what they have put in place for the whole process, as their thread has ended."""
        self._entered.pop_all()
        for context in reversed(self._contexts):
            abandon(context)


@contextmanager
def _modes_lifted(mode: TorchDispatchMode | None) -> Iterator[None]:
    """Take away the modes above one. Only the base class knows how, as their own methods may also print and count."""
    lifted: list[TorchDispatchMode] = []
    if mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        while (top := _get_current_dispatch_mode()) is not None and top is not mode:
            TorchDispatchMode.__exit__(top, None, None, None)
            lifted.append(top)
    try:
        yield
    finally:
        for each in reversed(lifted):
            TorchDispatchMode.__enter__(each)


@contextmanager
def _hooks_lifted(hooks: Any) -> Iterator[None]:
    lifted = []
    while hooks is not None and (top := _top_hooks(False)) is not None and top[0] is not hooks[0]:
        lifted.append(top)
        _pop_hooks()
    try:
        yield
    finally:
        for each in reversed(lifted):
            _push_hooks(*each)

"""Modes and hooks that stay in place after the code that has put them there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

Entered = TypeVar("Entered")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks


class LooseStack(ExitStack):
    """An exit stack of dispatch modes and saved tensor hooks, which may close while the program's own lie on top.

    PyTorch keeps both on stacks of the thread, and leaving one takes away whatever is on top. So what lies there is
    lifted meanwhile. Closing in another thread does nothing, as nothing of this stack is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._mode: TorchDispatchMode | None = None
        self._hooks: Any = None

    def enter_context(self, cm: AbstractContextManager[Entered]) -> Entered:
        """Enter a context manager, and remember what it puts on the stacks."""
        entered = super().enter_context(cm)
        self._mode, self._hooks = _get_current_dispatch_mode(), _top_hooks(False)
        return entered

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the one whose stacks these are."""
        return threading.get_ident() == self._thread

    def close(self) -> None:
        """Leave everything that was entered."""
        if self.is_here:
            with _modes_lifted(self._mode), _hooks_lifted(self._hooks):
                super().close()
            self._mode = self._hooks = None


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

"""Tracks which module is running: the path that labels ops, and the extent of a call of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from ..torchtools.calls import called_within
from ..torchtools.threads import OwnThread


class ModulePath:
    """Stack of the modules that are running now.

    Args:
        model: the model whose modules have names.
        on_enter: called when a call of the model begins, before the model's forward pre-hooks, where a plan's region
            will begin.
        on_leave: called when a call of the model ends, after the model's forward hooks.
    """

    def __init__(self, model: torch.nn.Module, on_enter: Callable[[], None], on_leave: Callable[[], None]) -> None:
        self._model = weakref.ref(model)  # what stays on PyTorch's stacks must not keep it alive
        self._names = {id(module): name for name, module in model.named_modules()}
        self._on_enter, self._on_leave = on_enter, on_leave
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        """Path of the innermost running module, or "" outside of all modules."""
        return self._stack[-1] if self._stack else ""

    @contextmanager
    def watched(self, *, is_compiled: bool = False) -> Iterator[None]:
        """Context manager that tracks every module call, and the extent of calls of the model.

        Args:
            is_compiled: whether the model is compiled, in whole or in part. Only the extent is tracked then, as hooks
                on all modules would be a part of what is compiled.

        Raises:
            UsageError: if the model is under a plan.
        """
        model = self._model()
        assert model is not None, "it is being profiled"
        with nullcontext() if is_compiled else self.named(), called_within(model, self._call, "profile"):
            yield

    def named(self) -> _Named:
        """Context manager that tracks every module call of the thread. PyTorch calls such hooks in all threads."""
        return _Named(self._enter, self._leave, self._stack.clear)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._on_enter()
        try:
            yield
        finally:
            self._on_leave()

    def _enter(self, module: torch.nn.Module) -> None:
        self._stack.append(self._names.get(id(module), self.current))

    def _leave(self) -> None:
        if self._stack:
            self._stack.pop()


class _Named:
    """Hooks around every module call of the thread in which it was entered."""

    def __init__(
        self, entered: Callable[[torch.nn.Module], None], left: Callable[[], None], ended: Callable[[], None]
    ) -> None:
        self._entered, self._left, self._ended = entered, left, ended
        self._here = OwnThread()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        self._here = OwnThread()
        self._handles.append(register_module_forward_pre_hook(self._before))
        self._handles.append(register_module_forward_hook(self._after, always_call=True))

    def __exit__(self, *exception: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Take the hooks away. May be repeated."""
        self._ended()
        for handle in self._handles:
            handle.remove()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if self._here.is_here:
            self._entered(module)

    def _after(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._here.is_here:
            self._left()

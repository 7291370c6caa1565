"""Tracks which module is running: the path that labels ops, and the extent of a call of the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

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
    def watched(self) -> Iterator[None]:
        """Context manager that tracks every module call, and the extent of calls of the model.

        Raises:
            UsageError: if the model is compiled or under a plan.
        """
        model = self._model()
        assert model is not None, "it is being profiled"
        with self.named(), called_within(model, self._call, "profile"):
            yield

    @contextmanager
    def named(self) -> Iterator[None]:
        """Context manager that tracks every module call of the thread. PyTorch calls such hooks in all threads."""
        here = OwnThread()

        def enter(module: torch.nn.Module, args: Any) -> None:
            if here.is_here:
                self._enter(module)

        def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
            if here.is_here:
                self._leave()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            self._stack.clear()
            for handle in handles:
                handle.remove()

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

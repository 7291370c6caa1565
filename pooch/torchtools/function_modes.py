"""The program's function modes, as `torch.set_default_device` is one. They see the program's calls and no others."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_C: Any = torch._C
_P = ParamSpec("_P")
_T = TypeVar("_T")


def are_on() -> bool:
    """Whether a call of PyTorch would pass a function mode in the calling thread now."""
    return bool(_C._len_torch_function_stack()) and _C._is_torch_function_mode_enabled()


def past_subclasses(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Returns a function of Pooch's that asks tensors past the program's subclasses, which may refuse what is asked."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return called


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is called with modes and subclasses as they are now, wherever they are disabled.

    Args:
        function: what may run code of the program.
    """
    has_subclasses = _C._is_torch_function_enabled()

    def called(*args: Any, **kwargs: Any) -> Any:
        with _C._EnableTorchFunction():
            if has_subclasses:
                return function(*args, **kwargs)
            with _C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)

    return called

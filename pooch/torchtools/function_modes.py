"""The program's function modes, as `torch.set_default_device` is one. They see the program's calls and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C


def are_on() -> bool:
    """Whether a call of PyTorch would pass a function mode in the calling thread now."""
    return bool(_C._len_torch_function_stack()) and _C._is_torch_function_mode_enabled()


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

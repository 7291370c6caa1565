"""Whether hooks and modes that a call puts in place can stay there after it, until the backward pass begins.

They lie on stacks, and leave in the reverse order. If the program has put something of its own there around the call,
it will take that away before, so ours have to go with the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_C: Any = torch._C
_top_hooks = _C._autograd._top_saved_tensors_default_hooks
hooks_are_allowed: Callable[[], bool] = _C._autograd._saved_tensors_hooks_is_enabled
# Asked at every call: looking names up in modules of PyTorch would take longer than the functions themselves.
_transform, _tracing_state = _C._functorch.peek_interpreter_stack, _C._get_tracing_state
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_mode_of = _C._get_dispatch_mode
# Under these, tensors have no contents, or ops are noted for a graph: of `FakeTensorMode`, `make_fx`, AOTAutograd.
_TRACING = tuple(getattr(_C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL"))
_has_gradients, _is_exporting = torch.is_grad_enabled, torch.compiler.is_exporting


def can_outlast_the_call() -> bool:
    """Whether nothing lies on the stacks that the program may take away before the backward pass. Asked at the call."""
    if _dispatch_modes() or _transform() is not None or has_own_hooks():
        return False
    return _function_modes() == 0 or _only_default_device()


def nothing_is_around() -> bool:
    """Whether the program computes for training now, without modes around it. An export has some."""
    return (
        _has_gradients()
        and not _dispatch_modes()
        and not _function_modes()
        and _transform() is None
        and _tracing_state() is None
    )


def has_own_hooks() -> bool:
    """Whether saved tensor hooks are in place."""
    return _top_hooks(False) is not None


def _only_default_device() -> bool:
    """Whether the one function mode is that of `torch.set_default_device`, which stays."""
    from torch.utils._device import DeviceContext

    return _function_modes() == 1 and isinstance(_C._get_function_stack_at(0), DeviceContext)


def is_ordinary_call() -> bool:
    """Whether the program computes for training now: with gradients and hooks, and neither traced nor transformed."""
    return (
        _has_gradients()
        and _tracing_state() is None
        and not _is_exporting()
        and _transform() is None
        and hooks_are_allowed()
        and not (_dispatch_modes() and any(_mode_of(key) is not None for key in _TRACING))
    )

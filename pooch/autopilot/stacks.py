"""Whether hooks and modes that a call puts in place can stay there after it, until the backward pass begins.

They lie on stacks, and leave in the reverse order. If the program has put something of its own there around the call,
it will take that away before, so ours have to go with the call.
"""

from __future__ import annotations

import torch


def can_outlast_the_call() -> bool:
    """Whether nothing lies on the stacks that the program may take away before the backward pass. Asked at the call."""
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if has_own_hooks():
        return False
    return torch._C._len_torch_function_stack() == 0 or _only_default_device()


def has_own_hooks() -> bool:
    """Whether saved tensor hooks are in place."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _only_default_device() -> bool:
    """Whether the one function mode is that of `torch.set_default_device`, which stays."""
    from torch.utils._device import DeviceContext

    return torch._C._len_torch_function_stack() == 1 and isinstance(torch._C._get_function_stack_at(0), DeviceContext)


hooks_are_allowed = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def is_ordinary_call() -> bool:
    """Whether the program computes for training now: with gradients and hooks, and neither traced nor transformed."""
    return (
        torch.is_grad_enabled()
        and torch._C._get_tracing_state() is None
        and not torch.compiler.is_exporting()
        and torch._C._functorch.peek_interpreter_stack() is None
        and bool(hooks_are_allowed())
    )

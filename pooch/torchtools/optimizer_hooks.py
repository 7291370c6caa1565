"""Hooks on the steps of all optimizers. Dynamo does not look into them where a program compiles `optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Hook = Callable[..., Any]
_frames: Any = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # and all that it calls


def before_steps(hook: Hook) -> RemovableHandle:
    """Have a hook called with each optimizer that is about to step, and its arguments."""
    return register_optimizer_step_pre_hook(not_traced(hook))


def after_steps(hook: Hook) -> RemovableHandle:
    """Have a hook called with each optimizer that has stepped, and its arguments."""
    return register_optimizer_step_post_hook(not_traced(hook))


def not_traced(hook: Hook) -> Hook:
    """Return what calls a hook, of which Dynamo compiles nothing.

    `torch._dynamo.disable` does the same, but imports Dynamo.
    """

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hook(optimizer, args, kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(call.__code__, _SKIPPED)
    return call

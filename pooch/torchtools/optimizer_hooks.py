"""Hooks on the steps of optimizers. Dynamo does not look into them where a program compiles `optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[..., Any]
_frames: Any = torch._C._dynamo.eval_frame
_SKIPPED = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # and all that it calls


def not_traced(hook: Hook) -> Hook:
    """Return what calls a hook, of which Dynamo compiles nothing.

    `torch._dynamo.disable` does the same, but imports Dynamo.
    """

    def call(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        hook(optimizer, args, kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    _frames.set_code_exec_strategy(call.__code__, _SKIPPED)
    return call

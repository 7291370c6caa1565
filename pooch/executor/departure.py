"""What to do about a step that has left the path of its plan."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import torch

_AGAIN = "profile and plan again to follow the new path"
_WITHIN = "the backward pass has begun within the region: end `with run.step():` before loss.backward()"
_BACKWARD_BEGINS: CodeType = torch.autograd._make_grads.__code__


def remedy() -> str:
    """Return what to do, in a few words, where the op is running that the plan does not expect."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _BACKWARD_BEGINS:
            return _WITHIN
        frame = frame.f_back
    return _AGAIN

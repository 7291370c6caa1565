"""Steps of a job, for tests that compare what they give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def stepped(forward: Callable[[], Tensor], model: torch.nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss = forward()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

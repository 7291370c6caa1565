"""Models whose parameters are shared out among processes."""

from __future__ import annotations

import sys
from typing import Any

import torch


def reshard(model: torch.nn.Module) -> None:
    """Let go of what FSDP gathered for a backward pass that will not come; nothing to do for other models.

    A forward pass leaves the root's parameters gathered, and the model then shows them in place of its own.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whoever shards a model has imported it
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()

"""Kernels that give the same bits each time, as far as there are any."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pooch.torchtools.accelerators import current_device


def use_deterministic_kernels(step: Callable[[], object]) -> str:
    """Switch them on for this process; returns "", or what has no such kernel for this step.

    Strictly first: some operators (memory-efficient attention) are deterministic under the strict setting alone. Where
    that setting refuses an operator, it warns instead, and plain training may differ from itself.

    Args:
        step: one forward and backward pass, to find out.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # of every empty tensor: it would only cost time
    try:
        step()
    except RuntimeError as error:
        text = str(error).strip().splitlines()[0]
        if "deterministic" not in text:
            raise
        torch.use_deterministic_algorithms(True, warn_only=True)
        return text[:160]
    return ""


def on_device(device: str) -> torch.device:
    """The device that is measured."""
    return current_device(device)

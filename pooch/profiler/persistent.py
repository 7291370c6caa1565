"""Bytes of the optimizer's state, also of what it will only create at its first step."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch

from pooch.torchtools.tensors import find_tensors, storage_bytes


def state_bytes_to_come(optimizer: torch.optim.Optimizer | None) -> int:
    """Device bytes that the optimizer's first step will create and keep.

    A shadow of the optimizer takes one step on meta tensors, which have shapes but no memory, so nothing of the real
    optimizer is touched. Returns 0 where the state already exists.

    Raises:
        Exception: whatever the optimizer's `step` raises on meta tensors; the caller says so in the profile.
    """
    if optimizer is None or optimizer.state:
        return 0
    shadow: Any = copy.copy(optimizer)
    shadow.state = defaultdict(dict)
    shadow.param_groups = [
        dict(group, params=[_shadow_of(p) for p in group["params"]]) for group in optimizer.param_groups
    ]
    with torch.no_grad():
        type(optimizer).step(shadow)
    states = [tensor for state in shadow.state.values() for tensor in find_tensors(state) if tensor.ndim > 0]
    return sum(tensor.numel() * tensor.element_size() for tensor in states)


def _shadow_of(parameter: torch.Tensor) -> torch.Tensor:
    size, stride = tuple(parameter.shape), parameter.stride()  # not `empty_like`: the parameter may be a fake tensor
    shadow = torch.empty_strided(size, stride, dtype=parameter.dtype, device="meta")
    shadow.requires_grad_(parameter.requires_grad)
    if parameter.requires_grad:
        shadow.grad = torch.empty_like(shadow, requires_grad=False)
    return shadow


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Device bytes of the state that the optimizer has now."""
    if optimizer is None:
        return 0
    return storage_bytes([t for state in optimizer.state.values() for t in find_tensors(state)])


def foreseen_state_bytes(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> tuple[int, list[str]]:
    """As `state_bytes_to_come`, or a guess and a note that says so where the optimizer's step fails on meta tensors."""
    try:
        return state_bytes_to_come(optimizer), []
    except Exception as error:  # noqa: BLE001  (any optimizer of the user's may run here)
        guess = 2 * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        note = (
            f"the state of {type(optimizer).__name__} could not be foreseen ({type(error).__name__}); {guess} bytes "
            "were assumed: take one optimizer step before profiling to have it measured"
        )
        return guess, [note]

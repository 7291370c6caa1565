"""Predicts the memory of a plain step from a forward pass in which autograd kept nothing."""

from __future__ import annotations

import torch

from .recorder import ForwardRecorder, ValueRecord

_WORKSPACE_BYTES = 16 * 2**20  # of an op whose tensors are small in comparison


def expected_peak_bytes(
    released: ForwardRecorder, model: torch.nn.Module, persistent_bytes: int, accumulate: bool
) -> int:
    """Returns an upper estimate of the in-core peak of one plain step, in device bytes.

    It counts what autograd saves plus a quarter, the gradient of every parameter (unless gradients accumulate, and so
    are among the persistent bytes), and room for the op with the largest result. The backward pass frees activations
    while gradients appear, so in practice the peak stays below. An op with an unusually large workspace can exceed it,
    so memory can still run out in a step that should fit.
    """
    kept = kept_bytes(released.values)
    gradients = 0 if accumulate else sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    largest = max((value.size_bytes for value in released.values if value.role == "made"), default=0)
    return persistent_bytes + kept * 5 // 4 + gradients + 4 * largest + _WORKSPACE_BYTES


def kept_bytes(values: list[ValueRecord]) -> int:
    """Returns the bytes of the storages that are held when the forward pass ends; each counts once."""
    held: dict[int, int] = {}
    first: dict[int, int] = {}
    for value in values:
        first[value.id] = first.get(value.overwrites, value.id)
        if value.role == "made" and not value.elsewhere and (value.saved or value.released_after is None):
            held[first[value.id]] = value.size_bytes
    return sum(held.values())

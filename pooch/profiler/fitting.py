"""What a plain step will need, told before it runs from a forward pass in which autograd kept nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pooch.profiler.recorder import ForwardRecorder, ValueRecord

_WORKSPACE_BYTES = 16 * 2**20  # of an op, where tensors are small beside it


@dataclass(frozen=True, slots=True)
class ExpectedPeak:
    """Bounds of the in-core peak, in device bytes.

    Attributes:
        least_bytes: what is live when the forward pass ends, with everything that autograd saves.
        most_bytes: that with a quarter more for activations, every gradient of a parameter, and room for the op with
            the largest result. A backward pass frees activations while gradients appear, so it stays below in
            practice; an op with an unusual workspace may pass it, so memory can still run out where this fits.
    """

    least_bytes: int
    most_bytes: int


def expected_peak(
    released: ForwardRecorder, model: torch.nn.Module, persistent_bytes: int, accumulate: bool
) -> ExpectedPeak:
    """Bounds of the peak of one plain step.

    Args:
        released: the recorder of the pass in which autograd kept nothing.
        model: whose gradients will appear.
        persistent_bytes: what lives before the step.
        accumulate: gradients live already, among the persistent bytes.
    """
    kept = _kept_bytes(released.values)
    gradients = 0 if accumulate else sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    largest = max((value.size_bytes for value in released.values if value.role == "made"), default=0)
    most = kept * 5 // 4 + gradients + 4 * largest + _WORKSPACE_BYTES
    return ExpectedPeak(persistent_bytes + kept, persistent_bytes + most)


def _kept_bytes(values: list[ValueRecord]) -> int:
    """Bytes of the storages that are held when the forward pass ends, each once however often it was written."""
    held: dict[int, int] = {}
    first: dict[int, int] = {}
    for value in values:
        first[value.id] = first.get(value.overwrites, value.id)
        if value.role == "made" and not value.elsewhere and (value.saved or value.released_after is None):
            held[first[value.id]] = value.size_bytes
    return sum(held.values())

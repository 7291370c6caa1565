"""Whether a call of cross entropy gives the same bits in slices, found out on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .. import accelerators
from .calls import LossCall

_SCALES = (1.0, 0.37)  # gradients of the loss: as plain training has it, and one that rounds


def difference_from_plain(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, rows: int
) -> str | None:
    """Run forward and backward pass plainly and in slices, and compare the bits.

    Takes about four times the memory of the logits for a moment.

    Args:
        logits: (N, classes).
        target: (N,).
        weight: (classes,) or None.
        reduction: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: class number of rows that do not count.
        rows: rows of a slice.

    Returns:
        What differs, or None.
    """
    logits = logits.detach()
    with torch.no_grad():
        plain = torch.ops.aten.cross_entropy_loss(logits, target, weight, reduction, ignore_index, 0.0)
        split, total_weight = torch.ops.pooch_split.cross_entropy(logits, target, weight, reduction, ignore_index, rows)
        if not _same_bits(plain, split):
            return "the loss"
        for scale in _SCALES:
            grad = torch.full_like(split, scale)
            expected = _plain_gradient(logits, target, weight, reduction, ignore_index, total_weight, grad)
            found = torch.empty_like(expected)
            torch.ops.pooch_split.cross_entropy_backward(
                grad, logits, target, weight, reduction, ignore_index, total_weight, rows, out=found
            )
            if not _same_bits(expected, found):
                return "the gradient"
            del expected, found
    return None


def _plain_gradient(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    grad: Tensor,
) -> Tensor:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        loss = torch.ops.aten.cross_entropy_loss(leaf, target, weight, reduction, ignore_index, 0.0)
        (gradient,) = torch.autograd.grad(loss, leaf, grad)
    return gradient


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Like `torch.equal`, but a number that is none equals itself."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    return torch.equal(first.contiguous().view(whole), second.contiguous().view(whole))


@contextmanager
def on_random_numbers(call: LossCall) -> Iterator[LossCall]:
    """Give the same call of real tensors with random contents, for one whose tensors have none.

    Nobody records what runs inside.
    """
    logits, target, weight = call.logits, call.target, call.weight
    devices = [logits.device] if accelerators.has_streams(logits.device) else []
    unrecorded = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with _disable_current_modes(), unrecorded, torch.random.fork_rng(devices=devices):
        numbers = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device=logits.device)
        classes = torch.randint(0, logits.shape[1], target.shape, device=target.device)
        weights = None if weight is None else torch.rand(weight.shape, dtype=weight.dtype, device=weight.device)
        yield replace(call, logits=numbers.normal_(), target=classes, weight=weights)


def _itself(tensor: Tensor) -> Tensor:
    return tensor

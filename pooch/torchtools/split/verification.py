"""Whether a call of cross entropy gives the same bits in slices, found out on the spot."""

from __future__ import annotations

import torch
from torch import Tensor

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

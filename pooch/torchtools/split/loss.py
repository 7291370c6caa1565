"""Cross entropy whose forward and backward pass run over slices of rows.

The plain operators hold three times the logits: the logarithms of the probabilities, which are saved, their gradient,
and the gradient of the logits. Each row depends on itself alone, but for the reduction of one number a row. So the
forward pass keeps one number a row, and the backward pass makes the logarithms again, slice by slice, and writes the
gradient over the logits where nothing else holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .. import accelerators
from ..tensors import storage_of

SLICE_BYTES: Final = 4 << 20  # a slice and what is made of it stay in a processor's cache
FEWEST_SLICES: Final = 8  # unless there are fewer rows
_IGNORED: Final = -100  # no column is
_ALONE: Final = 2  # users of a storage: its own object, and the tensor at hand, which is the saved one

_aten = torch.ops.aten
_library = torch.library.Library("pooch_split", "FRAGMENT")
_ARGUMENTS = "Tensor logits, Tensor target, Tensor? weight, int reduction, int ignore_index"
_library.define(f"cross_entropy({_ARGUMENTS}, int rows) -> (Tensor, Tensor)")
_library.define(
    f"cross_entropy_backward(Tensor grad, {_ARGUMENTS}, Tensor total_weight, int rows, *, Tensor(a!) out) -> ()"
)


def slice_rows(logits: Tensor) -> int:
    """Return how many rows of the logits (N, classes) make one slice."""
    rows = logits.shape[0]
    row_bytes = max(1, logits.shape[1] * logits.element_size())
    return max(1, min(-(-rows // FEWEST_SLICES), SLICE_BYTES // row_bytes))


# Which slices are run: all of them, but for who adds up what equal ones cost.
Each = Callable[[Sequence[slice]], Iterable[slice]]


def _slices(rows: int, of_rows: int) -> list[slice]:
    return [slice(first, min(first + rows, of_rows)) for first in range(0, of_rows, rows)]


def _forward(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, rows: int
) -> tuple[Tensor, Tensor]:
    if not accelerators.has_streams(logits.device):  # there, an assertion on the device tells
        _check_classes(target.masked_fill(target == ignore_index, 0), logits.shape[1])
    return _forward_in_slices(logits, target, weight, reduction, ignore_index, rows)


def _forward_in_slices(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    rows: int,
    *,
    each: Each = iter,
) -> tuple[Tensor, Tensor]:
    is_ignored = target == ignore_index
    classes = target.masked_fill(is_ignored, 0)
    picked = logits.new_empty((logits.shape[0], 1))
    for part in each(_slices(rows, logits.shape[0])):
        made = _aten._log_softmax.default(logits[part], 1, False)
        torch.gather(made, 1, classes[part].unsqueeze(1), out=picked[part])
        del made
    # The reduction is left to the plain kernel, which adds the rows up in its own order. To it, the only column is the
    # class of each row; weights need a column for each row.
    if weight is None:
        columns, used, spread = torch.zeros_like(classes), None, picked
    else:
        columns, used = torch.arange(logits.shape[0], device=logits.device), weight.gather(0, classes)
        spread = picked.expand(-1, logits.shape[0])
    columns = columns.masked_fill_(is_ignored, _IGNORED)
    return _aten.nll_loss_forward.default(spread, columns, used, reduction, _IGNORED)  # type: ignore[no-any-return]


def _check_classes(classes: Tensor, number: int) -> None:
    """Raise what the plain operator raises for a class that does not exist."""
    outside = (classes < 0) | (classes >= number)
    if outside.any():
        raise IndexError(f"Target {int(classes[outside][0])} is out of bounds.")


def _backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    rows: int,
    *,
    out: Tensor,
    each: Each = iter,
) -> None:
    for part in each(_slices(rows, logits.shape[0])):
        logarithms = _aten._log_softmax.default(logits[part], 1, False)
        of_rows = grad[part] if reduction == 0 else grad
        gradient = _aten.nll_loss_backward.default(
            of_rows, logarithms, target[part], weight, reduction, ignore_index, total_weight
        )
        _aten._log_softmax_backward_data.out(gradient, logarithms, 1, logits.dtype, out=out[part])
        del logarithms, gradient


def _forward_shapes(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, rows: int
) -> tuple[Tensor, Tensor]:
    return logits.new_empty(() if reduction else (logits.shape[0],)), logits.new_empty(())


def _nothing(*arguments: object, **named: object) -> None:
    """Made of tensors without memory, the gradient is what it is written to."""


_library.impl("cross_entropy", _forward, "CompositeExplicitAutograd")
_library.impl("cross_entropy_backward", _backward, "CompositeExplicitAutograd")
_library.impl("cross_entropy", _forward_shapes, "Meta")
_library.impl("cross_entropy_backward", _nothing, "Meta")


def in_plain_operators(func: Any) -> Callable[..., object] | None:
    """What an operator of this module runs, as a function of its arguments and of `each`; None for others.

    It reads no contents, so tensors need not have any.
    """
    known: dict[str, Callable[..., object]] = {
        "cross_entropy": _forward_in_slices,
        "cross_entropy_backward": _backward,
    }
    return known.get(func.overloadpacket.__name__) if func.namespace == _library.ns else None


def split_cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    rows: int,
    may_write: Callable[[], bool],
) -> Tensor:
    """Cross entropy in slices of rows.

    Args:
        logits: (N, classes), floating point.
        target: (N,), class numbers.
        weight: (classes,) or None.
        reduction: as `torch._C._nn.cross_entropy_loss` has it: 0 for none, 1 for the mean, 2 for the sum.
        ignore_index: class number of rows that do not count.
        rows: rows of a slice.
        may_write: asked in the backward pass, whether Pooch itself will not read the logits again. What else holds
            them is counted here.

    Returns:
        The loss: () or, without a reduction, (N,).
    """
    anchor = _Anchor.apply(logits)  # type: ignore[no-untyped-call]
    call = reduction, ignore_index, rows
    loss: Tensor = _SplitCrossEntropy.apply(logits, anchor, target, weight, call, may_write)  # type: ignore[no-untyped-call]
    return loss


def may_be_written_over(logits: Tensor) -> bool:
    """Whether nothing but the backward pass that has just read the logits holds them, and it reads them only once."""
    if torch._C._autograd._get_current_graph_task_keep_graph() or not logits.is_contiguous():
        return False
    storage = storage_of(logits)
    return torch._C._storage_Use_Count(storage._cdata) <= _ALONE


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        anchor: Tensor,
        target: Tensor,
        weight: Tensor | None,
        call: tuple[int, int, int],
        may_write: Callable[[], bool],
    ) -> Tensor:
        reduction, ignore_index, rows = call
        loss, total_weight = torch.ops.pooch_split.cross_entropy(logits, target, weight, reduction, ignore_index, rows)
        # Detached, so that neither the tensor of the program nor what it is a view of is held.
        ctx.save_for_backward(logits.detach(), anchor, target, weight, total_weight)
        ctx.call = call
        ctx.may_write = may_write
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        reduction, ignore_index, rows = ctx.call
        logits, anchor, target, weight, total_weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the gradient is wanted, which only the plain operators have
            logits = _Attach.apply(anchor, logits)  # type: ignore[no-untyped-call]
            loss = torch.ops.aten.cross_entropy_loss(logits, target, weight, reduction, ignore_index, 0.0)
            (made,) = torch.autograd.grad(loss, logits, grad, create_graph=True)
        else:
            if may_be_written_over(logits) and ctx.may_write():
                made = logits
            else:
                made = torch.empty_like(logits, memory_format=torch.contiguous_format)
            torch.ops.pooch_split.cross_entropy_backward(
                grad, logits, target, weight, reduction, ignore_index, total_weight, rows, out=made
            )
        return made, None, None, None, None, None


class _Anchor(torch.autograd.Function):
    """A tensor of the logits' shape and history with the memory of one number, for a graph of the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # no zeros in an ordinary backward pass
        return logits.new_zeros(1).expand(logits.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class _Attach(torch.autograd.Function):
    """The contents of one tensor with the history of another."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, contents: Tensor) -> Tensor:
        return contents.view_as(contents)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

"""Sequences of tensors, into which PyTorch's newer exporter splits tensors if nothing simplifies its graph.

A sequence is a list. It never becomes known while the model is built, unless it is empty: its tensors may be data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operation import HostNumbers, Operation, integers, number
from ..registry import UnsupportedVariant, operator

_MOST_PARTS = 1 << 14


@operator("SequenceEmpty", ignores=("dtype",))
def _empty(op: Operation) -> tuple[list[Tensor]]:
    return ([],)


@operator("SequenceConstruct", folds=False)
def _construct(op: Operation, *tensors: Tensor) -> tuple[list[Tensor]]:
    return (list(tensors),)


@operator("SequenceInsert", host=(2,), folds=False)
def _insert(
    op: Operation, sequence: list[Tensor], tensor: Tensor, position: HostNumbers | None = None
) -> tuple[list[Tensor]]:
    place = int(number(position, len(sequence)))
    return ([*sequence[:place], tensor, *sequence[place:]],)


@operator("SequenceErase", host=(1,), folds=False)
def _erase(op: Operation, sequence: list[Tensor], position: HostNumbers | None = None) -> tuple[list[Tensor]]:
    place = int(number(position, -1)) % len(sequence)
    return ([*sequence[:place], *sequence[place + 1 :]],)


@operator("SequenceAt", host=(1,))
def _at(op: Operation, sequence: list[Tensor], position: HostNumbers) -> Tensor:
    return sequence[int(number(position, 0))]


@operator("SequenceLength", contents=())
def _length(op: Operation, sequence: list[Tensor]) -> Tensor:
    return torch.tensor(len(sequence), dtype=torch.int64)


@operator("SplitToSequence", host=(1,), folds=False)
def _split_to_sequence(op: Operation, x: Tensor, lengths: HostNumbers | None = None) -> tuple[list[Tensor]]:
    axis, keeps = op.get("axis", 0), bool(op.get("keepdims", 1))
    length = x.shape[axis]
    sizes = [1] if lengths is None else integers(lengths)
    if lengths is None or lengths.dim == 0:  # a scalar is the size of all parts but the last
        if length > _MOST_PARTS * sizes[0]:
            raise UnsupportedVariant(f"more than {_MOST_PARTS} parts")
        sizes = [min(sizes[0], length - start) for start in range(0, length, sizes[0])]
    parts = torch.split(x, sizes, axis)
    return ([part if keeps or lengths is not None else part.squeeze(axis) for part in parts],)


@operator("ConcatFromSequence")
def _concat(op: Operation, sequence: list[Tensor]) -> Tensor:
    join = torch.stack if op.get("new_axis", 0) else torch.cat
    return join(sequence, op.get("axis"))

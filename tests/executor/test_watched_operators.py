"""Operators compute the same bits whether or not a mode sees them, for PyTorch's own samples of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from pooch.executor.mode import recognising
from pooch.executor.online import Evictor, OnlineStep
from pooch.executor.statistics import RunStats
from tests.executor.online.support import holding

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
SAMPLES = 2
WATCHED = (
    "nn.functional.",
    "native_",
    "matmul",
    "addmm",
    "baddbmm",
    "bmm",
    "einsum",
    "tensordot",
    "cdist",
    "index_add",
)


def operators() -> list[Any]:
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    return [op for op in invocations.op_db if op.name.startswith(WATCHED)]


def copied(tree: Any) -> Any:
    """The same arguments on memory of their own; an argument that comes twice still does."""
    known: dict[int, Tensor] = {}

    def copy(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        if id(each) not in known:
            known[id(each)] = each.detach().clone().requires_grad_(each.requires_grad)
        return known[id(each)]

    return tree_map(copy, tree)


def results(op: Any, sample: Any, evictor: Evictor | None) -> list[Tensor]:
    """What an operator returns, and the gradients of its arguments."""
    torch.manual_seed(0)
    first, args, kwargs = copied((sample.input, sample.args, sample.kwargs))
    leaves = [
        each for each in tree_flatten((first, args, kwargs))[0] if isinstance(each, Tensor) and each.requires_grad
    ]
    if evictor is None:
        found = op(first, *args, **kwargs)
    else:
        evictor.begin_step(RunStats())
        with recognising(OnlineStep(evictor)):
            found = op(first, *args, **kwargs)
    outputs = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
    ends = [each for each in outputs if each.requires_grad and each.layout is torch.strided]
    if not ends or not leaves:
        return outputs
    torch.manual_seed(1)
    gradients = torch.autograd.grad(ends, leaves, [torch.randn_like(end) for end in ends], allow_unused=True)
    return [*outputs, *(each for each in gradients if each is not None)]


def in_bits(tensors: list[Tensor]) -> list[object]:
    """Everything about strided tensors."""
    found: list[object] = []
    for each in tensors:
        if each.layout is torch.strided:
            flat = torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()).flatten().view(torch.uint8)
            found.append((each.shape, each.dtype, each.stride(), flat.numpy().tobytes()))
    return found


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    try:
        found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), SAMPLES))
    except (RuntimeError, ImportError):  # without LAPACK or SciPy
        return
    for sample in found:
        yield sample
        yield sample.noncontiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_operators_and_their_gradients(dtype: torch.dtype) -> None:
    compared, other = 0, set[str]()
    with holding() as evictor:
        for op in operators():
            if not op.supports_dtype(dtype, "cpu"):
                continue
            for sample in samples_of(op, dtype):
                try:
                    plain = in_bits(results(op, sample, None))
                except (RuntimeError, TypeError):
                    continue  # plain PyTorch refuses these arguments
                if plain != in_bits(results(op, sample, None)):
                    continue  # it returns memory that nobody has written
                compared += 1
                if plain != in_bits(results(op, sample, evictor)):
                    other.add(op.full_name)
    assert not other
    assert compared > 200

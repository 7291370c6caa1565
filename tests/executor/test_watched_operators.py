"""Operators compute the same bits whether or not a mode sees them, for PyTorch's own samples of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from tests.executor.online.support import holding

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]
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
# Those that take another way under a mode, or run operators that autocast casts.
ASKING = (
    "linalg.svdvals",
    "linalg.eigvalsh",
    "linalg.cond",
    "linalg.norm",
    "linalg.matrix_",
    "linalg.pinv",
    "norm",
    "nn.functional.bilinear",
    "cdist",
)


def operators(names: tuple[str, ...]) -> list[Any]:
    invocations = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    return [op for op in invocations.op_db if op.name.startswith(names)]


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


def called(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an operator as a program does, by its name now."""
    kind, _, name = op.name.rpartition(".")
    return (getattr(torch.linalg, name) if kind == "linalg" else op)(*args, **kwargs)


def results(op: Any, sample: Any, evictor: Evictor | None) -> list[Tensor]:
    """What an operator returns, and the gradients of its arguments."""
    torch.manual_seed(0)
    first, args, kwargs = copied((sample.input, sample.args, sample.kwargs))
    leaves = [
        each for each in tree_flatten((first, args, kwargs))[0] if isinstance(each, Tensor) and each.requires_grad
    ]
    if evictor is None:
        found = called(op, first, *args, **kwargs)
    else:
        evictor.begin_step(RunStats())
        with following(Step(evictor)):
            found = called(op, first, *args, **kwargs)
    outputs = [each for each in tree_flatten(found)[0] if isinstance(each, Tensor)]
    if not torch.is_grad_enabled():
        return outputs
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


def samples_of(op: Any, dtype: torch.dtype, samples: int) -> Iterator[Any]:
    try:
        with torch.autocast("cpu", enabled=False):
            found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), samples))
    except (RuntimeError, ImportError):  # without LAPACK or SciPy
        return
    for sample in found:
        yield sample
        yield sample.noncontiguous()


def compared(names: tuple[str, ...], dtype: torch.dtype, samples: int = 2) -> tuple[int, set[str]]:
    """How many samples were compared, and which operators give other bits when they are watched."""
    count, other = 0, set[str]()
    with holding() as evictor:
        for op in operators(names):
            if not op.supports_dtype(dtype, "cpu"):
                continue
            for sample in samples_of(op, dtype, samples):
                try:
                    plain = in_bits(results(op, sample, None))
                except (RuntimeError, TypeError):
                    continue  # plain PyTorch refuses these arguments
                if plain != in_bits(results(op, sample, None)):
                    continue  # it returns memory that nobody has written
                count += 1
                if plain != in_bits(results(op, sample, evictor)):
                    other.add(op.full_name)
    return count, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_operators_and_their_gradients(dtype: torch.dtype) -> None:
    count, other = compared(WATCHED, dtype)
    assert not other
    assert count > 200


@pytest.mark.parametrize("is_cast", [False, True], ids=["as they are", "within autocast"])
def test_operators_that_ask_for_modes_or_run_others(is_cast: bool) -> None:
    """Without gradients, singular values are computed in another way under a mode."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        count, other = compared(ASKING, torch.float32, samples=8)
    assert not other
    assert count > 100


@pytest.mark.usefixtures("watched_by")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.nn.functional.affine_grid(x.view(2, 2, 3), [2, 3, 4, 4], align_corners=False),
        lambda x: torch.nn.functional.affine_grid(x.view(1, 3, 4), [1, 3, 4, 4, 4], align_corners=False),
        lambda x: torch.sparse.mm(torch.eye(3).to_sparse(), x.view(3, 4)),
        lambda x: torch.eye(3).to_sparse() @ x.view(3, 4),
    ],
    ids=["affine_grid", "affine_grid in 3D", "sparse.mm", "a sparse matrix before @"],
)
def test_operators_without_samples_that_run_what_autocast_casts(call: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(12)
    with holding() as evictor, torch.autocast("cpu", torch.bfloat16):
        plain = in_bits([call(x)])
        evictor.begin_step(RunStats())
        with following(Step(evictor)):
            watched = in_bits([call(x)])
    assert watched == plain

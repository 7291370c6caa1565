"""Wrappers around a model: one process of distributed data parallel training, parameters of a class of their own.

What needs two processes is in `test_ranks.py`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from pooch.executor.live_bytes import CountedBytes
from pooch.torchtools.memory_trace import live_bytes
from tests.counting import the_allocator
from tests.executor.test_ways_of_training import CHOICES, Layers, check

CPU = torch.device("cpu")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _mlp(model: Layers, rows: Tensor) -> Tensor:
    return model.second(model.first(rows).sin()).tanh()


@pytest.mark.parametrize("choice", CHOICES)
def test_distributed_data_parallel(choice: str, one_rank: None) -> None:
    def make() -> nn.Module:
        model = DistributedDataParallel(Layers(_mlp))
        for _ in range(2):  # it arranges its buckets in the first steps, which are not like the others
            model(torch.ones(6, 8)).sum().backward()
        return model

    check(make, choice)


@pytest.fixture
def unseen_bytes(one_rank: None) -> Callable[[CountedBytes], int]:
    """What is counted without being seen, beyond what other tests have left in C++ alone."""

    def unseen(counted: CountedBytes) -> int:
        return counted.now() - live_bytes(CPU)

    gc.collect()  # models of other tests, with their buckets
    with closing(CountedBytes(the_allocator())) as counted:
        before_bytes = unseen(counted)
    return lambda counted: unseen(counted) - before_bytes


@pytest.mark.cpu
@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_that_were_made_before_are_counted(as_view: bool, unseen_bytes: Callable[[CountedBytes], int]) -> None:
    model = DistributedDataParallel(nn.Linear(256, 256), gradient_as_bucket_view=as_view)
    bucket_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with closing(CountedBytes(the_allocator())) as counted:
        found_bytes = [unseen_bytes(counted)]
        for _ in range(3):
            model(torch.ones(8, 256)).sum().backward()
            counted.recount()
            found_bytes.append(unseen_bytes(counted))
        assert model._has_rebuilt_buckets
        assert counted._buckets.counted_bytes == 0
    assert found_bytes[:2] == 2 * [bucket_bytes] if not as_view else found_bytes[0] == bucket_bytes
    assert found_bytes[-1] == (0 if as_view else bucket_bytes)  # arranged anew, and seen as they were made


@pytest.mark.cpu
def test_buckets_that_were_arranged_before_are_counted_until_their_model_is_gone(
    unseen_bytes: Callable[[CountedBytes], int],
) -> None:
    model = DistributedDataParallel(nn.Linear(256, 256))
    bucket_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(2):
        model(torch.ones(8, 256)).sum().backward()
    with closing(CountedBytes(the_allocator())) as counted:
        assert unseen_bytes(counted) == bucket_bytes
        del model
        gc.collect()
        counted.recount(if_less=True)
        assert unseen_bytes(counted) == 0


@pytest.mark.cpu
@pytest.mark.parametrize("made", ["before", "within", "within, arranged after", "before, arranged within"])
def test_buckets_are_counted_once_where_a_budget_follows_another(
    made: str, unseen_bytes: Callable[[CountedBytes], int]
) -> None:
    """What was made under the first budget is counted by the allocator for as long as it lives."""

    def make() -> DistributedDataParallel:
        return DistributedDataParallel(nn.Linear(256, 256))

    def arrange(model: DistributedDataParallel) -> None:
        for _ in range(2):
            model(torch.ones(8, 256)).sum().backward()
        assert model._has_rebuilt_buckets

    early = make() if made.startswith("before") else None
    with closing(CountedBytes(the_allocator())):
        model = early or make()
        if made.endswith("arranged within"):
            arrange(model)
    if made.endswith("arranged after"):
        arrange(model)
    with closing(CountedBytes(the_allocator())) as counted:
        assert unseen_bytes(counted) == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.cpu
@pytest.mark.parametrize("is_arranged", [False, True])
def test_buckets_are_counted_once_where_somebody_counts_already(
    is_arranged: bool, unseen_bytes: Callable[[CountedBytes], int]
) -> None:
    """`pooch exec` counts from the beginning, and the budget begins once a model is there."""
    with closing(CountedBytes(the_allocator())):
        model = DistributedDataParallel(nn.Linear(256, 256))
        for _ in range(2 * is_arranged):
            model(torch.ones(8, 256)).sum().backward()
        assert model._has_rebuilt_buckets is is_arranged
        with closing(CountedBytes(the_allocator())) as counted:
            assert counted._buckets.counted_bytes == 0
            assert unseen_bytes(counted) == sum(parameter.nbytes for parameter in model.parameters())


class Named(torch.Tensor):
    """A parameter's class of the user's own, without behaviour."""


@pytest.mark.parametrize("choice", CHOICES)
def test_parameters_of_a_class_of_their_own(choice: str) -> None:
    def make() -> nn.Module:
        model = Layers(_mlp)
        model.first.weight = nn.Parameter(model.first.weight.detach().as_subclass(Named))
        return model

    check(make, choice)


class Coded(torch.Tensor):
    """A weight kept as int8 codes and a scale, as quantising libraries do; it computes with what they stand for."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Coded:
        return Coded(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Coded(args[0].codes, args[0].scale)
        args, kwargs = tree_map(lambda t: t.codes * t.scale if isinstance(t, Coded) else t, (args, kwargs or {}))
        return func(*args, **kwargs)


@pytest.mark.parametrize("choice", CHOICES)
def test_weights_of_a_class_with_behaviour(choice: str) -> None:
    def function(model: Any, rows: Tensor) -> Tensor:
        return torch.tanh(model.second(model.first(rows).sin().exp()))

    def make() -> nn.Module:
        model = Layers(function)
        for layer in (model.first, model.second):
            codes = (layer.weight.detach() * 100).to(torch.int8)
            layer.weight = nn.Parameter(Coded(codes, torch.tensor(0.01)), requires_grad=False)
        return model

    check(make, choice)


class BatchNormOfParts(torch.autograd.Function):
    """As SyncBatchNorm's: statistics from one op, that moves the running ones without saying so in its schema."""

    @staticmethod
    def forward(context: Any, rows: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
        mean, variance = torch.batch_norm_update_stats(rows, running_mean, running_var, 0.1)
        context.save_for_backward(rows, mean, variance)
        return (rows - mean) * variance.add(1e-5).rsqrt()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows, mean, variance = context.saved_tensors
        return gradient * variance.add(1e-5).rsqrt() + (rows - mean) * gradient.mean(0), None, None


class PartlyNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, rows: Tensor) -> Tensor:
        normed = BatchNormOfParts.apply(self.first(rows), self.running_mean, self.running_var)
        return torch.tanh(self.second(normed.sin())).exp()


@pytest.mark.parametrize("choice", CHOICES)
def test_statistics_of_a_batch_norm_of_parts_move_once(choice: str) -> None:
    check(PartlyNormed, choice)

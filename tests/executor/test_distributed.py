"""Wrappers around a model: one process of distributed data parallel training, parameters of a class of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.executor.test_ways_of_training import CHOICES, Layers, check


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


class Named(torch.Tensor):
    """A parameter's class of the user's own, without behaviour."""


@pytest.mark.parametrize("choice", CHOICES)
def test_parameters_of_a_class_of_their_own(choice: str) -> None:
    def make() -> nn.Module:
        model = Layers(_mlp)
        model.first.weight = nn.Parameter(model.first.weight.detach().as_subclass(Named))
        return model

    check(make, choice)

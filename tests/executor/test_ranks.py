"""Two processes that train one model over gloo; each profiles on its own and runs its own plan."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pooch.analysis.dataflow import Dataflow
from pooch.errors import ProfileError
from pooch.executor import apply_plan
from pooch.profiler import assembly
from tests.executor.support import all_of, quick_profile, tight_plan
from tests.executor.test_ways_of_training import CHOICES, Layers, check
from tests.forked_ranks import run_ranks

RANKS = 2


def on_ranks(work: Callable[[int], None], directory: Path, ranks: int = RANKS) -> None:
    """Run `work(rank)` in processes of their own; what one of them raises is raised here."""
    run_ranks(_rank, (work, f"file://{directory}/store", ranks), ranks)


def _rank(rank: int, work: Callable[[int], None], store: str, ranks: int) -> None:
    torch.set_num_threads(1)
    assembly.SMALLEST_ACTIVATION_BYTES = 1  # conftest.py is not read in processes of their own
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    work(rank)
    gc.collect()  # models hold their process group, and it has to go before the process does
    distributed.barrier()
    distributed.destroy_process_group()


def rows_of(rank: int) -> Tensor:
    return torch.rand(6, 8, generator=torch.Generator().manual_seed(rank + 1))


def settled(model: nn.Module) -> nn.Module:
    """After two steps: buckets are arranged and shards are set up in the first ones, which are not like the others."""
    for _ in range(2):
        model(torch.ones(6, 8)).sum().backward()
    model.zero_grad()
    return model


def all_ranks(tensor: Tensor) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(RANKS)]
    distributed.all_gather(found, tensor)
    return found


def first_twice(model: Any, rows: Tensor) -> Tensor:
    """A parameter that is used twice, and all the same is ready once."""
    hidden: Tensor = model.first(model.first(rows).sin()).exp()
    return torch.tanh(model.second(hidden))


class Normed(nn.Module):
    """Its statistics are broadcast from the first rank at the beginning of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.first(rows)).sigmoid()
        return torch.tanh(self.second(normed)).exp()


def _data_parallel(rank: int) -> None:
    kinds: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
    for kind in [*kinds, {"gradient_as_bucket_view": True}]:
        for number in range(len(CHOICES)):  # the ranks' plans differ
            choice = CHOICES[(number + rank) % len(CHOICES)]
            check(lambda k=kind: settled(DistributedDataParallel(Layers(first_twice), **k)), choice, rows_of(rank))  # type: ignore[misc]


def test_gradients_of_data_parallel_training(tmp_path: Path) -> None:
    on_ranks(_data_parallel, tmp_path)


def _batch_norm(rank: int) -> None:
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(settled(DistributedDataParallel(Normed())))
        return made[-1]

    for choice in CHOICES:
        check(make, choice, rows_of(rank))
        plain, planned = made[-2:]
        for model in (plain, planned):
            gradient = model.module.first.weight.grad
            assert torch.equal(*all_ranks(gradient))  # the ranks have averaged
            assert not torch.equal(*all_ranks(model.module.norm.running_mean))  # and have seen different rows
            assert model.module.norm.num_batches_tracked == 4  # two to settle, two that were checked: none by profiling


def _synchronised_batch_norm(rank: int) -> None:
    model = nn.SyncBatchNorm(8)
    with pytest.raises(ProfileError, match=r"^the step raised ValueError: SyncBatchNorm expected input .*$"):
        quick_profile(lambda: model(rows_of(rank)).sum(), model)


def test_synchronised_batch_norm_on_a_cpu_is_refused_in_one_line(tmp_path: Path) -> None:
    """By PyTorch itself, which has it for accelerators alone."""
    on_ranks(_synchronised_batch_norm, tmp_path)


def test_batch_norm_statistics_of_data_parallel_training(tmp_path: Path) -> None:
    on_ranks(_batch_norm, tmp_path)


def _mlp(model: Any, rows: Tensor) -> Tensor:
    return torch.tanh(model.second(torch.sin(model.first(rows)))).exp()


class Rooted(nn.Module):
    """The root has parameters of its own: they stay gathered until the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layers = Layers(_mlp)

    def forward(self, rows: Tensor) -> Tensor:
        scaled: Tensor = self.layers(rows * self.scale)
        return (scaled * self.scale).sin()


def sharded() -> nn.Module:
    model = Rooted()
    for module in (model.layers.first, model.layers.second, model):
        fully_shard(module)
    return settled(model)


def _fully_sharded(rank: int) -> None:
    rows = rows_of(rank)
    for number in range(len(CHOICES)):
        check(sharded, CHOICES[(number + rank) % len(CHOICES)], rows)
    model = sharded()
    names = {name: type(parameter) for name, parameter in model.named_parameters()}
    profile = quick_profile(lambda: model(rows).sum(), model)
    dataflow = Dataflow(profile)
    # What is gathered for a layer is not moved, and nothing is replayed from it: each layer is a unit of its own, and
    # its result is read before the unit's backward pass.
    gathered = [value for value in profile.values if value.role == "transient"]
    assert [v.size_bytes for v in gathered if v.saved and v.first_unpack >= 0]
    assert not {v.id for v in gathered} & dataflow.activation_ids
    outputs = [v for v in dataflow.activations if ".addmm" in v.label]
    assert len(outputs) >= 1
    assert all("that FSDP gathers for unit layers." in (dataflow.refusal(v.id) or "") for v in outputs)
    # The model is as it was: its own shards, no gradients.
    assert {name: type(parameter) for name, parameter in model.named_parameters()} == names
    assert all(parameter.grad is None for parameter in model.parameters())


def _fully_sharded_calls(rank: int) -> None:
    rows = rows_of(rank)
    model = sharded()
    profile = quick_profile(lambda: model(rows).sum(), model)
    plan = tight_plan(profile, all_of(profile, "swap", "model"), "model")
    with apply_plan(plan, model) as run:
        model(rows).sum().backward()
        assert run.stats.mismatches == 0
        assert run.stats.swapped_in_bytes > 0


def test_calls_of_a_sharded_model_are_on_the_path(tmp_path: Path) -> None:
    """The root's parameters are gathered in a hook of the root, before its own forward pass."""
    on_ranks(_fully_sharded_calls, tmp_path)


def test_fully_sharded_training(tmp_path: Path) -> None:
    on_ranks(_fully_sharded, tmp_path)

"""One of several modelled ranks: bytes and times by hand, and what is not modelled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.api.modelled_ranks import RanksOptions
from pooch.api.profiling import profile_workload
from pooch.devices import DeviceModel, Efficiency, LinkModel, PeersModel
from pooch.errors import UsageError
from pooch.ir import Op, Profile
from pooch.workloads import Workload

DEVICE = DeviceModel("plain", "a processor", "cpu", 2**34, {"float32": 1e3}, 800.0, LinkModel("disk", 1.0, 1.0))
RANKS = 4
BLOCK, ROOT = 64 * 64 * 4, 2 * 64 * 4  # bytes of the parameters; the root's two rows are padded to one for each rank
PADDED_ROOT = 4 * 64 * 4


class Net(nn.Module):
    """Blocks of one weight each, and two weights that are the root's."""

    def __init__(self, rounds: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.head = nn.Linear(64, 2, bias=False)
        self.rounds = rounds

    def forward(self, rows: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for block in self.blocks:
                rows = torch.tanh(block(rows))
        return self.head(rows).square().mean()  # type: ignore[no-any-return]


def profiled(ranks: RanksOptions | None, model: Any = Net, device: DeviceModel = DEVICE, **options: Any) -> Profile:
    def build() -> Workload:
        net, rows = model(), torch.rand(8, 64)
        return Workload(net, lambda: net(rows).sum(), torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), "net")

    return profile_workload(build, device_model=device, ranks=ranks, **options)


def beyond_state(profile: Profile, op: Op) -> tuple[int, int]:
    return op.entry_bytes - profile.persistent_bytes, op.peak_bytes - profile.persistent_bytes


def added(whole: Profile, rank: Profile) -> list[tuple[str, int, int]]:
    """By op of a rank: its name, and the bytes beyond the state that it has more than the op of the whole step."""
    ops, found = iter(whole.ops), []
    op = next(ops)
    for each in rank.ops:
        entry, peak = beyond_state(rank, each)
        if each.name in ("pooch.all_gather", "pooch.reduce_scatter"):
            base = beyond_state(whole, op)[0]
            found.append((each.name, entry - base, peak - base))
            continue
        assert each.name == op.name
        found.append((each.name, entry - beyond_state(whole, op)[0], peak - beyond_state(whole, op)[1]))
        op = next(ops, op)
    return found


def test_bytes_of_a_rank() -> None:
    whole, rank = profiled(None), profiled(RanksOptions(RANKS, link_gb_per_s=1.0))
    assert rank.fault() is None
    # Parameters and momentum: a quarter of each, padded. The input stays.
    assert whole.persistent_bytes - rank.persistent_bytes == 2 * (3 * BLOCK + ROOT) - 2 * (3 * BLOCK + PADDED_ROOT) // 4
    flat, root, piece = BLOCK, PADDED_ROOT, BLOCK // RANKS
    found = added(whole, rank)
    assert [each for each in found if each[0].startswith("pooch.")] == [
        ("pooch.all_gather", 0, 2 * root),  # the root: its flat buffer, and its parameter, which stays
        ("pooch.all_gather", 2 * root, root + 2 * flat),  # the same of a block, for which the root's flat buffer goes
        ("pooch.all_gather", root + flat, root + 2 * flat),  # the parameter before is gone, its flat buffer is not yet
        ("pooch.all_gather", root + flat, root + 2 * flat),
        ("pooch.all_gather", root + flat, root + 2 * flat),  # the third block again; the root's beginning gathered it
        ("pooch.reduce_scatter", root + 2 * flat, root + 2 * flat),  # its parameter goes, its gradient is copied
        ("pooch.all_gather", root + flat + piece, root + 2 * flat + piece),
        ("pooch.reduce_scatter", root + 2 * flat + piece, root + 2 * flat + piece),
        ("pooch.all_gather", root + 2 * piece, root + flat + 2 * piece),  # none is left to gather
        ("pooch.reduce_scatter", root + 2 * piece, root + 2 * piece),
        ("pooch.reduce_scatter", root + flat - 3 * flat + 3 * piece, root + flat - 3 * flat + 3 * piece),
        ("pooch.end", 3 * piece - 3 * flat + root // RANKS - ROOT, 3 * piece - 3 * flat + root // RANKS - ROOT),
    ]
    assert rank.ranks is not None
    assert (rank.ranks.units, rank.ranks.gradient_bytes) == (4, 3 * piece + root // RANKS)
    assert rank.ranks.state_bytes == 2 * (3 * BLOCK + PADDED_ROOT) // RANKS


def test_times_of_a_rank() -> None:
    rank = profiled(RanksOptions(RANKS, link_gb_per_s=1.0))
    assert rank.ranks is not None
    times = [op.time_ms for op in rank.ops if op.name == "pooch.all_gather"]
    compute_ms = sum(op.time_ms for op in rank.ops[2:4])  # of the first block, while the second is gathered
    root_ms, block_ms = 0.02 + PADDED_ROOT * 0.75 / 1e6, 0.02 + BLOCK * 0.75 / 1e6
    root_copy_ms, copy_ms = 2 * PADDED_ROOT / 8e8, 2 * BLOCK / 8e8
    assert times[:3] == pytest.approx([root_ms + root_copy_ms, block_ms + copy_ms, block_ms - compute_ms + copy_ms])
    assert rank.ranks.collective_ms == pytest.approx(2 * root_ms + 9 * block_ms)
    assert rank.step_ms == pytest.approx(sum(op.time_ms for op in rank.ops))
    faster = profiled(RanksOptions(RANKS, link_gb_per_s=1000.0))
    assert faster.ranks is not None
    assert faster.step_ms < rank.step_ms
    assert faster.peak_bytes == rank.peak_bytes


def test_data_parallel_ranks_hold_everything_and_buckets() -> None:
    whole, rank = profiled(None), profiled(RanksOptions(RANKS, "ddp", link_gb_per_s=1.0))
    assert rank.fault() is None
    assert rank.ranks is not None
    gradients = 3 * BLOCK + ROOT
    assert rank.persistent_bytes == whole.persistent_bytes
    assert rank.peak_bytes == whole.peak_bytes + gradients
    wait_ms = 0.02 + 2 * gradients * 0.75 / 1e6  # one bucket, which is full when all is computed
    assert rank.ranks.waiting_ms == pytest.approx(wait_ms)
    assert rank.step_ms == pytest.approx(whole.step_ms + wait_ms + 2 * 2 * gradients / 8e8)


def test_units_by_the_name_of_their_class() -> None:
    def model() -> nn.Module:
        return Net()

    named = profiled(RanksOptions(RANKS, unit="Linear", link_gb_per_s=1.0), model)
    assert named.ranks is not None
    assert [unit.name for unit in named.gathered] == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_the_link_of_the_catalogue() -> None:
    device = replace(DEVICE, peers=PeersModel("wire", 2.0, 10.0), efficiency=Efficiency(link=0.5))
    profile = profiled(RanksOptions(RANKS), device=device)
    assert profile.ranks is not None
    assert profile.ranks.link == "wire, 1 GB/s each way, 10 us"


def test_what_is_not_modelled() -> None:
    two = RanksOptions(2, link_gb_per_s=1.0)
    with pytest.raises(UsageError, match="how fast several plain reach each other is not known: give --link-gbps"):
        profiled(RanksOptions(2))
    with pytest.raises(UsageError, match="add --device-model"):
        profile_workload(lambda: pytest.fail("it is built"), ranks=two)
    with pytest.raises(UsageError, match="leave --accumulate out"):
        profiled(two, accumulate=True)
    with pytest.raises(UsageError, match=r"unit blocks\.0 runs several times in a step"):
        profiled(two, lambda: Net(rounds=2))
    with pytest.raises(UsageError, match=r"no module of class 'Block': give --unit one of Linear, ModuleList"):
        profiled(RanksOptions(2, unit="Block", link_gb_per_s=1.0))
    with pytest.raises(UsageError, match=r"no nn\.ModuleList, so its units are not known"):
        profiled(two, lambda: nn.Sequential(nn.Linear(64, 64), nn.Flatten(0), nn.LayerNorm(512)))
    with pytest.raises(UsageError, match="1 ranks to model: give at least 2"):
        RanksOptions(1)
    with pytest.raises(UsageError, match="nan GB/s: give a positive number"):
        RanksOptions(2, link_gb_per_s=float("nan"))
    with pytest.raises(UsageError, match="leave --unit out"):
        RanksOptions(2, "ddp", unit="Linear")

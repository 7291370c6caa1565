"""Several ranks under `pooch.auto`: each trains as it does without, with no collective more, and none waits forever."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pooch.autopilot import Auto, autopilot
from pooch.autopilot.node import tier_share
from pooch.errors import RankError, TierError, UsageError
from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.engines.pinned import RESERVE_BYTES
from pooch.executor.engines.tier_room import TierRoom
from pooch.torchtools import ranks as ranks_module
from tests.children import child_environment
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.cpu
STEPS, WAIT_AFTER, LONGEST_WAIT_S = 10, 4, 200.0  # it ends as soon as there is a plan
MODES = ("ddp", "unused", "static", "bucket views", "accumulated", "sharded", "sharded, kept", "sharded, accumulated")


def on_ranks(work: Callable[..., None], directory: Path, *arguments: Any, ranks: int = 2) -> None:
    """Run `work(rank, *arguments)` in processes of their own; what one of them raises is raised here."""
    run_ranks(_rank, (work, f"file://{directory}/store", ranks, arguments), ranks)


def _rank(rank: int, work: Callable[..., None], store: str, ranks: int, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    autopilot.PLANNING_TIME_LIMIT_S = 1.0  # a plan of any quality will do
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=90)
    )
    work(rank, *arguments)
    gc.collect()  # models hold their process group, and it has to go before the process does
    distributed.barrier()
    distributed.destroy_process_group()


class Net(nn.Module):
    """Wide in between, so that activations are most of the step. One block may be left out."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.LayerNorm(32)) for _ in range(blocks)
        )
        self.spare = nn.Linear(32, 32)

    def forward(self, rows: Tensor, with_spare: bool) -> Tensor:
        for block in self.blocks:
            rows = rows + block(rows)
        spared: Tensor = self.spare(rows) if with_spare else rows
        return spared


def made(mode: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if mode.startswith("sharded"):
        for block in net.blocks:
            fully_shard(block, reshard_after_forward="kept" not in mode)
        return fully_shard(net)
    return DistributedDataParallel(
        net,
        find_unused_parameters=mode == "unused",
        static_graph=mode == "static",
        gradient_as_bucket_view=mode == "bucket views",
    )


def collectives() -> int:
    """Number of collectives of the default group so far."""
    backend = distributed.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    return int(backend._get_sequence_number_for_group())


def train(mode: str, rank: int, budget: int | str | None, **options: Any) -> tuple[list[Tensor], int, Any, list[str]]:
    """Losses and parameters, number of collectives, what Pooch counted and said. Ranks have other shapes and data."""
    model, told = made(mode), []
    before = collectives()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(rank)
    found = []
    auto = None if budget is None else Auto([model], budget, tell=told.append, **options)

    def backward(synchronised: bool) -> None:
        skips = mode == "accumulated" and not synchronised
        if mode == "sharded, accumulated":
            model.set_requires_gradient_sync(synchronised)  # type: ignore[operator]
        with model.no_sync() if skips else nullcontext():  # type: ignore[operator]
            loss = model(torch.randn(1024 + 256 * rank, 32, generator=draw), mode != "unused").square().mean()
            loss.backward()
        found.append(loss.detach().clone())

    for step in range(STEPS):
        if mode.endswith("accumulated"):
            backward(False)
        backward(True)
        optimizer.step()
        optimizer.zero_grad()
        end_s = time.monotonic() + LONGEST_WAIT_S
        while auto is not None and step >= WAIT_AFTER and auto.is_planning and time.monotonic() < end_s:
            time.sleep(0.05)
    count = collectives() - before
    locals_ = (getattr(each, "_local_tensor", each) for each in model.parameters())
    found += [each.detach().clone() for each in locals_]
    summary = None
    if auto is not None:
        summary = auto.summary()
        auto.remove()
    return found, count, summary, told


def _same_as_plain(rank: int, modes: tuple[str, ...]) -> None:
    for mode in modes:
        plain, plain_count, _, _ = train(mode, rank, None)
        found, count, summary, _ = train(mode, rank, "60%")
        assert all(map(torch.equal, found, plain)), mode
        assert count == plain_count > STEPS, mode
        assert summary.steps_over_budget == 0, (mode, str(summary))
        assert 0 < summary.peak_bytes <= summary.budget_bytes, (mode, str(summary))
        assert summary.swapped_bytes + summary.recomputed_ops > 0, (mode, str(summary))
        assert summary.steps_left_plan == 0, (mode, str(summary))
        assert summary.steps_on_plan > 0, (mode, str(summary))
        shape = summary.shapes[0]
        assert shape.predicted_peak_bytes < shape.in_core_peak_bytes, (mode, str(summary))


@pytest.mark.parametrize("modes", [MODES[:3], MODES[3:5], MODES[5:]], ids=lambda modes: modes[0])
def test_two_ranks_train_as_without_a_budget(tmp_path: Path, modes: tuple[str, ...]) -> None:
    on_ranks(_same_as_plain, tmp_path, modes)


@pytest.mark.slow
def test_four_ranks_train_as_without_a_budget(tmp_path: Path) -> None:
    on_ranks(_same_as_plain, tmp_path, ("ddp", "sharded"), ranks=4)


# A machine's swap tier ------------------------------------------------------------------------------------------------


def _shared_tier(rank: int) -> None:
    plain, *_ = train("ddp", rank, None)
    found, _, summary, told = train("ddp", rank, "60%", host_budget="8MiB")
    assert all(map(torch.equal, found, plain))
    assert 0 < summary.tier_bytes <= summary.tier_limit_bytes == 4 * 2**20
    assert "4.00 MiB for each of 2 ranks" in str(summary)
    taken = torch.tensor(
        [summary.tier_bytes, sum("8.00 MiB of this machine: 4.00 MiB for each" in text for text in told)]
    )
    taken = torch.cat([taken, torch.tensor([sum("ranks of this machine took" in text for text in told)])])
    distributed.all_reduce(taken)
    assert taken[0] <= 8 * 2**20
    assert taken[1:].tolist() == [1, 1], "one rank tells what they may take, and one what they took"


def test_ranks_of_a_machine_share_its_swap_tier(tmp_path: Path) -> None:
    on_ranks(_shared_tier, tmp_path)


def test_the_tier_is_no_larger_than_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pooch.autopilot.node.has_streams", lambda device: True)
    monkeypatch.setattr("pooch.autopilot.node.free_bytes", lambda device: 2**30 + RESERVE_BYTES)
    device = torch.device("cuda")
    share = tier_share(2**31, device, 4)
    assert (share.node_bytes, share.each_bytes, share.asked_bytes) == (2**30, 2**28, 2**31)
    assert str(share) == (
        "the swap tier may take 1.00 GiB of this machine, which has no more left (the host budget is 2.00 GiB): "
        "256.00 MiB for each of 4 ranks"
    )
    assert tier_share(2**29, device, 2).each_bytes == 2**28
    assert tier_share(None, device, 2).each_bytes == 2**29
    assert tier_share(None, device, 1).each_bytes is None
    monkeypatch.setattr("pooch.autopilot.node.has_streams", lambda device: False)
    assert tier_share(2**31, device, 4).each_bytes == 2**29, "files take no memory"


def test_an_engine_takes_no_more_than_its_room(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    engine.room.limit_bytes = 3 * 2**20
    large = engine.open_arena(2 * 2**20)
    small = engine.open_arena(2**20)
    assert engine.room.held_bytes == 3 * 2**20
    with pytest.raises(TierError, match=r"limited to 3.00 MiB, of which 3.00 MiB are taken, and 4.00 KiB more"):
        engine.open_arena(4096)
    small.close()
    large.close()
    engine.open_arena(3 * 2**20).close()  # what waited for the next step makes room
    assert engine.room.most_bytes == 3 * 2**20
    engine.close()
    assert engine.room.held_bytes == 0


def test_room_comes_back_with_its_owner() -> None:
    room, owner = TierRoom(), {1}
    room.hold(owner, 100)
    room.limit_bytes = 100
    assert not room.has(1)
    del owner
    assert room.has(100)
    assert room.most_bytes == 100


def test_how_many_ranks_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ranks_module._LOCAL_COUNTS:
        monkeypatch.delenv(name, raising=False)
    assert ranks_module.local_count(8) == 8, "as far as anyone can tell"
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    assert ranks_module.local_count(8) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_module.local_count(8) == 4


# Groups ---------------------------------------------------------------------------------------------------------------


def _in_groups(rank: int) -> None:
    first, second = (distributed.new_group([number]) for number in range(2))
    mine, other = (first, second) if rank == 0 else (second, first)
    with pytest.raises(UsageError, match="this rank is not in process_group"):
        Auto([nn.Linear(4, 4)], "1GiB", process_group=other)
    with pytest.raises(UsageError, match=r"takes a torch.distributed.ProcessGroup, not str"):
        Auto([nn.Linear(4, 4)], "1GiB", process_group="mine")
    with Auto([nn.Linear(4, 4)], "1GiB", host_budget="1MiB", process_group=mine, tell=lambda _: None) as auto:
        assert auto.summary().tier_limit_bytes == 2**20, "alone in its group"


def test_the_ranks_are_those_of_the_group(tmp_path: Path) -> None:
    on_ranks(_in_groups, tmp_path)


def test_a_group_without_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="call init_process_group first"):
        Auto([nn.Linear(4, 4)], "1GiB", process_group=object())


# Failures -------------------------------------------------------------------------------------------------------------

FAILING = """
import sys, time
from datetime import timedelta
import torch
from torch import distributed
import pooch
from tests.autopilot.test_ranks import made

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.set_num_threads(1)
distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
model, calls = made("ddp"), [0]

def step():
    calls[0] += 1
    if rank == 1 and calls[0] == 4:
        raise ValueError("no data")
    return model(torch.randn(1024, 32), True).square().mean()

if how == "auto":
    def broken(*_):
        raise pooch.errors.TierError("the tier is gone")
    with pooch.auto(model, "60%"):
        for number in range(6):
            loss = step() if number != 3 or rank == 0 else model(torch.randn(1024, 32), True).square().mean()
            if rank == 1 and number == 3:
                from pooch.executor.evictor import Evictor; from pooch.executor.step import Step
                from pooch.executor.step import Step
                Step.unpack = Step.unpack = Evictor.ensure = broken
            loss.backward()
            model.zero_grad()
else:
    try:
        pooch.profile(step, model)
    except pooch.errors.PoochError as error:
        print(type(error).__name__, error, flush=True)
        if how == "lives on" and rank == 1:
            time.sleep(300)
        sys.exit(1)
"""


def fail(tmp_path: Path, how: str) -> list[tuple[int, str]]:
    """Exit code and output of each of two ranks, the second of which fails."""
    environment, pipe = child_environment(OMP_NUM_THREADS="1", WORLD_SIZE="2"), subprocess.PIPE
    command = [sys.executable, "-c", FAILING]
    children = [
        subprocess.Popen(
            [*command, str(rank), f"file://{tmp_path}/store", how], stdout=pipe, stderr=subprocess.STDOUT, text=True,
            env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [children[0].communicate(timeout=200)[0]]
        if how == "lives on":
            children[1].kill()
        outputs.append(children[1].communicate(timeout=60)[0])
        return [(child.returncode, output) for child, output in zip(children, outputs, strict=True)]
    finally:
        for child in children:
            child.kill()


def test_an_error_in_the_middle_of_a_step_ends_all_ranks(tmp_path: Path) -> None:
    """As without Pooch: the process that fails ends, with Pooch's threads and children, and so do its connections."""
    (waiting, told), (failing, why) = fail(tmp_path, "auto")
    assert "TierError: the tier is gone" in why
    assert failing == waiting == 1
    assert "Connection closed by peer" in told


def test_a_rank_that_fails_while_profiling_ends_the_others(tmp_path: Path) -> None:
    (waiting, told), (failing, why) = fail(tmp_path, "ends")
    assert failing == waiting == 1
    assert "ProfileError the step raised ValueError: no data" in why
    assert "rank 1 failed: ProfileError: the step raised ValueError: no data" in told


def test_a_rank_that_fails_while_profiling_and_lives_on_ends_the_others(tmp_path: Path) -> None:
    (waiting, told), _ = fail(tmp_path, "lives on")
    assert waiting == 1
    assert "rank 1 failed: ProfileError: the step raised ValueError: no data; this rank waits for it, and ends" in told


def _profiled_alike(rank: int, mode: str) -> None:
    """Before any step of its own, so that wrappers have not arranged their buckets yet."""
    import pooch

    model = made(mode)
    rows = torch.randn(1024, 32)
    before = pooch.torchtools.memory_trace.live_bytes(torch.device("cpu"))
    limit = 2**40 if rank == 0 else before + 2**20
    profile = pooch.profile(lambda: model(rows, True).square().mean(), model, memory_limit=limit)
    assert profile.mode == "offload", "the second rank has no room for a plain step, so the first takes none either"


@pytest.mark.parametrize("mode", ["ddp", "static", "sharded"])
def test_ranks_profile_in_the_same_way(tmp_path: Path, mode: str) -> None:
    on_ranks(_profiled_alike, tmp_path, mode)


def _late(rank: int, directory: str) -> None:
    ranks = ranks_module.Ranks("test")
    if rank == 1:
        ranks.fail(ValueError("no"))
        ranks.fail(KeyError("later"))
        Path(directory, "failed").touch()
        return
    while not Path(directory, "failed").exists():
        time.sleep(0.01)
    assert ranks.failure() == "rank 1 failed: ValueError: no"
    assert not ranks.meet("somewhere", 30.0)
    with pytest.raises(RankError, match="rank 1 failed: ValueError: no"):
        ranks.least("value", 1)
    assert ranks_module.Ranks("test").failure() is None, "another session begins afresh"


def test_nobody_waits_for_a_rank_that_has_failed(tmp_path: Path) -> None:
    on_ranks(_late, tmp_path, str(tmp_path))


def _guarded(rank: int) -> None:
    import pooch

    model = made("ddp")
    profile = pooch.profile(lambda: model(torch.randn(256, 32), True).square().mean(), model)
    with pytest.raises(UsageError, match="repeats a step in one rank alone"):
        pooch.guard(profile, "100%", model)


def test_a_guard_is_refused_where_a_repeated_step_would_meet_other_collectives(tmp_path: Path) -> None:
    on_ranks(_guarded, tmp_path)


def test_a_rank_alone_has_no_collectives() -> None:
    assert not ranks_module.has_collectives(nn.Linear(2, 2))
    assert os.environ.get("RANK") is None

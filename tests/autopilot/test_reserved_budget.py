"""`bound="reserved"`: the budget bounds what PyTorch's caching allocator holds of a CUDA device."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import pooch
from pooch.autopilot import auto
from pooch.autopilot.remarks import Remarks
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.reserved_memory import ReservedMemory
from pooch.errors import UsageError
from pooch.ground.units import format_bytes
from pooch.torchtools import accelerators
from tests.autopilot.stepping import stepped
from tests.children import child_environment
from tests.executor.online.zoo import WIDTH, Layers
from tests.executor.support import quick_profile

MEBIBYTE = 2**20
BUDGET = 240 * MEBIBYTE
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlanRequests, "ask", lambda *_: None)


@pytest.fixture(params=[False, True], ids=["segments", "expandable"])
def expandable(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{request.param}")
    yield
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


@pytest.fixture
def nothing_reserved() -> None:
    """Nothing of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def a_job() -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = Layers(torch.tanh, depth=20).to("cuda")
    inputs = torch.randn(32768, WIDTH, device="cuda")
    return model, lambda: model(inputs).square().mean()


@pytest.mark.gpu
@on_a_card
@pytest.mark.usefixtures("no_plans")
@pytest.mark.usefixtures("expandable")
def test_what_is_reserved_never_passes_the_budget() -> None:
    model, forward = a_job()
    torch.cuda.reset_peak_memory_stats()
    plain = stepped(forward, model)
    assert torch.cuda.max_memory_reserved() > BUDGET
    lines: list[str] = []
    with auto(model, BUDGET, bound="reserved", tell=lines.append) as held:
        assert held.budget_bytes == BUDGET
        found = [stepped(forward, model) for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        found += [stepped(forward, model) for _ in range(2)]
        assert torch.cuda.max_memory_reserved() <= BUDGET
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(BUDGET, dtype=torch.uint8, device="cuda")
    assert torch.empty(BUDGET, dtype=torch.uint8, device="cuda").nbytes == BUDGET
    assert all(torch.equal(*pair) for each in found for pair in zip(plain, each, strict=True))
    assert lines[0] == (
        "the budget is 176.00 MiB: of 240.00 MiB that PyTorch's allocator may reserve, less a margin of 64.00 MiB"
    )


@pytest.mark.gpu
@on_a_card
@pytest.mark.usefixtures("no_plans", "nothing_reserved")
def test_what_was_cached_before_is_returned_as_the_budget_begins() -> None:
    model, forward = a_job()
    cached = torch.empty(2 * BUDGET, dtype=torch.uint8, device="cuda")
    del cached
    assert torch.cuda.memory_reserved() > 2 * BUDGET
    with auto(model, BUDGET, bound="reserved", quiet=True) as held:
        stepped(forward, model)
        assert torch.cuda.memory_reserved() <= BUDGET
        assert str(held.summary()).startswith("pooch: Budget held: ")


@pytest.mark.gpu
@on_a_card
@pytest.mark.usefixtures("no_plans", "nothing_reserved")
def test_what_the_first_step_reserves_beyond_the_budget_is_told_and_counted_in_the_verdict() -> None:
    model, forward = a_job()
    lines: list[str] = []

    def many_small_blocks_first() -> Tensor:
        """They are cached apart from large ones."""
        blocks = [torch.empty(MEBIBYTE, dtype=torch.uint8, device="cuda") for _ in range(130)]
        del blocks
        return forward()

    with auto(model, BUDGET, bound="reserved", tell=lines.append) as held:
        stepped(many_small_blocks_first, model)
        reserved_bytes = torch.cuda.max_memory_reserved()
        told, verdict = list(lines), str(held.summary())
        stepped(forward, model)
        assert torch.cuda.memory_reserved() <= BUDGET
        assert f"in 1 of 2 steps: {format_bytes(reserved_bytes).split()[0]}" in str(held.summary())
    assert reserved_bytes > BUDGET
    over = format_bytes(reserved_bytes - BUDGET)
    assert [line for line in told if "over the budget" in line] == [
        f"a step took {format_bytes(reserved_bytes)}, {over} over the budget of 240.00 MiB: that much was reserved "
        "before it was known what single ops need; the allocator reserves no more beyond the budget from here on"
    ]
    assert verdict.startswith(f"pooch: Budget exceeded by {over} in 1 of 1 step")


@pytest.mark.gpu
@on_a_card
@pytest.mark.usefixtures("no_plans", "nothing_reserved")
def test_what_cannot_be_returned_because_it_holds_tensors_is_told_and_counted_in_the_verdict() -> None:
    cached = torch.empty(2 * BUDGET, dtype=torch.uint8, device="cuda")
    del cached
    model, forward = a_job()  # whose inputs lie in the block that was cached
    lines: list[str] = []
    with auto(model, BUDGET, bound="reserved", tell=lines.append) as held:
        for _ in range(3):
            stepped(forward, model)
        assert torch.cuda.memory_reserved() > 2 * BUDGET
        assert str(held.summary()).startswith("pooch: Budget exceeded by ")
        assert " in 3 of 3 steps" in str(held.summary())
    assert any(
        line.endswith(
            "that much is reserved in blocks that hold tensors, which the allocator cannot return: call "
            "torch.cuda.empty_cache() before what stays is built"
        )
        for line in lines
    )


@pytest.mark.gpu
@on_a_card
@pytest.mark.usefixtures("no_plans")
def test_a_limit_of_the_program_s_own_stays_and_comes_back() -> None:
    model, forward = a_job()
    total_bytes = accelerators.total_bytes(torch.device("cuda"))
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        for size, share in ((BUDGET, BUDGET / total_bytes), (total_bytes * 3 // 4, 0.5)):
            with auto(model, size, bound="reserved", quiet=True):
                assert torch.cuda.get_per_process_memory_fraction() == 0.5
                for _ in range(2):
                    stepped(forward, model)
                assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(share)
            assert torch.cuda.get_per_process_memory_fraction() == 0.5
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@on_a_card
def test_the_margin_grows_where_memory_runs_out_and_where_the_cache_is_emptied_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counters = {"num_alloc_retries": 0, "num_ooms": 0}
    monkeypatch.setattr(accelerators, "memory_counters", lambda _: counters)
    lines: list[str] = []
    memory = ReservedMemory(torch.device("cuda"), BUDGET, Remarks(lines.append))
    try:
        assert memory.look(is_quiet=False) is None
        counters["num_ooms"] += 1
        found = memory.look(is_quiet=False)
        assert found is not None
        assert found.margin_bytes == 96 * MEBIBYTE
        assert found.size_bytes + found.margin_bytes == BUDGET
        changes = []
        for _ in range(8):
            counters["num_alloc_retries"] += 1
            changes.append(memory.look(is_quiet=False) is not None)
        assert changes == [False, False, True, False, False, False, False, False]
        assert memory.held.margin_bytes == BUDGET // 2
        counters["num_ooms"] += 1
        assert memory.look(is_quiet=False) is None
        assert len(lines) == 3
    finally:
        memory.stop()


@pytest.mark.gpu
@on_a_card
@pytest.mark.slow
def test_a_script_is_run_within_what_may_be_reserved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(48)]\n"
        "model, inputs = torch.nn.Sequential(*layers).cuda(), torch.randn(4096, 256).cuda()\n"
        "for step in range(5):\n"
        "    if step == 2:\n"
        "        torch.cuda.reset_peak_memory_stats()\n"
        "    model(inputs).square().mean().backward()\n"
        "    model.zero_grad()\n"
        "print(torch.cuda.max_memory_reserved())\n"
    )
    reserved = {}
    for bound in ("live", "reserved"):
        done = subprocess.run(
            [sys.executable, "-m", "pooch", "exec", "--budget", "256MiB", "--bound", bound, str(script)],
            env=child_environment(), capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
        reserved[bound] = int(done.stdout.split()[-1])
        assert ("may reserve" in done.stderr) == (bound == "reserved")
    assert reserved["reserved"] <= 256 * MEBIBYTE < reserved["live"]


@pytest.mark.cpu
def test_what_cannot_be_bounded_is_refused_in_one_line() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="what is reserved on cpu cannot be bounded"):
        pooch.auto(model, "1GiB", bound="reserved")
    with pytest.raises(UsageError, match="cannot be a share, or what is free: give bytes"):
        pooch.auto(model, "60%", bound="reserved")
    with pytest.raises(UsageError, match="there is no bound 'arena' of a training loop"):
        pooch.auto(model, "1GiB", bound="arena")  # type: ignore[arg-type]
    with pooch.auto(model, "1GiB", quiet=True):
        pass
    profile = quick_profile(lambda: model(torch.ones(8, 4)).sum(), model)
    with pytest.raises(UsageError, match="no plan can tell what PyTorch's caching allocator will reserve"):
        pooch.plan(profile, "90%", bound="reserved")  # type: ignore[arg-type]

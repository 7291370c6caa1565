"""A plain step that does not fit is never run: not to measure it, to compare with it, or to settle before a limit.

The device is this machine with the room of a small one, which the plain step's peak is over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.api.batch_search.max_batch import max_batch
from pooch.api.measure import checking, limited_child, measuring
from pooch.api.measure.arena_training import ArenaOutcome
from pooch.api.measure.comparison import compare, measure_rows
from pooch.api.measure.hard_limit import SLACK_BYTES, LimitedJob, LimitedOutcome
from pooch.api.measure.limited_child import _Training
from pooch.api.measure.measuring import measure_training, optimize
from pooch.api.options import PlanOptions
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.report.growing import max_batch_tables
from pooch.torchtools import device_memory
from pooch.workloads import Workload, WorkloadFactory

MIB = 2**20
plain_passes: list[bool] = []  # of each forward pass that builds a graph: whether autograd keeps what it saves
USER_FILE = """
import torch
import pooch
from tests.api.test_in_core import Waves

def make(batch_size=8):
    model = Waves(batch_size)
    return pooch.Workload(model, model, torch.optim.SGD(model.parameters(), lr=0.1), "waves", batch_size)
"""


class Waves(torch.nn.Module):
    """Saves a tensor of 64 KiB an item for each of its layers; notes whether anything takes them away."""

    def __init__(self, batch_size: int, layers: int = 12) -> None:
        super().__init__()
        self.scales = torch.nn.Parameter(torch.linspace(0.5, 1.5, layers))
        self.rows = torch.linspace(-1, 1, batch_size * 2**14)

    def forward(self) -> torch.Tensor:
        if torch.is_grad_enabled():
            plain_passes.append(torch._C._autograd._top_saved_tensors_default_hooks(True) is None)
        hidden = self.rows
        for scale in self.scales:
            hidden = torch.sin(hidden * scale)
        return hidden.square().mean()


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkloadFactory:
    from pooch.api import profiling
    from pooch.executor.engines import measurement
    from tests.executor.support import LINK

    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    monkeypatch.setattr(measurement, "with_step_shares", lambda link, *measuring: link)
    monkeypatch.setattr(profiling, "with_hook_costs", lambda profile, progress: profile)
    (tmp_path / "waves.py").write_text(USER_FILE)
    plain_passes.clear()
    return WorkloadFactory(f"{tmp_path / 'waves.py'}:make")


MakeSmall = Callable[[int], None]


@pytest.fixture
def make_small(monkeypatch: pytest.MonkeyPatch) -> MakeSmall:
    """A device with room for so many bytes of tensors more than live now."""

    def make(room_bytes: int) -> None:
        monkeypatch.setattr(device_memory, "free_bytes", lambda device: room_bytes + device_memory._SLACK_BYTES)

    return make


def test_optimize_and_check_of_a_step_that_does_not_fit_never_run_it_plainly(
    factory: WorkloadFactory, make_small: MakeSmall
) -> None:
    in_core_bytes = profile_workload(factory()).peak_bytes
    assert any(plain_passes)
    plain_passes.clear()
    make_small(in_core_bytes // 2)
    result = optimize(factory, "60%", steps=2, check=True)
    assert result.profile.mode == "offload"
    assert result.training.fits_in_core is False
    assert (result.training.bitwise_equal, result.training.compared_with) == (True, "offloaded")
    assert len(plain_passes) >= 2 * 3
    assert not any(plain_passes)


def test_running_and_comparing_plans_of_it_do_not_either(factory: WorkloadFactory, make_small: MakeSmall) -> None:
    profile = profile_workload(factory())
    chosen = plan(profile, "60%", region="step")
    plain_passes.clear()
    make_small(profile.peak_bytes // 2)
    report = measure_training(factory, chosen, steps=1, check=True)
    assert report.plain_step_ms is None
    rows = compare(profile, ["60%"], PlanOptions(region="step"), policies=["swap_all"])
    (row,) = measure_rows(rows, factory, steps=1, progress=lambda text, share: None)
    assert row.measured is not None
    assert row.measured.plain_step_ms is None
    assert plain_passes
    assert not any(plain_passes)


def test_the_largest_batch_is_measured_without_plain_training_that_does_not_fit(
    factory: WorkloadFactory, make_small: MakeSmall
) -> None:
    """The budget is that of a larger device than this one."""
    make = factory.name

    def found_with(measure_steps: int) -> Any:
        return max_batch(make, 12 * MIB, start=8, most=64, points=2, measure_steps=measure_steps, policy="swap_all")

    expected = found_with(1)
    assert [each.planned for each in expected.measured] == [False, True]
    assert any(plain_passes)
    plain_passes.clear()
    make_small(expected.in_core.in_core_peak_bytes // 2)
    found = found_with(1)
    assert [each.planned for each in found.measured] == [True]
    assert not any(plain_passes)
    *_, measured = max_batch_tables(found)
    assert "does not fit here" in list(map(str, measured.whole().columns[1].cells))


# Before a hard limit --------------------------------------------------------------------------------------------------


def job_of(factory: WorkloadFactory, **others: Any) -> LimitedJob:
    return LimitedJob(factory, None, MIB, 1, **others)


@pytest.mark.parametrize(("known", "is_plain"), [(True, False), (False, False), (True, True)])
def test_plain_training_settles_plainly_only_where_it_is_known_to_fit(
    factory: WorkloadFactory, make_small: MakeSmall, known: bool, is_plain: bool
) -> None:
    make_small(2**30 if is_plain else MIB)
    training = _Training(job_of(factory, in_core_peak_bytes=64 * MIB if known else None))
    training.settle()
    assert plain_passes == [is_plain]


class FakeMeter:
    """Of a device whose allocator has a cache: it took 30 MiB more than its tensors."""

    def __init__(self, device: object) -> None:
        self.peak_bytes, self.reserved_bytes = 0, 0

    def __enter__(self) -> FakeMeter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.peak_bytes, self.reserved_bytes = 100 * MIB, 130 * MIB


@pytest.fixture
def caching(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A device with a caching allocator; the limits that are set there: budget and slack."""
    limits: list[tuple[int, int]] = []

    def limit_gpu(device: object, budget_bytes: int, slack_bytes: int) -> int:
        limits.append((budget_bytes, slack_bytes))
        return budget_bytes + slack_bytes

    monkeypatch.setattr(limited_child, "limit_gpu", limit_gpu)
    monkeypatch.setattr("pooch.torchtools.memory_meter.MemoryMeter", FakeMeter)
    monkeypatch.setattr("pooch.profiler.pressure.saved_tensors_away", nullcontext)
    monkeypatch.setattr(device_memory, "give_memory_back", lambda device: None)
    monkeypatch.setattr("pooch.torchtools.training_state.model_device", lambda model: SimpleNamespace(type="cuda"))
    monkeypatch.setattr("pooch.api.measure.training.forward_and_backward", lambda workload, run: torch.zeros(()))
    monkeypatch.setattr(limited_child, "return_large_blocks", lambda: None)
    return limits


@pytest.mark.parametrize("given_bytes", [None, 7 * MIB])
def test_the_limit_leaves_what_the_allocator_was_seen_to_reserve_beside_tensors(
    factory: WorkloadFactory,
    caching: list[tuple[int, int]],
    given_bytes: int | None,
) -> None:
    told: list[tuple[str, float]] = []
    assert limited_child.trained(job_of(factory, slack_bytes=given_bytes), lambda *event: told.append(event)) == (
        "",
        None,
    )
    slack_bytes = SLACK_BYTES + 30 * MIB if given_bytes is None else given_bytes
    assert caching == [(MIB, slack_bytes)]
    assert told == [("slack_bytes", slack_bytes), ("loss", 0.0)]


def test_plain_training_gets_the_limit_of_planned_training_and_the_report_tells_it(
    factory: WorkloadFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = plan(profile_workload(factory()), "60%", region="step")
    asked: list[tuple[Any, ...]] = []

    def train_limited(job: LimitedJob, progress: object) -> LimitedOutcome:
        asked.append((job.plan is not None, job.in_core_peak_bytes, job.slack_bytes, job.on_arena))
        arena = "serving" if job.on_arena else None
        return LimitedOutcome(job.plan is not None, "" if job.plan else "memory ran out", (), 94 * MIB, arena)

    monkeypatch.setattr(measuring, "train_limited", train_limited)
    monkeypatch.setattr(measuring, "train_on_arena", lambda *given, **keywords: ArenaOutcome("serving"))
    report = measure_training(factory, chosen, steps=1, hard_limit=True, arena=True)
    known = (chosen.in_core_peak_bytes, 94 * MIB)
    assert asked == [(True, None, None, False), (False, *known, False), (True, *known, True)]
    assert report.hard_limit_arena == "went through; arena: serving"
    assert (report.hard_limit_planned, report.hard_limit_plain) == ("went through", "died: memory ran out")
    assert report.hard_limit_slack_bytes == 94 * MIB


def test_a_reference_that_runs_out_of_memory_is_gone_before_the_next_is_built(
    factory: WorkloadFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    chosen = plan(profile_workload(factory()), "60%", region="step")
    built: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def build() -> Workload:
        alive.append(sum(model() is not None for model in built))
        workload = factory()
        built.append(weakref.ref(workload.model))
        return workload

    real = checking.train_steps

    def out_of_memory(workload: Workload, given: Any, *others: Any) -> Any:
        if given is None:
            raise torch.OutOfMemoryError
        return real(workload, given, *others)

    monkeypatch.setattr(checking, "train_steps", out_of_memory)
    reference = checking.train_reference(build, chosen, 1, lambda text: None)
    assert reference.offloaded
    assert alive == [0, 0]

"""A model that does not fit on a GPU: it is trained under its plan, checked, and sent through a hard limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pooch.api.measure.hard_limit import SLACK_BYTES
from pooch.api.measure.measuring import measure_training
from pooch.api.planning import plan
from pooch.api.profiling import profile_workload
from pooch.executor.engines import measurement
from pooch.workloads import WorkloadFactory
from tests.executor.support import LINK

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
USER_FILE = """
import torch
import pooch

def make(batch_size=32768, device="cuda", layers=10):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers) for m in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
    model = torch.nn.Sequential(*blocks).to(device)
    data = torch.randn(batch_size, 256, device=device)
    return pooch.Workload(model, lambda: model(data).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkloadFactory]:
    (tmp_path / "big.py").write_text(USER_FILE)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")  # of child processes: blocks are whole
    monkeypatch.setattr(measurement, "measure_link", lambda engine, device, **options: LINK)
    torch.cuda.init()
    torch._C._cuda_clearCublasWorkspaces()  # of tests before: they would take part of the room
    yield WorkloadFactory(f"{tmp_path / 'big.py'}:make")
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


def test_where_plain_training_has_no_room_the_plan_is_checked_and_keeps_a_hard_limit(factory: WorkloadFactory) -> None:
    """The room is not foreseen here, so the plain step is stopped by the allocator, as where others use the card."""
    profile = profile_workload(factory, mode="fake")
    chosen = plan(profile, "75%", region="step")
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.95 * profile.peak_bytes / total_bytes)
    report = measure_training(factory, chosen, steps=1, check=True, hard_limit=True)
    assert report.fits_in_core is False
    assert (report.bitwise_equal, report.compared_with) == (True, "offloaded"), report.first_difference
    assert (report.swapped_out_bytes or 0) + (report.recomputed_ops or 0) > 0
    assert report.measured_reserved_bytes is not None
    assert report.measured_reserved_bytes >= report.measured_peak_bytes
    assert report.hard_limit_planned == "went through"
    assert report.hard_limit_slack_bytes is not None
    assert report.hard_limit_slack_bytes > SLACK_BYTES

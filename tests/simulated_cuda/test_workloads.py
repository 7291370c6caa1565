"""Every built-in workload on the simulated device in memory mode: bytes that were predicted, and bytes that were taken.

The caching allocator is the real one. With expandable segments what it counts is compared; without, what it was asked
for: then it counts blocks whole that its cache happened not to split, which no prediction can know.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from pooch.workloads import built_in_workloads
from tests.simulated_cuda.mistakes import is_simulated
from tests.simulated_cuda.peaks import BATCH_SIZES, Row, rows_of
from tests.workloads.test_builtin import SMALL_NAMES

MOST_ERROR = 0.005
LEAST_BYTES = 20 * 2**20  # beside which the allocator's granularity is nothing
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
in_memory_mode = is_simulated() and os.environ.get("SIMULATED_CUDA_NUMBERS") == "0"
# One process for the tests of one workload: they look at the same rows (`--dist loadgroup`).
each_workload = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in BATCH_SIZES]
)
on_the_device = pytest.mark.skipif(not in_memory_mode, reason="needs the simulated device in memory mode")


def test_every_small_workload_is_measured() -> None:
    assert sorted(BATCH_SIZES) == sorted(SMALL_NAMES)


@pytest.mark.gpu
@pytest.mark.any_kernels
@on_the_device
def test_the_allocator_is_set_as_the_variable_says() -> None:
    tensor = torch.empty(4 * 2**20, device="cuda")
    assert {segment["is_expandable"] for segment in torch.cuda.memory_snapshot() if segment["active_size"]} == {
        EXPANDABLE
    }
    assert tensor.is_cuda


@pytest.mark.gpu
@pytest.mark.any_kernels
@on_the_device
@each_workload
def test_plain_training_takes_what_a_profile_predicts(name: str) -> None:
    rows = [row for row in measured(name) if row.share in (0, 1)]
    assert len(rows) == 3
    for row in rows:
        assert row.predicted_bytes > LEAST_BYTES
        assert_predicted(row)


@pytest.mark.gpu
@pytest.mark.any_kernels
@on_the_device
@each_workload
def test_training_under_a_plan_takes_what_was_predicted(name: str) -> None:
    rows = [row for row in measured(name) if row.share not in (0, 1)]
    assert len(rows) == 3
    for row in rows:
        assert_predicted(row)
        assert_kept(row)
    assert sum(row.trained.swapped_in_bytes + row.trained.recomputed_ops for row in rows) > 0


@cache
def measured(name: str) -> list[Row]:
    package = built_in_workloads()[name.partition("@")[0]].package
    if package:
        pytest.importorskip(package)
    return rows_of(name)


def assert_predicted(row: Row) -> None:
    assert abs(row.requested_deviation) < MOST_ERROR, row
    if EXPANDABLE:
        assert abs(row.allocated_deviation) < MOST_ERROR, row


def assert_kept(row: Row) -> None:
    trained = row.trained
    assert row.predicted_bytes <= row.budget_bytes
    assert trained.highest.requested_bytes <= row.budget_bytes, row
    if EXPANDABLE:
        assert trained.highest.allocated_bytes <= row.budget_bytes, row
    assert (trained.swapped_in_bytes > 0) == (row.planned_swaps > 0), row
    assert (trained.late_swaps, trained.mismatches, trained.kept_after_errors) == (0, 0, 0), row

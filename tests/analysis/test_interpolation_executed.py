"""A plan for a shape at which nothing was ever profiled, in training at that shape."""

from __future__ import annotations

import gc

import pytest
import torch

import pooch
from pooch.analysis.interpolation import KnownStep, interpolated_profile
from tests.executor.nets import Job
from tests.executor.support import assert_same, profile_job, train
from tests.executor.test_peaks import NOISE, measured_peak

pytestmark = pytest.mark.any_kernels


def language_job(length: int) -> Job:
    """A small GPT-2 with dropout, trained on tokens of shape (2, length)."""
    pytest.importorskip("transformers")
    from pooch.workloads.models.gpt2 import build

    made = build(2, sequence_length=64, layers=2, width=64, heads=4, vocabulary=500)
    return Job(
        made.model,
        torch.optim.AdamW(made.model.parameters(), lr=1e-3),
        lambda generator: (torch.randint(500, (2, length), generator=generator),),
        lambda net, batch: net(input_ids=batch[0], labels=batch[0]).loss,
        torch.device("cpu"),
    )


@pytest.mark.cpu
def test_a_plan_for_an_interpolated_length_trains_bitwise_within_its_peak() -> None:
    # GIVEN measured steps at three lengths, and none at the fourth
    known = [KnownStep((2, length), profile_job(language_job(length))) for length in (64, 128, 256)]
    made = interpolated_profile(known, (2, 192))
    assert made.profile is not None, made.reason
    plan = pooch.plan(made.profile, "70%", time_limit_s=5)
    gc.collect()  # what the profiled models left is not of the step
    # THEN training there is on the path of the plan, gives the same bits, and stays within the predicted peak
    plain, _ = train(language_job(192), None)
    gc.collect()
    planned, stats = train(language_job(192), plan, on_mismatch="error", measure_every=None)
    assert_same(plain, planned)
    del plain, planned
    gc.collect()
    assert stats is not None
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0
    peak = measured_peak(language_job(192), plan)
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=NOISE)

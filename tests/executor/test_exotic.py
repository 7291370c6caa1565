"""Plans around what cannot be watched: the same bits, with everything swapped and everything replayed that can be."""

from __future__ import annotations

import gc

import pytest
import torch

import pooch
from pooch.executor import apply_plan
from pooch.executor.step import Step
from tests.executor.support import all_of, quick_profile, tight_plan
from tests.exotic_kinds import KINDS, ROWS, WIDTH, Sandwich
from tests.exotic_training import APART, Outcome, Way, outcome_of

pytestmark = pytest.mark.usefixtures("watched_by")
WAYS: tuple[Way, ...] = ("recompute", "swap")


def check(way: Way, outcome: Outcome) -> None:
    """Judge what a kind gave."""
    assert outcome.differs == ()
    assert (outcome.recomputed_ops if way == "recompute" else outcome.swapped_bytes) > 0, "the rest is governed"
    assert len(outcome.lines) <= 1, outcome.lines
    assert not outcome.lines or "is not governed" in outcome.lines[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in KINDS if name not in APART])
def test_any_part_trains_with_the_same_bits_and_the_rest_is_planned(name: str, way: Way) -> None:
    check(way, outcome_of(name, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["on_meta", "faked", "sparse", "opaque", "func_grad"])
def test_no_part_keeps_its_step_alive(name: str, way: Way) -> None:
    """An op that saves its own result would hold itself through what a hook returns."""
    model, rows = Sandwich(KINDS[name]), torch.randn(ROWS, WIDTH)
    profile = quick_profile(lambda: model(rows), model)
    with apply_plan(tight_plan(profile, all_of(profile, way)), model) as run:  # type: ignore[arg-type]
        for _ in range(2):
            with run.forward_region():
                loss = model(rows)
            loss.backward()
            del loss
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Step]


def test_what_cannot_be_replayed_is_refused_by_operator_and_module() -> None:
    model, rows = Sandwich(KINDS["quantized"]), torch.randn(ROWS, WIDTH)
    profile = pooch.profile(lambda: model(rows), model)
    with pytest.raises(pooch.errors.UsageError, match=r"aten\.dequantize.* in module 'part'"):
        pooch.plan_from_decisions(profile, {value.id: "recompute" for value in profile.activations})

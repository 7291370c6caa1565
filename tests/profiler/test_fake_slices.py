"""Steps whose loss runs in slices, profiled without running them: as the measured profile has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pooch.api.applying import apply
from pooch.api.batch_search.results import Sizes
from pooch.api.batch_search.search import largest_size
from pooch.api.modelled_ranks import RanksOptions
from pooch.api.options import PlanOptions
from pooch.api.planning import plan
from pooch.api.profiling import profile, profile_workload
from pooch.api.smallest import smallest_budget
from pooch.devices import find_device
from pooch.errors import InfeasibleBudget, PlanMismatch
from pooch.ir import Profile
from pooch.profiler.fake import modelled
from pooch.published.methods import find_method
from pooch.torchtools import split
from pooch.workloads import Workload

ROWS, WIDTH, CLASSES = 520, 32, 3000
LOGITS_BYTES = ROWS * CLASSES * 4
M40 = find_device("M40")
Loss = Callable[[Tensor, Tensor], Tensor]


def _weighted(logits: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.1, 1.0, CLASSES)
    return functional.cross_entropy(logits, target, weight)


def _each(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, reduction="none", ignore_index=3).sum()


def _smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, label_smoothing=0.1)


def _workload(rows: int = ROWS, loss: Loss = functional.cross_entropy) -> Workload:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
    model = nn.Sequential(body, nn.Linear(WIDTH, CLASSES, bias=False))
    features, target = torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model, lambda: loss(model(features), target), optimizer, batch_size=rows)


def _fake(workload: Workload | None = None) -> Profile:
    return profile_workload(workload or _workload(), mode="fake")


def _modelled(workload: Workload | None = None) -> Profile:
    return profile_workload(workload or _workload(), device_model=M40)


def _variant(profile: Profile) -> Profile:
    found = profile.in_slices
    assert found is not None, profile.notes
    return found


@pytest.mark.parametrize("loss", [functional.cross_entropy, _weighted, _each])
def test_the_step_in_slices_takes_the_bytes_that_were_measured(loss: Loss) -> None:
    # With weights, a loss of more rows than an eighth of the classes stays whole.
    workload = _workload(CLASSES // 8 if loss is _weighted else ROWS, loss)
    measured = _variant(profile_workload(workload, mode="run"))
    fake = _variant(_fake(workload))
    assert [(op.name, op.entry_bytes, op.peak_bytes) for op in fake.ops] == [
        (op.name, op.entry_bytes, op.peak_bytes) for op in measured.ops
    ]
    assert [value.size_bytes for value in fake.values] == [value.size_bytes for value in measured.values]
    (one,), (other,) = fake.splits, measured.splits
    assert (one.op, one.fingerprint, one.rows, one.slices) == (other.op, other.fingerprint, other.rows, other.slices)
    assert (one.whole_peak_bytes, one.peak_bytes) == (other.whole_peak_bytes, other.peak_bytes)


@pytest.mark.parametrize("loss", [functional.cross_entropy, _each])
def test_a_modelled_step_in_slices_takes_what_was_measured(loss: Loss) -> None:
    measured, found = profile_workload(_workload(loss=loss), mode="run"), _modelled(_workload(loss=loss))
    (one,), (other,) = _variant(found).splits, _variant(measured).splits
    more_bytes = found.ops[0].entry_bytes - measured.ops[0].entry_bytes  # workspaces, and parameters rounded up
    assert one.peak_bytes - more_bytes == pytest.approx(other.peak_bytes, rel=0.01)
    assert one.whole_peak_bytes - more_bytes == pytest.approx(other.whole_peak_bytes, rel=0.01)
    assert _variant(found).peak_bytes - more_bytes == pytest.approx(_variant(measured).peak_bytes, rel=0.01)
    least, before = smallest_budget(found, region="step"), smallest_budget(measured, region="step")
    assert least - more_bytes == pytest.approx(before, rel=0.01)


def test_the_time_of_a_modelled_loss_in_slices_is_that_of_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    (short,) = _variant(_modelled()).splits
    assert short.slices == 8
    assert short.rows * 8 == ROWS
    (uneven,) = _variant(_modelled(_workload(ROWS - 1))).splits
    monkeypatch.setattr(modelled._Parts, "distinct", lambda parts, slices: slices)
    for known, rows in ((short, ROWS), (uneven, ROWS - 1)):
        (each,) = _variant(_modelled(_workload(rows))).splits
        assert known.time_ms == pytest.approx(each.time_ms, rel=1e-9)
        assert known.peak_bytes == each.peak_bytes


def test_modelled_searches_go_further_in_slices() -> None:
    def profile_at(size: int) -> Profile:
        return _modelled(_workload(size))

    sizes, budget = Sizes("batch_size", smallest=512, step=256), 120 * 2**20
    options = PlanOptions(region="step")
    further = largest_size(profile_at, sizes, budget, options, start=1000, points=2)
    whole = largest_size(lambda n: find_method("ilp").sees(profile_at(n)), sizes, budget, options, start=1000, points=2)
    assert further.largest.plan.splits
    assert not whole.largest.plan.splits
    assert further.largest.size > 1.5 * whole.largest.size


def test_without_slices_the_same_budget_is_refused() -> None:
    found = _modelled()
    whole = find_method("ilp").sees(found)
    assert find_method("ilp_loss_in_slices").sees(found) is found
    least = smallest_budget(found, region="step")
    assert smallest_budget(whole, region="step") - least >= 1.5 * LOGITS_BYTES
    with pytest.raises(InfeasibleBudget):
        plan(whole, least, region="step")
    assert plan(found, least, region="step").splits


def test_a_plan_whose_bits_were_not_compared_is_not_applied() -> None:
    workload = _workload()
    found = _modelled(workload)
    chosen = replace(plan(found, smallest_budget(found, region="step"), region="step"), device_kind="cpu")
    with pytest.raises(PlanMismatch, match="the bits of both ways could not be compared: profile on this device"):
        apply(chosen, workload.model)
    assert all(each.compared for each in _variant(_fake(workload)).splits)


def test_other_bits_are_refused_on_this_device_and_not_asked_for_on_a_modelled_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def differs(logits: Tensor, *arguments: object) -> str:
        asked.append(type(logits) is Tensor and logits.std().item() > 0.5)
        return "the gradient"

    monkeypatch.setattr(split, "difference_from_plain", differs)
    workload = _workload()
    state = torch.get_rng_state()
    found = _fake(workload)
    assert found.split is None
    assert any("the gradient would have other bits" in note for note in found.notes)
    assert _modelled(workload).split is not None
    assert asked == [True]
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_cannot_run_in_slices_stays_whole_with_a_note() -> None:
    for found in (_fake(_workload(loss=_smoothed)), _modelled(_workload(loss=_smoothed))):
        assert found.split is None
        assert any("label smoothing adds up all classes" in note for note in found.notes)


def test_a_small_loss_takes_no_passes_of_its_own() -> None:
    calls: list[None] = []
    workload = _workload(64)

    def forward() -> Tensor:
        calls.append(None)
        return workload.forward()

    assert profile(forward, workload.model, mode="fake").split is None
    assert len(calls) == 2


def test_modelled_ranks_have_no_step_in_slices() -> None:
    ranks = RanksOptions(2, "ddp", link_gb_per_s=10.0)
    assert profile_workload(_workload(), device_model=M40, ranks=ranks).split is None

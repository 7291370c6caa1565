"""Steps whose loss runs in slices: profiled, planned, and trained bitwise within the predicted peak."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pooch.api import split_profiling
from pooch.api.measure.training import first_difference, train_steps
from pooch.api.planning import plan
from pooch.api.profiling import profile
from pooch.api.simulation import simulate
from pooch.api.smallest import smallest_budget
from pooch.api.split_profiling import with_split
from pooch.errors import InfeasibleBudget, PlanMismatch
from pooch.executor import apply_plan
from pooch.ir import Choice, Plan, Profile
from pooch.profiler import ProfileOptions
from pooch.workloads import Workload
from tests.executor.support import all_of, quick_profile, tight_plan

ROWS, WIDTH, CLASSES = 256, 32, 600
LOGITS_BYTES = ROWS * CLASSES * 4


class _Model(nn.Module):
    """Two layers and a head; computes the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.held: list[Tensor] = []
        self.holds = False
        self.reads = ""

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        logits = self.head(self.body(features))
        self.held = [logits] if self.holds else []
        if self.reads == "its result":
            logits = torch.tanh(logits)
        if self.reads == "for a replay":
            squashed = functional.gelu(logits)
            return 1e-4 * (squashed * squashed).sum() + functional.cross_entropy(logits, target)
        return functional.cross_entropy(logits, target)


def _workload(rows: int = ROWS, holds: bool = False, reads: str = "") -> Workload:
    torch.manual_seed(0)
    model = _Model()
    model.holds, model.reads = holds, reads
    features, target = torch.randn(rows, WIDTH), torch.randint(0, CLASSES, (rows,))
    return Workload(model, lambda: model(features, target), torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture(autouse=True)
def _small_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_profiling, "SMALLEST_INPUT_BYTES", LOGITS_BYTES)


def _profile(workload: Workload | None = None, mode: str = "run") -> Profile:
    workload = workload or _workload()
    plain = quick_profile(workload.forward, workload.model, workload.optimizer, mode)
    return with_split(plain, workload, ProfileOptions(), lambda text: None)


def _variant(profile: Profile) -> Profile:
    found = profile.in_slices
    assert found is not None, profile.notes
    return found


@pytest.mark.parametrize("mode", ["run", "offload"])
def test_the_step_in_slices_holds_the_logits_once(mode: str) -> None:
    profile = _profile(mode=mode)
    (split,) = _variant(profile).splits
    assert split.input_bytes == LOGITS_BYTES
    assert split.slices == -(-ROWS // split.rows) >= 8
    assert split.whole_peak_bytes - split.peak_bytes >= 1.7 * LOGITS_BYTES
    op = _variant(profile).ops[split.op]
    assert op.name == "pooch_split.cross_entropy.default"
    assert [op.name for op in _variant(profile).ops].count("pooch_split::cross_entropy_backward") == 1


def _trained(chosen: Plan, **options: Any) -> None:
    """Train plainly and under the plan, and compare bits and peaks."""
    plain = train_steps(_workload(**options), None, 2, lambda text: None)
    planned = train_steps(_workload(**options), chosen, 2, lambda text: None)
    assert first_difference(plain, planned) is None
    assert planned.stats is not None
    assert (planned.stats.mismatches, planned.stats.late_swaps) == (0, 0)
    if not options.get("holds"):  # else the profile may count what the program held of an earlier step
        assert planned.peak_bytes == chosen.predicted_peak_bytes


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
def test_steps_in_slices_are_bitwise_and_take_what_is_predicted(choice: Choice) -> None:
    variant = _variant(_profile())
    chosen = tight_plan(variant, all_of(variant, choice))
    assert chosen.splits == variant.splits
    of_logits = [d.choice for d in chosen.choices if d.size_bytes == LOGITS_BYTES]
    assert of_logits == [choice]
    _trained(chosen)


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
def test_what_a_profile_with_fake_tensors_predicts_is_taken(choice: Choice) -> None:
    variant = _fake_variant()
    chosen = tight_plan(variant, all_of(variant, choice))
    assert chosen.splits == variant.splits
    _trained(chosen)


def _fake_variant() -> Profile:
    workload = _workload()
    return _variant(profile(workload.forward, workload.model, workload.optimizer, mode="fake"))


@pytest.mark.parametrize("decided", ["swap", "recompute", "swap logits, recompute", "keep logits, recompute"])
@pytest.mark.parametrize("reads", ["its result", "for a replay"])
def test_logits_that_are_read_after_the_loss_are_not_written_over(reads: str, decided: str) -> None:
    variant = _variant(_profile(_workload(reads=reads)))
    of_logits, _, of_others = decided.partition(" logits, ")
    decisions = all_of(variant, of_others or of_logits)  # type: ignore[arg-type]
    (logits,) = {values[0] for values in [variant.ops[variant.splits[0].op].reads]}
    decisions[logits] = of_logits  # type: ignore[assignment]
    chosen = tight_plan(variant, decisions)
    plain = train_steps(_workload(reads=reads), None, 2, lambda text: None)
    planned = train_steps(_workload(reads=reads), chosen, 2, lambda text: None)
    assert first_difference(plain, planned) is None
    assert planned.stats is not None
    assert planned.stats.mismatches == 0
    assert planned.peak_bytes <= chosen.predicted_peak_bytes


@pytest.mark.parametrize("choice", ["keep", "swap"])
def test_logits_that_the_program_holds_are_right_after_the_step(choice: Choice) -> None:
    variant = _variant(_profile(_workload(holds=True)))
    chosen = tight_plan(variant, all_of(variant, choice))
    _trained(chosen, holds=True)
    workload, twin = _workload(holds=True), _workload(holds=True)
    with apply_plan(chosen, workload.model, measure_every=None) as run:
        with run.step():
            loss = workload.forward()
        loss.backward()
    twin.forward().backward()
    assert torch.equal(workload.model.held[0], twin.model.held[0])  # type: ignore[index]


def test_logits_held_only_under_the_plan_are_not_written_over() -> None:
    variant = _variant(_profile())
    workload, twin = _workload(holds=True), _workload(holds=True)
    for choice in ("keep", "swap", "recompute"):
        chosen = tight_plan(variant, all_of(variant, choice))  # type: ignore[arg-type]
        with apply_plan(chosen, workload.model, measure_every=None) as run:
            with run.step():
                loss = workload.forward()
            loss.backward()
        twin.forward().backward()
        assert torch.equal(workload.model.held[0], twin.model.held[0])  # type: ignore[index]
        assert all(torch.equal(a.grad, b.grad) for a, b in _gradients(workload, twin))


def _gradients(first: Workload, second: Workload) -> list[tuple[Tensor, Tensor]]:
    return list(zip(first.model.parameters(), second.model.parameters(), strict=True))


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
def test_a_second_backward_pass_of_a_planned_step_is_right(choice: Choice) -> None:
    variant = _variant(_profile())
    chosen = tight_plan(variant, all_of(variant, choice))
    workload, twin = _workload(), _workload()
    with apply_plan(chosen, workload.model, measure_every=None) as run:
        with run.step():
            loss = workload.forward()
        loss.backward(retain_graph=True)
        loss.backward()
    again = twin.forward()
    again.backward(retain_graph=True)
    again.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in _gradients(workload, twin))


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_another_shape_runs_whole_and_one_line_says_so(choice: Choice) -> None:
    variant = _variant(_profile())
    chosen = tight_plan(variant, all_of(variant, choice))
    workload, twin = _workload(rows=ROWS - 1), _workload(rows=ROWS - 1)
    with apply_plan(chosen, workload.model, measure_every=None) as run, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with run.step():
                loss = workload.forward()
            loss.backward()
    for _ in range(2):
        twin.forward().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in _gradients(workload, twin))
    expected = "the loss ran whole" if choice == "keep" else "left the planned path"
    assert [expected in str(each.message) for each in told] == [True]


def test_without_the_choice_the_same_budget_is_refused() -> None:
    profile = _profile()
    whole = replace(profile, split=None)
    least, most = smallest_budget(profile, region="step"), smallest_budget(whole, region="step")
    assert most - least >= 1.7 * LOGITS_BYTES
    with pytest.raises(InfeasibleBudget):
        plan(whole, least, region="step")
    chosen = plan(profile, least, region="step")
    assert "whole, the step needs at least" in chosen.splits[0].reason
    assert chosen.in_core_peak_bytes == profile.peak_bytes
    assert simulate(profile, chosen).peak_bytes <= least
    _trained(chosen)
    with pytest.raises(InfeasibleBudget) as refused:
        plan(profile, least - 1, region="step")
    assert refused.value.minimum_bytes == least


def test_the_faster_of_both_is_the_plan_and_its_bound_holds_for_both() -> None:
    profile = _profile()
    whole = replace(_timed(profile, 1.0), split=None)
    budget = (smallest_budget(whole, region="step") + profile.peak_bytes) // 2
    plain, kept = plan(whole, budget, region="step"), plan(_timed(profile, 1000.0), budget, region="step")
    assert not kept.splits
    assert kept.decisions == plain.decisions
    assert kept.lower_bound_ms <= plain.lower_bound_ms
    in_slices = plan(_timed(profile, 0.1), budget, region="step")
    assert in_slices.splits
    assert in_slices.predicted_step_ms < plain.predicted_step_ms
    assert in_slices.lower_bound_ms <= plain.lower_bound_ms
    assert "whole, the step would take" in in_slices.splits[0].reason


def _timed(profile: Profile, split_ms: float) -> Profile:
    """The profile with ops of 1 ms each, but for the loss in slices."""
    variant = _variant(profile)
    special = {variant.splits[0].op: split_ms}

    def timed(each: Profile, times_ms: dict[int, float]) -> Profile:
        ops = tuple(replace(op, time_ms=times_ms.get(op.index, 1.0)) for op in each.ops)
        return replace(each, ops=ops, step_ms=sum(op.time_ms for op in ops))

    return replace(timed(profile, {}), split=timed(variant, special))


def test_a_budget_in_which_everything_fits_leaves_the_loss_whole() -> None:
    profile = _profile()
    assert not plan(profile, "100%", region="step").splits


def test_published_policies_do_not_know_of_slices() -> None:
    profile = _profile()
    assert not plan(profile, "100%", policy="swap_all", region="step").splits


def test_a_plan_of_the_model_has_slices_only_if_the_loss_is_part_of_the_model() -> None:
    inside = _profile()
    assert plan(inside, smallest_budget(inside)).splits
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, CLASSES, bias=False), torch.randn(ROWS, WIDTH)
    target = torch.randint(0, CLASSES, (ROWS,))
    outside = _profile(Workload(head, lambda: functional.cross_entropy(head(hidden), target)))
    assert _variant(outside).splits
    assert not plan(outside, smallest_budget(outside)).splits


def test_profiles_and_plans_keep_their_slices_in_files(tmp_path: Path) -> None:
    profile = _profile()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    chosen = plan(profile, "min", region="step")
    chosen.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").splits == chosen.splits
    with pytest.raises(PlanMismatch):
        simulate(replace(profile, split=None), chosen)


def test_other_bits_are_refused_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from pooch.torchtools import split

    monkeypatch.setattr(split, "difference_from_plain", lambda *arguments: "the gradient")
    profile = _profile()
    assert profile.split is None
    assert any("the gradient would have other bits" in note for note in profile.notes)


def _failing(workload: Workload) -> Callable[[], Tensor]:
    """A forward pass that does not run in slices."""

    def forward() -> Tensor:
        loss = workload.forward()
        if loss.grad_fn is not None and "Split" in type(loss.grad_fn).__name__:
            raise RuntimeError("no slices here")
        return loss

    return forward


def test_a_step_that_does_not_run_in_slices_stays_whole_with_a_note() -> None:
    workload = _workload()
    profile = _profile(replace(workload, forward=_failing(workload)))
    assert profile.split is None
    assert any("no slices here" in note for note in profile.notes)


def test_profiling_leaves_gradients_and_random_numbers_alone() -> None:
    workload = _workload()
    before = torch.get_rng_state()
    _profile(workload)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_an_error_of_a_forward_pass_without_gradients_leaves_the_step_whole() -> None:
    workload = _workload()

    def forward() -> Tensor:
        if not torch.is_grad_enabled():
            raise ValueError("only for training")
        return workload.forward()

    profile = _profile(replace(workload, forward=forward))
    assert profile.split is None
    assert any("only for training" in note for note in profile.notes)


def test_processes_that_train_together_run_no_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = _workload()
    plain = quick_profile(workload.forward, workload.model, workload.optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert with_split(plain, workload, ProfileOptions(), lambda text: None) is plain

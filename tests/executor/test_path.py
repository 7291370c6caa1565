"""A step that leaves the profiled path is told once, counted, and right all the same."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pooch.errors import InvalidSchedule, PlanMismatch, TierError, UsageError
from pooch.executor import Run, apply_plan
from pooch.executor.table import OnMismatch
from pooch.executor.verification import Verify
from pooch.ir import Choice, Plan
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, mixed, profile_job, quick_profile, tight_plan, without_reads

pytestmark = pytest.mark.usefixtures("watched_by")


class Branching(nn.Module):
    """Takes another branch, or another depth, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.branch = "profiled"

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            rows = layer(rows)
            rows = rows.sigmoid() if self.branch == "other" and number == 2 else rows.tanh()
            if self.branch == "short" and number == 2:
                break
        if self.branch == "long":
            rows = rows.exp()
        return rows.sum() if self.branch != "dtype" else rows.double().sum()


def plan_of(model: nn.Module, choice: str) -> Plan:
    rows = torch.rand(4, 8)
    profile = quick_profile(lambda: model(rows), model)
    decisions = mixed(profile) if choice == "mixed" else all_of(profile, choice)  # type: ignore[arg-type]
    plan = tight_plan(profile, decisions)
    assert plan.schedule.actions
    return plan


def planned(choice: str, **options: str) -> tuple[Branching, Run]:
    torch.manual_seed(0)
    model = Branching()
    return model, apply_plan(plan_of(model, choice), model, **options)  # type: ignore[arg-type]


def step(model: nn.Module, run: Run, size: int, *, is_all_within: bool = False) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    rows = torch.rand(size, 8)
    with run.step():
        loss = model(rows)
        if is_all_within:
            loss.backward()
    if not is_all_within:
        loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None} | {"loss": loss.detach()}


def assert_as_plain(model: nn.Module, run: Run) -> None:
    """The next step has the bits of plain training."""
    with run.paused():
        plain = step(model, run, 4)
    assert_same(plain, step(model, run, 4))


@pytest.mark.parametrize("choice", ["swap", "recompute", "mixed"])
@pytest.mark.parametrize("branch", ["other", "short", "long", "dtype", "profiled"])
def test_another_branch_or_shape(branch: str, choice: str) -> None:
    model, run = planned(choice)
    model.branch = branch
    size = 4 if branch != "profiled" else 5
    with run.paused():
        plain = step(model, run, size)
    with pytest.warns(UserWarning, match="left the planned path at op") as caught:
        actual = step(model, run, size)
    assert run.stats.mismatches == 1
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "expected" in text
    assert "got" in text
    assert "\n" not in text
    assert_same(plain, actual)
    model.branch = "profiled"
    with run.paused():
        plain = step(model, run, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(plain, step(model, run, 4))  # the next step may be on the path again
    assert run.stats.mismatches == run.stats.late_swaps == 0
    run.remove()


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_what_the_schedule_no_longer_brings_back_is_counted_as_late(choice: str) -> None:
    """Off the path nothing is brought back ahead of its read: each value that is away is, once, when it is read."""
    model, run = planned(choice)
    step(model, run, 4)
    assert run.stats.late_swaps == 0
    model.branch = "long"  # leaves the path after its last op
    with pytest.warns(UserWarning, match="left the planned path"):
        step(model, run, 4)
    schedule = run.plan.schedule
    assert run.stats.late_swaps == len(schedule.swapped if choice == "swap" else schedule.recomputed) > 0
    run.remove()


def test_the_warning_comes_once() -> None:
    model, run = planned("swap")
    with pytest.warns(UserWarning, match="left the planned path"):
        step(model, run, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, run, 5)
    assert run.stats.mismatches == 1
    run.remove()


def test_each_kind_of_leaving_the_path_is_told_once_with_both_ops() -> None:
    model, run = planned("swap")
    told: list[str] = []
    for branch, size in [("other", 4), ("short", 4), ("profiled", 5), ("other", 4), ("profiled", 6), ("long", 4)] * 2:
        model.branch = branch
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, run, size)
        told += [str(each.message) for each in caught]
    model.branch = "profiled"
    step(model, run, 4)
    pairs = [
        ("expected aten.tanh.default(float32[4,8]), got aten.sigmoid.default(float32[4,8])"),
        ("expected aten.addmm.default(float32[4,8]), got aten.sum.default(float32[])"),
        ("expected aten.addmm.default(float32[4,8]), got aten.addmm.default(float32[5,8])"),
        ("expected aten.sum.default(float32[]), got aten.exp.default(float32[4,8])"),
    ]
    assert len(told) == len(pairs)
    for text, pair in zip(told, pairs, strict=True):
        assert pair in text
    assert run.totals.steps == 13
    assert run.totals.steps_off_path == 12
    assert run.stats.mismatches == 0
    run.remove()


def test_a_backward_pass_within_the_region_is_told_as_such() -> None:
    model, run = planned("mixed")
    with run.paused():
        plain = step(model, run, 4)
    with pytest.warns(UserWarning, match=r"end `with run.step\(\):` before loss.backward\(\)") as caught:
        assert_same(plain, step(model, run, 4, is_all_within=True))
    assert "profile and plan again" not in str(caught[0].message)
    model.branch = "long"
    with pytest.warns(UserWarning, match="profile and plan again to follow the new path"):
        step(model, run, 4)
    run.remove()


def test_a_mismatch_may_be_an_error() -> None:
    model, run = planned("recompute", on_mismatch="error")
    with pytest.raises(PlanMismatch, match="left the planned path at op"):
        step(model, run, 5)
    assert_same(*[step(model, run, 4) for _ in range(2)])
    run.remove()


def test_a_plan_for_another_model_is_refused() -> None:
    job = make_job("conv")
    plan = tight_plan(profile_job(job), {})
    with pytest.raises(PlanMismatch, match="another model") as caught:
        apply_plan(plan, make_job("unet").model)
    assert "\n" not in str(caught.value)
    for parameter in job.model.head.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    with pytest.raises(PlanMismatch, match="another model"):
        apply_plan(plan, job.model)


def _swapping(job_kind: str, region: str = "model") -> tuple[nn.Module, Plan]:
    job = make_job(job_kind)
    profile = profile_job(job)
    choice: Choice = "swap"
    return job.model, tight_plan(profile, all_of(profile, choice, region), region)  # type: ignore[arg-type]


def test_an_unknown_option_and_a_wrong_region_are_usage_errors() -> None:
    model, plan = _swapping("conv")
    with pytest.raises(UsageError, match="on_mismatch"):
        apply_plan(plan, model, on_mismatch="ignore")  # type: ignore[arg-type]
    with apply_plan(plan, model) as run, pytest.raises(UsageError, match="region='step'"), run.step():
        pass


def test_a_plan_of_a_step_that_nobody_marks_says_so_once() -> None:
    model, plan = _swapping("conv", "step")
    with apply_plan(plan, model):
        with pytest.warns(UserWarning, match="outside of `with run.step"):
            model(torch.rand(2, 3, 8, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.rand(2, 3, 8, 8))


def test_a_removed_run_does_not_step() -> None:
    model, plan = _swapping("conv", "step")
    run = apply_plan(plan, model)
    run.remove()
    run.remove()
    with pytest.raises(UsageError, match="taken off"), run.step():
        pass


@pytest.mark.cpu
def test_a_directory_that_is_missing_is_told_when_the_plan_is_applied() -> None:
    model, plan = _swapping("conv")
    with pytest.raises(TierError, match="/no/such/place") as caught:
        apply_plan(plan, model, spill_directory="/no/such/place")
    assert "\n" not in str(caught.value)
    assert "forward" not in vars(model)


class WritesBehind(nn.Module):
    """Writes over its first activation without autograd's knowledge, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.writes = False

    def forward(self, rows: Tensor) -> Tensor:
        first = self.first(rows).tanh()
        second = self.second(first).tanh()
        if self.writes:
            first.data.mul_(2)
        return self.third(second).sum()


def written_over_behind(choices: tuple[Choice, Choice], verify: Verify) -> None:
    """What autograd saved is written over while it is away, or before it is computed from again."""
    torch.manual_seed(0)
    model = WritesBehind()
    rows = torch.rand(4, 8)
    profile = quick_profile(lambda: model(rows), model)
    first, second = (value.id for value in profile.activations)
    plan = tight_plan(profile, dict(zip((first, second), choices, strict=True)))
    is_replayed = "recompute" in choices
    assert plan.schedule.sources == ((first,) if is_replayed else ())
    with apply_plan(plan, model, verify=verify) as run:
        step(model, run, 4)
        assert run.stats.recomputed_ops == (2 if is_replayed else 0)
        assert (run.stats.swapped_in_bytes > 0) != is_replayed
        model.writes = True
        assert_as_plain(model, run)


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("verify", ["off", "first"])
@pytest.mark.parametrize("choices", [("keep", "recompute"), ("swap", "swap")])
def test_what_was_written_over_is_read_as_plain_training_reads_it(
    choices: tuple[Choice, Choice], verify: Verify
) -> None:
    """Autograd does not notice a write through `.data`, and reads what is there then. Replays read what was there."""
    written_over_behind(choices, verify)


class WritesOneBehind(nn.Module):
    """Writes over one element of what autograd has saved and of what replays read, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.writes = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), False

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(rows).sigmoid()
            made = hidden.exp()
            if self.writes and number == 1:
                hidden.data[0, 0] = 0.9
            rows = made.sin() * hidden
        return rows.sum()


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("verify", ["off", "first"])
@pytest.mark.parametrize("kind", ["recompute", "mixed"])
@pytest.mark.parametrize("says_reads", [True, False])
def test_replays_read_what_autograd_has_saved_too_as_it_was(kind: str, verify: Verify, says_reads: bool) -> None:
    """A sample may miss one element, so a replay that read what was written gave wrong gradients without a word."""
    torch.manual_seed(0)
    model = WritesOneBehind()
    plan = plan_of(model, kind)
    if not says_reads:
        plan = without_reads(plan)
    with apply_plan(plan, model, verify=verify) as run:
        for writes in (False, False, False, False, True, False, True):
            model.writes = writes
            assert_as_plain(model, run)
            assert run.stats.mismatches == writes
    assert not run.verified.differences


@pytest.mark.parametrize("on_mismatch", ["warn", "error"])
def test_a_value_larger_than_its_room_in_the_tier_is_not_copied_there(on_mismatch: OnMismatch) -> None:
    torch.manual_seed(0)
    model = Branching()
    rows = torch.rand(4, 8)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "swap"))
    small = replace(plan, choices=tuple(replace(choice, size_bytes=1) for choice in plan.choices))
    with apply_plan(small, model, on_mismatch=on_mismatch) as run:
        with run.paused():
            plain = step(model, run, 4)
        if on_mismatch == "error":
            with pytest.raises(PlanMismatch, match=r"has room for 1 of them in the tier: profile and plan"):
                step(model, run, 4)
            return
        with pytest.warns(UserWarning, match=r"has room for 1 of them in the tier\)"):
            assert_same(plain, step(model, run, 4))
        assert run.stats.mismatches == 1


class MakesNothing(nn.Module):
    """Runs an op that gives no bytes before each one of its name, on what that one does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(rows)
            gate, shape = hidden.sigmoid(), torch.empty_like(hidden, device="meta").add_(1)
            assert (shape * shape).shape == hidden.shape
            rows = (hidden * gate).exp().tanh()
        return rows.sum()


@pytest.mark.parametrize("kind", ["recompute", "mixed"])
def test_an_op_that_makes_nothing_is_not_taken_for_the_next_one_of_its_name(kind: str) -> None:
    torch.manual_seed(0)
    model = MakesNothing()
    plan = plan_of(model, kind)
    with apply_plan(plan, model, on_mismatch="error") as run:
        for _ in range(5):
            assert_as_plain(model, run)
            assert run.stats.mismatches == 0 < run.stats.recomputed_ops


class Rewired(nn.Module):
    """Runs the same ops in each step. What some of them read or write is another value when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.turn = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), 0

    def forward(self, rows: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden = layer(rows)
            pair = hidden * 2, hidden * 3
            pair[(self.turn + number) % 2].add_(1)
            rows = pair[0].sigmoid() + pair[(self.turn + number) // 2 % 2].tanh()
        return rows.sum()


@pytest.mark.parametrize("kind", ["recompute", "mixed"])
def test_the_same_ops_on_other_values(kind: str) -> None:
    """What replays would read, the plan neither holds nor makes: the step goes on without it before they are to."""
    torch.manual_seed(0)
    model = Rewired()
    plan = plan_of(model, kind)
    with apply_plan(plan, model) as run, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = 0
        for turn in (0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3):
            model.turn = turn
            assert_as_plain(model, run)
            left += run.stats.mismatches
    told = [str(each.message) for each in caught if "left the planned path" in str(each.message)]
    assert left == 6
    assert len(set(told)) == len(told) == 2
    for text, op in zip(told, ("add_", "tanh"), strict=True):
        assert f"expected aten.{op}" in text
        assert "on the values that it had when planned, got aten." in text


def test_a_plan_that_cannot_be_executed_is_not_applied() -> None:
    torch.manual_seed(0)
    model = Branching()
    rows = torch.rand(4, 8)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "swap"))
    rooms = tuple((value, 0) for value, _ in plan.schedule.host_offsets)
    shared = replace(plan, schedule=replace(plan.schedule, host_offsets=rooms))
    with pytest.raises(InvalidSchedule, match="overlap in the tier"):
        apply_plan(shared, model)
    assert "forward" not in vars(model)

"""Ops in place: a saved tensor that one of them changes raises what plain training raises, whatever the plan does with
it, and a replay of one changes nothing that somebody else reads.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pooch.api.measure.training import first_difference, train_steps
from pooch.executor import apply_plan
from pooch.executor.verification import PROOFS
from pooch.ir import Choice, Region
from pooch.workloads import Workload
from tests.executor.support import all_of, is_same, quick_profile, region_of, tight_plan, without_reads

pytestmark = pytest.mark.usefixtures("watched_by")

MESSAGE = "modified by an inplace operation"


class Saves(nn.Module):
    """Saves the result of its exp; `inside`: changes it in place in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.inside = False

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        first = (rows @ self.weight).exp()
        later = first * 3
        if self.inside:
            first.mul_(2)
        return later.sin().sum(), first


def run_it(choice: Choice, region: Region, inside: bool, outside: bool) -> None:
    torch.manual_seed(0)
    model, rows = Saves(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows)[0], model)
    decisions = all_of(profile, choice, region)
    assert decisions
    model.inside = inside
    with apply_plan(tight_plan(profile, decisions, region), model) as run:
        with region_of(run):
            loss, first = model(rows)
        if outside:
            with torch.no_grad():
                first.add_(1)
        assert run.stats.swapped_out_bytes > 0 or choice != "swap"
        try:
            loss.backward()
        finally:
            assert run.stats.recomputed_ops > 0 or choice != "recompute"


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("region", ["model", "step"])
@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
@pytest.mark.parametrize(("inside", "outside"), [(True, False), (False, True)])
def test_it_raises_as_plain_training_does(choice: Choice, region: Region, inside: bool, outside: bool) -> None:
    with pytest.raises(RuntimeError, match=MESSAGE):
        run_it(choice, region, inside, outside)


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
def test_it_does_not_raise_without_a_change(choice: Choice) -> None:
    run_it(choice, "model", False, False)


def test_a_parameter_changed_before_the_replay_raises() -> None:
    """A replay reads parameters; plain training would not have noticed, but its numbers would be of the old ones."""
    torch.manual_seed(0)
    model, rows = Saves(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows)[0], model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    assert plan.schedule.recomputed
    with apply_plan(plan, model, verify="off") as run:  # with a copy, there is no need to replay
        loss, first = model(rows)
        del first
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            loss.backward()
        model(rows)[0].backward()
        assert run.stats.recomputed_ops > 0  # unless a parameter changes in between


class SavesTwice(nn.Module):
    """Saves the results of two ops; the second one is given out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.inside = False

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        kept = (rows @ self.weight).exp().sin().exp()
        loss = kept.cos().sum()
        if self.inside:
            kept.mul_(2)
        return loss, kept


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("others", ["swap", "recompute"])
def test_a_kept_value_that_is_changed_beside_moved_ones_raises_too(others: Choice, inside: bool) -> None:
    """PyTorch's own check is off once anything has hooks."""
    torch.manual_seed(0)
    model, rows = SavesTwice(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows)[0], model)
    decisions = all_of(profile, others, "model")
    decisions[max(decisions)] = "keep"  # what is given out
    plan = tight_plan(profile, decisions, "model")
    model.inside = inside
    with apply_plan(plan, model) as run:
        loss, kept = model(rows)
        if not inside:
            with torch.no_grad():
                kept.add_(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            loss.backward()
        model.inside = False
        model(rows)[0].backward()
        assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0


class WritesIntoEither(nn.Module):
    """Writes into another tensor of the same shape when told to, which is then not saved: the ops stay the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.other = False

    def forward(self, rows: Tensor) -> Tensor:
        hidden = (rows @ self.weight).sin()
        spare, value = hidden * 2, hidden.cos()
        read_before = (value * 2).exp()
        saved = (value.detach() if self.other else value).sin()
        written = (value if self.other else spare).mul_(3)
        return read_before.sum() + saved.sum() + written.sin().sum()


class ReadsBeforeItWrites(nn.Module):
    """A value that is made again reads another one before and after it is written over; `longer`: off the path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.longer = False

    def forward(self, rows: Tensor) -> Tensor:
        value = (rows @ self.weight).sin() * 2
        read_before = value * 5
        value.mul_(3)
        loss = (value + read_before).sin().sum()
        return loss * 1 if self.longer else loss


def gradient(model: WritesIntoEither | ReadsBeforeItWrites | ChangesWhatItHolds, rows: Tensor) -> Tensor:
    model.weight.grad = None
    model(rows).backward()
    assert model.weight.grad is not None
    return model.weight.grad


@pytest.mark.parametrize("of_value", ["swap", "recompute"])
@pytest.mark.parametrize("other", [False, True])
def test_a_replay_writes_into_nothing_that_a_later_one_reads(other: bool, of_value: Choice) -> None:
    """The plan knows which value its own step writes over, but a step with the same ops may write over another one."""
    torch.manual_seed(0)
    model, rows = WritesIntoEither(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows), model)
    decisions = all_of(profile, "recompute", "model")
    (value,) = [each.id for each in profile.values if each.label.endswith("cos")]
    decisions[value] = of_value
    model.other = other
    plain = gradient(model, rows)
    plan = tight_plan(profile, decisions, "model")
    with apply_plan(without_reads(plan) if other else plan, model, on_mismatch="error") as run:
        for _ in range(PROOFS + 3):  # by then the native watch replays by itself
            assert is_same(plain, gradient(model, rows))
            assert run.stats.recomputed_ops > 0
        assert not run.verified.differences, "they would have been made up for"


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("longer", [False, True])
def test_what_is_made_again_late_is_made_of_contents_before_and_after_a_write(longer: bool) -> None:
    """Off the path replays run in the order in which their results are needed, not in that of the forward pass."""
    torch.manual_seed(0)
    model, rows = ReadsBeforeItWrites(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows), model)
    model.longer = longer
    plain = gradient(model, rows)
    with apply_plan(tight_plan(profile, all_of(profile, "recompute", "model"), "model"), model) as run:
        for _ in range(PROOFS + 3):
            assert is_same(plain, gradient(model, rows))
            assert run.stats.recomputed_ops > 0
            assert (run.stats.late_swaps > 0) == longer
        assert not run.verified.differences


class ChangesWhatItHolds(nn.Module):
    """Holds a tensor from which replays make what autograd saves, and changes it in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.when = "never"
        self.held: Tensor

    def forward(self, rows: Tensor) -> Tensor:
        self.held = (rows @ self.weight) * 2
        made = (self.held + 1).sin()
        if self.when == "instead of an op":
            self.held.detach().mul_(3)
        made = made * 2
        if self.when == "later":
            made = made.neg()
            self.held.detach().mul_(3)
        return (made + 1).exp().sum()


@pytest.mark.filterwarnings("ignore:the step left the planned path")
@pytest.mark.parametrize("when", ["instead of an op", "later"])
def test_what_a_step_off_its_path_writes_over_is_read_by_replays_as_it_was(when: str) -> None:
    """The plan counts on the tensor until its last replay has read it."""
    torch.manual_seed(0)
    model, rows = ChangesWhatItHolds(), torch.rand(8, 8)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    assert plan.schedule.sources
    plain = gradient(model, rows)
    model.when = when
    plain_then = gradient(model, rows)
    model.when = "never"
    with apply_plan(plan, model) as run:
        for _ in range(PROOFS + 2):
            assert is_same(plain, gradient(model, rows))
        model.when = when
        assert is_same(plain_then, gradient(model, rows))
        assert run.stats.mismatches == 1
        assert not run.verified.differences


class GatesInPlace(nn.Module):
    """What `nn.LSTMCell` does on a CPU: parts of one storage, changed in place one by one, each saved by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 128)

    def forward(self, rows: Tensor) -> Tensor:
        gates = self.linear(rows)
        left, right = torch.unsafe_split(gates, 64, dim=1)
        return (left.sigmoid_() * right.tanh_()).exp().sum()


def test_a_storage_that_autograd_holds_for_several_contents_is_not_decided_on() -> None:
    torch.manual_seed(0)
    model, rows = GatesInPlace(), torch.rand(256, 64)
    profile = quick_profile(lambda: model(rows), model)
    of_gates = [value for value in profile.values if value.shape[-1:] == (64,) and value.overwrites >= 0]
    assert [value.fixed for value in of_gates] == [
        "an in-place op overwrites it",
        "autograd also holds its storage for earlier contents",
    ]
    assert profile.activations  # the product, which exp saved, is as free as ever


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_an_lstm_cell_keeps_its_predicted_peak(choice: Choice) -> None:
    def make() -> Workload:
        torch.manual_seed(0)
        cell, rows = nn.LSTMCell(64, 64), torch.rand(6, 256, 64)

        def forward() -> Tensor:
            hidden = memory = torch.zeros(256, 64)
            for row in rows:
                hidden, memory = cell(row, (hidden, memory))
            return hidden.square().mean()

        return Workload(cell, forward, torch.optim.SGD(cell.parameters(), lr=0.1), "cell", 256)

    workload = make()
    profile = quick_profile(workload.forward, workload.model, workload.optimizer)
    del workload
    chosen = tight_plan(profile, all_of(profile, choice, "step"))
    planned = train_steps(make(), chosen, 1, lambda text: None)
    assert planned.stats is not None
    assert planned.stats.swapped_out_bytes + planned.stats.recomputed_ops > 0
    assert planned.peak_bytes <= chosen.predicted_peak_bytes
    assert first_difference(train_steps(make(), None, 1, lambda text: None), planned) is None

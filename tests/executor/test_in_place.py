"""A saved tensor that is changed in place raises what plain training raises, whatever the plan does with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import apply_plan
from pooch.ir import Choice, Region
from tests.executor.support import all_of, quick_profile, region_of, tight_plan

MESSAGE = "modified by an inplace operation"


class Saves(nn.Module):
    """Saves the result of its exp; `inside`: changes it in place in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.inside = False

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        first = (rows @ self.weight).exp()
        if self.inside:
            first.mul_(2)
        return (first * 3).sin().sum(), first


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
        loss.backward()


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
    with apply_plan(tight_plan(profile, all_of(profile, "recompute", "model"), "model"), model):
        loss, first = model(rows)
        del first
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(RuntimeError, match=MESSAGE):
            loss.backward()

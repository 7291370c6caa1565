"""Data that the program assigns to tensors which autograd has saved."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pooch.executor.records import Reassigned, pack_kept
from pooch.ir import Choice
from tests.executor.support import all_of, applied, quick_profile, region_of, tight_plan

LEAF = torch.ones(4, requires_grad=True)


def _made(data: torch.Tensor) -> torch.Tensor:
    hidden = LEAF * data
    hidden.sin()  # so that `hidden` is not the result of the newest node
    return hidden


def test_what_was_saved_is_read_with_its_new_data() -> None:
    hidden = _made(torch.ones(4))
    packed, assigned = pack_kept(hidden, -1), Reassigned()
    assigned.note(hidden, -1)
    hidden.data = torch.full((4,), 3.0)
    found = assigned.instead_of(packed)
    assert found is not None
    assert torch.equal(found, torch.full((4,), 3.0))


def test_a_tensor_at_the_address_of_one_that_was_saved_is_another() -> None:
    """Values that a plan does not know all have the same number, so that only the identity tells them apart."""
    data = torch.ones(4)
    before = _made(data)
    packed, number = pack_kept(before, -1), id(before)
    del before
    others = []
    for _ in range(1000):
        others.append(_made(data))
        if id(others[-1]) == number:
            break
    assert id(others[-1]) == number, "no tensor came to the same address, so that this test tells nothing"
    assigned = Reassigned()
    assigned.note(others[-1], -1)
    assert assigned.instead_of(packed) is None


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("assigned", ["made before the step", "made in the step"])
def test_a_step_on_a_plan_reads_what_was_assigned_also_one_in_which_nothing_moves(
    choice: Choice, assigned: str
) -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)

    def forward(before: torch.Tensor) -> torch.Tensor:
        hidden = model(before).exp()
        loss = hidden.square().mean()
        tensor = hidden if assigned == "made in the step" else before
        tensor.data = 3 * tensor.data
        return loss

    profile = quick_profile(lambda: model(LEAF[0] * rows).exp().square().mean(), model)
    plan = replace(tight_plan(profile, all_of(profile, choice)), budget_bytes=2**30)  # so that it is measured
    gradients = []
    for each in (None, plan):
        model.zero_grad()
        with applied(each, model) as run:
            before = LEAF[0] * rows
            with region_of(run):
                loss = forward(before)
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))

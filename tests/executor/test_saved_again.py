"""A value that autograd lets go of within the forward pass and saves again later, while the program holds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import apply_plan
from pooch.executor.planned_values import PlannedValues
from tests.executor.support import all_of, assert_same, moved_bytes, quick_profile, tight_plan

pytestmark = pytest.mark.usefixtures("watched_by")


class SavedAgain(nn.Module):
    """`hidden` is saved by a sine, is away while `wide` is computed, and is saved again by a cosine.

    Args:
        until_the_end: autograd lets go of the sine after `hidden` has come back, and not before it leaves.
    """

    def __init__(self, until_the_end: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(8, 64)
        self.until_the_end = until_the_end

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        sine = hidden.sin()
        if not self.until_the_end:
            del sine
        wide: Tensor = self.second(rows).exp().tanh().sigmoid()
        shifted = hidden + 1.0  # reads it, and saves nothing
        if self.until_the_end:
            del sine
        return (hidden.cos() * 1.5).sum() + wide.sum() + shifted.mean()


@pytest.mark.parametrize("until_the_end", [False, True])
def test_a_value_that_is_saved_again_after_a_gap_is_read_from_where_it_is(until_the_end: bool) -> None:
    # GIVEN a plan under which the value leaves for a gap of the forward pass and comes back
    torch.manual_seed(0)
    model, rows = SavedAgain(until_the_end), torch.randn(32, 8)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "swap"))
    moved = [(action.kind, action.target) for action in plan.schedule.actions]
    hidden = next(value for value in profile.activations if value.label == "first.addmm").id
    assert ("empty", hidden) in moved
    assert ("refill", hidden) in moved
    model(rows).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # WHEN autograd has let go of it in between
    held: list[bool] = []
    hold = PlannedValues.hold

    def watched(actions: PlannedValues, step: object, record: object, tensor: Tensor, **named: bool) -> object:
        packed = hold(actions, step, record, tensor, **named)  # type: ignore[arg-type]
        if packed.value.number == hidden and packed.value.is_copied:
            held.append(packed.value.storage is not None)
        return packed

    with apply_plan(plan, model, measure_every=None) as run:
        PlannedValues.hold = watched  # type: ignore[method-assign,assignment]
        try:
            with run.step():
                loss = model(rows)
        finally:
            PlannedValues.hold = hold  # type: ignore[method-assign]
        loss.backward()
        stats = run.stats
    # THEN its bytes are held from the second time on, not those of its room in the tier, which others may have since
    assert held == [True]
    assert stats.late_swaps == stats.mismatches == 0
    assert stats.emptied_bytes == moved_bytes(plan, profile, "empty") > 0
    assert_same(plain, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})

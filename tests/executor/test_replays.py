"""What a replay computes is what the op computed: whatever the caller has switched on since, and whoever calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from pooch.executor import RunStats, apply_plan
from pooch.ir import Plan
from tests.executor.support import all_of, assert_same, quick_profile, tight_plan

Context = Callable[[], AbstractContextManager[object]]


class FullPrecision(nn.Module):
    """A part that is kept out of autocast, as losses and normalisations often are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.outer(torch.tanh(self.inner(rows)).exp())).exp().sum()


def recomputing(model: nn.Module, rows: Tensor) -> Plan:
    profile = quick_profile(lambda: model(rows), model)
    return tight_plan(profile, all_of(profile, "recompute", "model"), "model")


def gradients(
    model: nn.Module, rows: Tensor, plan: Plan | None, around_backward: Context
) -> tuple[dict[str, Tensor], RunStats | None]:
    with nullcontext() if plan is None else apply_plan(plan, model) as run:
        loss = model(rows)
        with around_backward():
            loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found, run.stats if run is not None else None


def test_a_backward_pass_under_autocast_does_not_cast_replays() -> None:
    torch.manual_seed(0)
    model, rows = FullPrecision(), torch.rand(32, 16)
    plan = recomputing(model, rows)

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16)

    plain, _ = gradients(model, rows, None, autocast)
    planned, stats = gradients(model, rows, plan, autocast)
    assert_same(plain, planned)
    assert stats is not None
    assert stats.recomputed_ops > 0

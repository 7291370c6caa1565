"""Why steps have no plan: the summary says so of each kind of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import pooch


def test_steps_in_which_parameters_had_to_move_say_why_there_is_no_plan_for_them() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pooch.auto(model, "7500KiB", optimizer, quiet=True) as auto:
        for _ in range(8):
            model(torch.randn(2048, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            while auto.is_planning:
                time.sleep(0.05)
        kinds = auto.summary().shapes
    (often,) = [each for each in kinds if each.steps > 2]
    assert often.decision == "online"
    assert often.reason, "nothing tells why there is no plan"
    assert often.in_core_peak_bytes is not None, "it was recorded"


@pytest.mark.parametrize("calls_at", [None, 3])
def test_a_budget_over_models_that_are_not_those_trained_says_so(calls_at: int | None) -> None:
    """As where copies of the parameters are stacked and trained: a summary alone would tell after the training."""
    given, trained = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    told: list[str] = []
    with pooch.auto(given, "1GiB", tell=told.append):
        for number in range(20):
            if number == calls_at:
                given(torch.randn(2, 8)).sum().backward()
            trained(torch.randn(2, 8)).sum().backward()
            optimizer.step()
    lines = [line for line in told if "none of the models under the budget" in line]
    assert len(lines) == (1 if calls_at is None else 0), told

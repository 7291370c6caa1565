"""Why steps have no plan: the summary says so of each kind of them."""

from __future__ import annotations

import torch
from torch import nn

import pooch


def test_steps_that_are_not_recorded_as_parameters_move_in_them_say_so() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pooch.auto(model, "7500KiB", optimizer, quiet=True) as auto:
        for _ in range(8):
            model(torch.randn(2048, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = auto.summary().shapes
    (often,) = [each for each in kinds if each.steps > 2]
    assert often.decision == "online"
    assert "leave the device" in often.reason, "nothing tells why there is no plan"

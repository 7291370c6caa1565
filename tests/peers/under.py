"""Programs of peers' tests as the forward pass of a module, run plainly, under `pooch.auto` and under `pooch.apply`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.autopilot import Auto
from pooch.autopilot.requests import PlanRequests
from tests.live_before import live_before

Way = Literal["plain", "auto", "apply"]
SIDE = 96  # of a tensor: 36 KiB, more than the smallest that leaves
Program = Callable[["Net"], Tensor]


class Net(nn.Module):
    """Two layers and a batch, for a program that uses them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)
        self.inputs = torch.randn(SIDE, SIDE)
        self.program = program

    def forward(self) -> Tensor:
        return self.program(self)


@contextmanager
def held(model: nn.Module, share: float = 3.0) -> Iterator[Auto]:
    """A budget of a few tensors above what is live, so that all that can leave does. Nothing is planned beside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRequests, "ask", lambda *_: None)
        patch.setattr(PlanRequests, "warm_up", lambda *_: None)
        budget_bytes = live_before() + int(share * 4 * SIDE * SIDE)
        with Auto([model], budget_bytes, tell=lambda _: None) as auto:
            yield auto


def trained(program: Program, way: Way, steps: int = 3) -> list[Tensor]:
    """Losses and gradients of some steps, and the random state after them."""
    net = Net(program)
    if way == "apply":
        torch.manual_seed(4)
        plan = pooch.plan(pooch.profile(net, net), "min")  # type: ignore[attr-defined]
        under = pooch.apply(plan, net)  # type: ignore[attr-defined]
    else:
        under = held(net) if way == "auto" else nullcontext()
    net.zero_grad()
    torch.manual_seed(4)
    found = []
    with under:
        for _ in range(steps):
            loss = net()
            loss.backward()
            found += [loss.detach().clone(), *(each.grad.clone() for each in net.parameters() if each.grad is not None)]
            net.zero_grad()
    return [*found, torch.get_rng_state()]


def assert_as_plain(program: Program, *, by_plan: bool = False) -> None:
    """Compare all bits with those of plain training.

    Args:
        program: What is trained.
        by_plan: Whether a plan is tried as well, which takes longer.
    """
    plain = trained(program, "plain")
    ways: tuple[Way, ...] = ("auto", "apply") if by_plan else ("auto",)
    for way in ways:
        found = trained(program, way)
        assert len(found) == len(plain)
        for number, (one, other) in enumerate(zip(plain, found, strict=True)):
            assert torch.equal(one, other), f"{way}: value {number}"

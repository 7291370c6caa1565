"""What an optimizer needs whose steps are compiled by a step of its own, one function for each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.torchtools.optimizer_slices import needs_of, plain_step

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


GRAPHS: list[torch.fx.GraphModule] = []


def noting(graph: torch.fx.GraphModule, _: object) -> Any:
    """A backend that runs graphs as they are."""
    GRAPHS.append(graph)
    return graph.forward


def descended(parameter: Tensor, gradient: Tensor, mean: Tensor) -> None:
    mean.mul_(0.9).add_(gradient)
    parameter.sub_(0.1 * mean)


class Compiling(torch.optim.Optimizer):
    """Momentum, by a function that is compiled as a whole or not at all."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state["mean"] = torch.zeros_like(each)
                torch.compile(descended, fullgraph=True, backend=noting)(each.detach(), each.grad, state["mean"])


def test_looking_for_it_compiles_nothing_and_leaves_later_steps_compiled() -> None:
    model = nn.Linear(64, 64)
    optimizer = Compiling(model.parameters())
    needs = needs_of(optimizer, plain_step(optimizer))
    assert needs is not None
    assert not GRAPHS
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    assert GRAPHS

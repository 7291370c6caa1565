"""Any small graph of ops under any budget trains as it does plainly."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pooch.machine import CopySpeed
from tests.copy_costs import costing
from tests.executor.online.support import run_online, run_plainly
from tests.executor.online.zoo import Cube, Found, Region, Training
from tests.executor.support import assert_same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]
SIDE = 24
OPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda a, b: a @ b / SIDE,
    lambda a, b: a * b,
    lambda a, b: a + b.detach().abs(),
    lambda a, b: a.tanh(),
    lambda a, b: a.sigmoid().exp(),
    lambda a, b: functional.dropout(a, 0.3),
    lambda a, b: a.clone().mul_(b.detach()).relu_(),
    lambda a, b: Cube.apply(a.clamp(-1, 1)),
    lambda a, b: torch.cat(b.chunk(2, 0)[::-1]).t() * a.softmax(-1),
    lambda a, b: torch.where(b > 0, a, a.sin()),
    lambda a, b: a.sort(-1)[0],
    lambda a, b: functional.layer_norm(a, (SIDE,)) + b.contiguous().view(-1)[: SIDE * SIDE].view(SIDE, SIDE),
)


def graph(calls: list[tuple[int, int, int]], forgetful: int) -> Callable[[], Training]:
    """A training step of these ops, each on results of earlier ones, of which the program keeps only the latest."""

    def make() -> Training:
        leaves = [torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2)]

        def train(region: Region) -> Found:
            with region():
                at_hand: list[Tensor] = list(leaves)
                for op, first, second in calls:
                    at_hand.append(OPS[op](at_hand[-1 - first % len(at_hand)], at_hand[-1 - second % len(at_hand)]))
                    del at_hand[: max(0, len(at_hand) - forgetful)]
                loss = sum((each.mean() for each in at_hand), torch.zeros(()))
                del at_hand
            loss.backward()
            found = {str(i): leaf.grad.clone() for i, leaf in enumerate(leaves) if leaf.grad is not None}
            return found | {"loss": loss.detach().clone(), "random state": torch.get_rng_state()}

        return train

    return make


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    calls=st.lists(st.tuples(st.integers(0, len(OPS) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=25),
    forgetful=st.integers(1, 5),
    share=st.floats(0, 1),
    cost=st.sampled_from([1e-9, 1e-3, 1e9]),
)
def test_any_graph_under_any_budget(
    calls: list[tuple[int, int, int]], forgetful: int, share: float, cost: float
) -> None:
    with mock.patch.multiple(CopySpeed, **costing(lambda size_bytes: size_bytes * cost)):
        make = graph(calls, forgetful)
        plain = run_plainly(make)
        budget_bytes = int(share * plain.peak_bytes)
        seen = run_online(make, budget_bytes)
    assert_same(plain.found, seen.found)
    assert seen.peak_bytes <= budget_bytes + seen.missing_bytes

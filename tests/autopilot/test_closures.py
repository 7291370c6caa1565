"""Steps that call a closure several times hold directions and gradients in variables: these leave as well."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

import pooch
from pooch.autopilot.program_data import held_by_running_steps
from pooch.torchtools import watch
from tests.autopilot.test_persistence import WIDTH, contents, network
from tests.live_before import live_before

pytestmark = pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively")
STEPS, CALLS = 3, 10


def trained(budget_bytes: int | None) -> tuple[list[bytes], int, int]:
    """What a training ends with, and its peaks in the passes that closures make and between them."""
    before_bytes = live_before()
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, CALLS, history_size=3)
    held: Any = contextlib.nullcontext()
    if budget_bytes is not None:
        held = pooch.auto(model, before_bytes + budget_bytes, optimizer, tell=lambda _: None)
    torch.manual_seed(1)
    with held as auto:
        for _ in range(STEPS):
            rows = torch.randn(8, WIDTH)

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(rows).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        summary = None if auto is None else auto.summary()
    found = contents([*model.parameters()])
    if summary is None:
        return found, 0, 0
    return found, summary.peak_bytes - before_bytes, summary.between_peak_bytes - before_bytes


def test_what_a_step_with_a_closure_holds_leaves() -> None:
    plain, _, _ = trained(None)
    free, peak_bytes, between_bytes = trained(2**30)
    budget_bytes = max(peak_bytes, between_bytes) * 35 // 100
    found, peak_bytes, _ = trained(budget_bytes)
    assert found == free == plain
    assert peak_bytes <= budget_bytes


def _holding(look: Callable[[], list[torch.Tensor]]) -> tuple[int, bool]:
    directions, variable = [torch.rand(4)], torch.rand(4)
    count, reference = len(look()), weakref.ref(variable)
    del variable
    return count, reference() is None and len(directions) == 1


def test_what_steps_hold_is_looked_at_and_not_kept() -> None:
    names = {**globals(), "__name__": torch.optim.LBFGS.__module__}
    assert FunctionType(_holding.__code__, names)(held_by_running_steps) == (2, True)
    assert _holding(held_by_running_steps) == (0, True)

"""A step that needs more than its plan foresaw is told once, in one line with the figures and the likely cause, and its
numbers are right all the same.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import pooch
from pooch.errors import UsageError
from pooch.executor import Run, apply_plan
from pooch.ir import Plan
from pooch.units import format_bytes
from tests.executor.support import assert_same, quick_profile

STEPS = 12
ROOM = 1.01  # predicted and measured peaks of so small a step differ by some tensors of a few bytes


class Deep(nn.Module):
    """Activations of 2 MiB a layer; parameters of 256 KiB."""

    def __init__(self, trainable_from: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        for layer in self.layers[:trainable_from]:
            layer.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows).tanh().sin()
        return rows.square().mean()


class Training:
    """A model, its data and its optimizer, from the same state each time."""

    def __init__(self, trainable_from: int = 0) -> None:
        torch.manual_seed(0)
        self.model = Deep(trainable_from)
        self.rows = torch.rand(1024, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run: Run | None = None
        self.kept: list[Any] = []

    def forward(self) -> Tensor:
        loss: Tensor = self.model(self.rows)
        return loss

    def region(self) -> Any:
        return self.run.forward_region() if self.run is not None else nullcontext()

    def loss(self) -> Tensor:
        with self.region():
            return self.forward()

    def state(self) -> dict[str, Tensor]:
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        found |= {f"{name}.grad": p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return found | {"random state": torch.get_rng_state()}


def plan_of(training: Training, share: float = 0.7) -> Plan:
    """With hardly any room between the predicted peak and the budget."""
    profile = quick_profile(training.forward, training.model, training.optimizer)
    plan = pooch.plan(profile, int(share * profile.peak_bytes), region="step", time_limit_s=3)
    assert plan.schedule.actions or share >= 1
    assert plan.persistent_bytes == profile.persistent_bytes > 0
    return replace(plan, budget_bytes=int(ROOM * plan.predicted_peak_bytes))


Loop = Callable[[Training, int], None]


def ordinary(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    training.loss().backward()
    training.optimizer.step()


def plainly(loop: Loop, steps: int = STEPS, **options: Any) -> dict[str, Tensor]:
    training = Training(**options)
    torch.manual_seed(1)
    for number in range(1, steps + 1):
        loop(training, number)
    return training.state()


@contextmanager
def watched(training: Training, plan: Plan, **options: Any) -> Iterator[Run]:
    with apply_plan(plan, training.model, **options) as run:
        training.run = run
        torch.manual_seed(1)
        yield run
    training.run = None


def told(loop: Loop, steps: int = STEPS, trainable_from: int = 0, **options: Any) -> tuple[list[str], Run]:
    """What a loop under a tight plan warns of; its numbers are those of plain training."""
    expected = plainly(loop, steps, trainable_from=trainable_from)
    training = Training(trainable_from)
    plan = plan_of(training)
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watched(training, plan, **options) as run:
            for number in range(1, steps + 1):
                loop(training, number)
            stats = run.stats
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0
    assert_same(expected, training.state())
    assert not is_profiling()
    return [str(each.message) for each in caught], run


def is_profiling() -> bool:
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


def test_a_run_that_keeps_its_promise_says_nothing() -> None:
    texts, run = told(ordinary)
    assert texts == []
    assert run.totals.steps == STEPS
    assert run.totals.steps_measured == 3
    assert run.totals.steps_off_path == run.totals.steps_over_budget == 0
    assert run.totals.peak_bytes is not None
    assert run.plan.budget_bytes / 1.02 < run.totals.peak_bytes <= run.plan.budget_bytes


def second_order(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    gradients = torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    training.optimizer.step()


def unfrozen(training: Training, number: int) -> None:
    if number == 4:
        training.model.requires_grad_(True)
    ordinary(training, number)


def parameters_added(training: Training, number: int) -> None:
    if number == 4:
        training.model.register_parameter("late", nn.Parameter(torch.ones(2**18)))
    ordinary(training, number)


def two_forwards(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    first = training.loss()
    second = training.loss()
    (first * second).backward()
    training.optimizer.step()


def graph_retained(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    loss.backward(retain_graph=True)
    training.kept[:] = [loss]
    training.optimizer.step()


def read_twice(training: Training, number: int) -> None:
    training.optimizer.zero_grad()
    loss = training.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()


def gradients_zeroed(training: Training, number: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)
    training.loss().backward()
    training.optimizer.step()


def zeroed_between(training: Training, number: int) -> None:
    loss = training.loss()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()


def tensors_of_the_users_own(training: Training, number: int) -> None:
    if number == 1:
        training.kept.append(torch.ones(2**19))
    ordinary(training, number)


def another_shape(training: Training, number: int) -> None:
    if number == 10:
        training.rows = torch.cat([training.rows, training.rows])
    ordinary(training, number)


CASES: dict[str, tuple[Loop, int, str]] = {
    "second order": (second_order, 1, "create_graph=True"),
    "unfrozen": (unfrozen, 4, r"6 parameters \(layers.0.weight, ...\) became trainable since"),
    "added": (parameters_added, 4, "the parameter late came to the model since, of 1.00 MiB"),
    "two forwards": (two_forwards, 1, "2 forward passes came before one backward pass"),
    "retained": (graph_retained, 1, "retain_graph=True"),
    "read twice": (read_twice, 1, "retain_graph=True"),
    "zeroed gradients": (gradients_zeroed, 2, "1.51 MiB of gradients lived before the step"),
    "zeroed in between": (zeroed_between, 2, "1.51 MiB of gradients lived before the step"),
    "tensors": (tensors_of_the_users_own, 1, "2.00 MiB lived before the step that the profile did not know"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_budget_that_is_passed_is_told_once_with_figures_and_cause(case: str) -> None:
    import re

    loop, step, cause = CASES[case]
    texts, run = told(loop, trainable_from=3 if case == "unfrozen" else 0)
    assert len(texts) == 1
    (text,) = texts
    assert "\n" not in text
    assert re.search(cause, text), text
    figures = re.match(r"step (\d+) took (.+?), (.+?) over the budget of (.+?): ", text)
    assert figures is not None, text
    assert int(figures[1]) == step
    assert figures[4] == format_bytes(run.plan.budget_bytes)
    totals = run.totals
    assert totals.steps_over_budget > 0
    assert totals.peak_bytes is not None
    assert totals.peak_bytes > run.plan.budget_bytes

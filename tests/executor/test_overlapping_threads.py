"""Two threads within one step at the same time, as where a model lies on two devices: the step's state stays right."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pooch.errors import ProfileError
from pooch.executor import Run, apply_plan, mode
from pooch.executor.own_work import OWN_WORK, quietly
from pooch.executor.plan_guide import PlanGuide
from pooch.executor.step import Step
from pooch.machine.own_time import OwnTime
from tests.executor.support import all_of, is_same, quick_profile, tight_plan
from tests.executor.test_two_threads import HEAD_START_S, PATIENCE_S, in_threads, planned


def step_of(run: Run) -> Step:
    return next(each for each in gc.get_objects() if isinstance(each, Step) and each.stats is run._stats)


# Reads of the backward pass -------------------------------------------------------------------------------------------


def test_a_read_of_a_kept_value_waits_for_the_actions_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is there at once, but who reads it computes next, maybe in memory that the actions free."""
    model, rows, plan = planned("recompute")
    with apply_plan(plan, model) as run:
        losses = model(rows)
        step = step_of(run)
        value = next(
            v
            for v, slot in step.guide.table.anchor_of.items()
            if slot >= step.guide.table.first_slot + len(plan.expected)
        )
        kept = torch.ones(2)
        begun, read, order = threading.Event(), threading.Event(), []
        real = PlanGuide.run

        def slowly(actions: PlanGuide, action: Any) -> None:
            begun.set()
            read.wait(HEAD_START_S)  # whoever does not wait for us has read by then
            real(actions, action)
            order.append("action")

        def second() -> None:
            assert begun.wait(PATIENCE_S)
            step.unpack((kept, kept._version, value, id(kept)))
            order.append("second read")
            read.set()

        monkeypatch.setattr(PlanGuide, "run", slowly)
        in_threads(lambda: step.unpack((kept, kept._version, value, id(kept))), second)
        assert "action" in order
        assert order[-1] == "second read"
        del losses


def test_the_first_read_is_told_once_though_two_threads_read_first() -> None:
    model, rows, plan = planned("swap")
    with apply_plan(plan, model) as run:
        losses = model(rows)
        step, kept = step_of(run), torch.ones(2)
        told: list[int] = []
        taken = threading.Event()

        class Slow(Step):
            """Whoever sees that somebody is to be told gives the other thread time to see it too."""

            @property  # type: ignore[override]
            def on_read(self) -> Any:
                listener = self.__dict__.get("listener")
                if listener is not None:
                    taken.wait(HEAD_START_S)
                return listener

            @on_read.setter
            def on_read(self, listener: Any) -> None:
                self.__dict__["listener"] = listener
                if listener is None:
                    taken.set()

        step.__class__ = Slow
        step.on_read = lambda: told.append(threading.get_ident())
        in_threads(*[lambda: step.unpack((kept, kept._version, None, id(kept)))] * 2)  # type: ignore[list-item]
        assert len(told) == 1
        del losses


# Ops of the region ----------------------------------------------------------------------------------------------------

DURING: list[Callable[[], None]] = []


@torch.library.custom_op("pooch_tests::waiting_exp", mutates_args=())
def waiting_exp(rows: Tensor) -> Tensor:
    for each in DURING:
        each()
    return rows.exp()


class WaitingExp(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, rows: Tensor) -> Tensor:
        result = waiting_exp(rows)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * context.saved_tensors[0]


class Busy(nn.Module):
    """While its exponential is computed, another thread computes `beside` under the modes that are active here.

    So does autograd, whose threads take the modes of the thread that called `backward` within a region.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.beside: Callable[[], object] | None = None

    def forward(self, rows: Tensor) -> Tensor:
        mode, beside = _get_current_dispatch_mode(), self.beside
        if beside is not None and mode is not None:

            def under_the_mode() -> None:
                with mode:
                    beside()

            DURING.append(lambda: in_threads(under_the_mode))
        return torch.tanh(WaitingExp.apply(self.linear(rows))).exp().sum()


@pytest.fixture(autouse=True)
def nothing_during() -> Iterator[None]:
    yield
    DURING.clear()


@pytest.mark.parametrize("beside", [torch.cos, lambda rows: torch.equal(rows, rows)], ids=["makes", "makes nothing"])
def test_an_op_in_the_middle_of_an_op_ends_the_plan_and_is_not_taken_for_it(
    beside: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode, "is_native", lambda _: False)  # what watches natively cannot be entered by hand
    torch.manual_seed(0)
    model, rows = Busy(), torch.rand(16, 8)
    model(rows).backward()
    assert model.linear.weight.grad is not None
    plain = model.linear.weight.grad.clone()
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "recompute", "model"), "model")
    with apply_plan(plan, model) as run:
        model.beside = lambda: beside(rows)
        model.zero_grad()
        with pytest.warns(UserWarning, match="in another thread"):
            model(rows).backward()
        assert run.stats.mismatches == 1
    assert is_same(plain, model.linear.weight.grad)


def test_profiling_ops_of_two_threads_at_once_is_refused_in_one_line() -> None:
    model, rows = Busy(), torch.rand(16, 8)
    model.beside = lambda: torch.cos(rows)
    with pytest.raises(ProfileError, match="two threads at once"):
        quick_profile(lambda: model(rows), model)


def test_what_one_thread_does_by_itself_hides_no_look_of_another() -> None:
    """A hook that starts later and ends earlier than another one's leaves nothing behind."""
    model, rows, plan = planned("swap")
    with apply_plan(plan, model):
        losses = model(rows)
        inside, end = threading.Event(), threading.Event()

        def outer(_: object) -> None:
            inside.set()
            assert end.wait(PATIENCE_S)

        def inner(_: object) -> None:
            end.set()
            outer_thread.join(PATIENCE_S)  # the outer hook ends while this one is at work

        outer_thread = threading.Thread(target=quietly(outer, OwnTime()), args=(None,), daemon=True)
        outer_thread.start()
        assert inside.wait(PATIENCE_S)
        assert not OWN_WORK.depth
        quietly(inner, OwnTime())(None)
        assert not OWN_WORK.depth
        del losses

"""Ctrl-C at every byte code of what runs in a step: the next step is right, within the budget, and like all others."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

import pooch
from pooch.autopilot.autopilot import Auto
from pooch.autopilot.known import Known
from pooch.autopilot.library import Library
from pooch.executor.own_work import OWN_WORK
from pooch.machine import StepLock, Value
from pooch.torchtools import endings, raw_looks, standing_aside
from pooch.torchtools.memory_trace import CollectorOff
from tests.interrupts import Interrupts

pytestmark = pytest.mark.cpu
ROOMS = ("executor", "torchtools", "autopilot")
EVERY = int(os.environ.get("POOCH_INTERRUPT_EVERY", "200"))  # byte codes; 1 takes some minutes
Step = Callable[[], tuple[float, str]]


def small_step() -> tuple[torch.nn.Module, Step]:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    model, batch = torch.nn.Sequential(*layers), torch.randn(256, 32)
    drawn: list[torch.Tensor] = []  # the random state after the forward pass, which a backward pass has to leave alone

    def step() -> tuple[float, str]:
        assert not drawn or torch.equal(torch.get_rng_state(), drawn[0]), "an interrupt left another random state"
        drawn.clear()
        torch.manual_seed(1)
        model.zero_grad()
        loss = model(batch).square().mean()
        drawn.append(torch.get_rng_state())
        loss.backward()
        gradients = b"".join(parameter.grad.numpy().tobytes() for parameter in model.parameters())
        return loss.item(), hashlib.sha256(gradients).hexdigest()

    return model, step


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what is raised in a finalizer."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


@pytest.fixture
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Auto, Step]]:
    """A model under a budget whose every step runs in one way."""
    model, step = small_step()
    run = pooch.auto(model, "70%", tell=lambda _: None)
    waits_until = time.monotonic() + 60
    while not run.plans and time.monotonic() < waits_until:
        step()
        time.sleep(0.05)
    assert len(run.plans) == 1
    if request.param != "plan":
        known = next(iter(run._driver.library._known.values()))
        monkeypatch.setattr(Library, "choose", lambda *_, **__: (request.param, known))
    yield run, step
    run.remove()


def state(run: Auto) -> dict[str, Any]:
    """What an interrupt must not change for good."""
    driver = run._driver
    evictor = driver.evictor
    return {
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "our hooks": len(standing_aside._HERE.hooks),
        "our modes": len(standing_aside._HERE.modes),
        "watchers": len(raw_looks._HERE.watchers),
        "users of stand-ins": len(raw_looks._LOOKS._users | raw_looks._ASSIGNMENTS._users),
        "users of wrappers": len(standing_aside._users),
        "users of the collector": len(CollectorOff._users),
        "module hooks": len(_global_forward_pre_hooks) + len(_global_forward_hooks),
        "own work": OWN_WORK.depth,
        "within": driver.here.is_within_call,
        "running": driver._running,
        "lock": (evictor.lock._lock._is_owned(), evictor.lock._depth),
        "records": len(evictor._values),
        "collector": gc.isenabled(),
    }


def check_next_step(run: Auto, before: dict[str, Any], step: Step, reference: object) -> None:
    over = over_budget(run)
    assert step() == reference
    assert state(run) == before
    if over_budget(run) > over:  # the end of the interrupted step may be that which was counted
        over = over_budget(run)
        assert step() == reference
        assert over_budget(run) == over, run.summary()


def over_budget(run: Auto) -> int:
    return run._driver.counters.steps_over_budget


@pytest.mark.slow
@pytest.mark.parametrize("held", ["plan", "online", "record"], indirect=True)
def test_the_next_step_is_right_after_an_interrupt_at_any_byte_code(held: tuple[Auto, Step]) -> None:
    run, step = held
    reference = step()
    before, interrupts = state(run), Interrupts(*ROOMS, every=EVERY)
    while interrupts.next(step):
        try:
            check_next_step(run, before, step, reference)
        except BaseException as error:
            raise AssertionError(f"after an interrupt at {interrupts.place}") from error
    assert interrupts.count > 2000


@pytest.mark.parametrize("number", range(6))
def test_a_handle_whose_end_is_lost_disturbs_no_later_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As when Ctrl-C comes at the entry of what is called then, which Python then prints and forgets."""
    model, step = small_step()
    ends, real = [0], StepLock.end

    def once_lost(lock: StepLock, value: Value) -> None:
        ends[0] += 1
        if ends[0] != number:
            real(lock, value)

    with pooch.auto(model, "70%", tell=lambda _: None) as run:
        step()
        monkeypatch.setattr(Library, "choose", lambda *_, **__: ("online", Known()))
        reference = step()
        monkeypatch.setattr(StepLock, "end", once_lost)
        for _ in range(4):
            assert step() == reference
        assert ends[0] > number
        assert len(run._driver.evictor._values) == 0
    assert run.summary().steps_over_budget == 0


def test_a_finalizer_that_was_lost_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        pass

    ended: list[str] = []
    with monkeypatch.context() as lost:
        lost.setattr(endings.weakref.finalize, "__call__", lambda *_: None)
        owner = Owner()
        endings.end_with(owner, ended.append, "once")
        del owner
    assert ended == []
    endings.run_lost()
    endings.run_lost()
    assert ended == ["once"]


def test_finalizers_that_were_called_are_forgotten_where_nothing_looks_for_lost_ones() -> None:
    class Owner:
        pass

    before = len(endings._MADE)
    for _ in range(10_000):
        endings.end_with(Owner(), int)
    assert len(endings._MADE) < before + 2 * endings._FIRST_LOOK
    endings.run_lost()

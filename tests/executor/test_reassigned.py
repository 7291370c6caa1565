"""Data that the program assigns to tensors which autograd has saved."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.executor.mode import following
from pooch.executor.records import Reassigned, pack_kept
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from pooch.ir import Choice
from tests.executor.online.support import holding
from tests.executor.support import all_of, applied, quick_profile, region_of, tight_plan

LEAF = torch.ones(4, requires_grad=True)


def _made(data: torch.Tensor) -> torch.Tensor:
    hidden = LEAF * data
    hidden.sin()  # so that `hidden` is not the result of the newest node
    return hidden


def assign(reassigned: Reassigned, tensor: torch.Tensor, number: float, value: int) -> None:
    """Give a tensor other data, as the program does."""
    assigned = reassigned.note(tensor, value)
    tensor.data = torch.full((4,), number)
    assert assigned is not None
    assigned()


def test_what_was_saved_is_read_with_its_new_data() -> None:
    hidden = _made(torch.ones(4))
    packed, reassigned = pack_kept(hidden, -1), Reassigned()
    assign(reassigned, hidden, 3.0, -1)
    found = reassigned.instead_of(packed)
    assert found is not None
    assert torch.equal(found, torch.full((4,), 3.0))


def test_what_was_saved_before_and_between_two_assignments_is_read_with_the_latest_data() -> None:
    hidden, reassigned = _made(torch.ones(4)), Reassigned()
    first = pack_kept(hidden, 1)
    assign(reassigned, hidden, 3.0, 1)
    second = pack_kept(hidden, 2)
    assert reassigned.instead_of(second) is None
    assign(reassigned, hidden, 5.0, 2)
    hidden.detach().add_(1)
    for packed in first, second:
        found = reassigned.instead_of(packed)
        assert found is not None
        assert torch.equal(found, torch.full((4,), 6.0))


def test_conjugated_data_is_read_as_such() -> None:
    leaf = torch.ones(4, dtype=torch.complex64, requires_grad=True)
    hidden, reassigned = leaf * (1 + 2j), Reassigned()
    hidden.sin()
    packed, assigned = pack_kept(hidden, 1), reassigned.note(hidden, 1)
    hidden.data = torch.full((4,), 3 + 1j).conj()
    assert assigned is not None
    assigned()
    found = reassigned.instead_of(packed)
    assert found is not None
    assert torch.equal(found, torch.full((4,), 3 - 1j))


def test_modes_of_the_program_do_not_hear_of_it() -> None:
    hidden, reassigned, heard = _made(torch.ones(4)), Reassigned(), list[str]()

    class Hearing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(str(func))
            return func(*args, **(kwargs or {}))

    other = torch.full((4,), 3.0)
    with Hearing():
        assigned = reassigned.note(hidden, 1)
        hidden.data = other
        heard.clear()
        assert assigned is not None
        assigned()
    assert not heard


def test_what_was_noted_holds_neither_the_tensor_nor_its_history() -> None:
    hidden, reassigned = _made(torch.ones(4)), Reassigned()
    ended = weakref.ref(hidden)
    packed = pack_kept(hidden, -1)
    assign(reassigned, hidden, 3.0, -1)
    del hidden
    assert ended() is None
    found = reassigned.instead_of(packed)
    assert found is not None
    assert torch.equal(found, torch.full((4,), 3.0))


def test_a_tensor_at_the_address_of_one_that_was_saved_is_another() -> None:
    """Values that a plan does not know all have the same number, so that only the identity tells them apart."""
    data = torch.ones(4)
    before = _made(data)
    packed, number = pack_kept(before, -1), id(before)
    del before
    others = []
    for _ in range(1000):
        others.append(_made(data))
        if id(others[-1]) == number:
            break
    assert id(others[-1]) == number, "no tensor came to the same address, so that this test tells nothing"
    reassigned = Reassigned()
    assign(reassigned, others[-1], 3.0, -1)
    assert reassigned.instead_of(packed) is None


@pytest.mark.parametrize("choice", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("assigned", ["made before the step", "made in the step"])
def test_a_step_on_a_plan_reads_what_was_assigned_also_one_in_which_nothing_moves(
    choice: Choice, assigned: str
) -> None:
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)

    def forward(before: torch.Tensor) -> torch.Tensor:
        hidden = model(before).exp()
        loss = hidden.square().mean()
        tensor = hidden if assigned == "made in the step" else before
        tensor.data = 3 * tensor.data
        return loss

    profile = quick_profile(lambda: model(LEAF[0] * rows).exp().square().mean(), model)
    plan = replace(tight_plan(profile, all_of(profile, choice)), budget_bytes=2**30)  # so that it is measured
    gradients = []
    for each in (None, plan):
        model.zero_grad()
        with applied(each, model) as run:
            before = LEAF[0] * rows
            with region_of(run):
                loss = forward(before)
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@contextmanager
def online(_: Any) -> Iterator[None]:
    with holding() as evictor:
        evictor.begin_step(RunStats())
        with following(Step(evictor)):
            yield


@pytest.mark.parametrize("way", ["keep", "swap", "recompute", "online"])
def test_a_step_whose_backward_pass_never_comes_is_let_go_of(way: Any) -> None:
    """Its tensor held its history, that the step, and the step the tensor: all of it stayed, in each step anew."""
    model, rows, ended = nn.Linear(64, 64), torch.randn(64, 64), []
    profile = quick_profile(lambda: model(rows).exp().square().mean(), model)
    plan = None if way == "online" else tight_plan(profile, all_of(profile, way))
    with applied(plan, model) as run:
        for _ in range(3):
            with online(run) if run is None else region_of(run):
                hidden = model(rows).exp()
                loss = hidden.square().mean()
                hidden.data = 3 * hidden.data
            ended.append(weakref.ref(hidden))
            del hidden, loss
        gc.collect()
        assert [each() for each in ended] == [None] * 3

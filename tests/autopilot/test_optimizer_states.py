"""Optimizers as they are known, where several threads train."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import pooch
from pooch.autopilot import optimizer_states
from pooch.autopilot.optimizer_states import OptimizerStates
from pooch.ground.live_objects import live_objects

CPU = torch.device("cpu")


def test_what_another_thread_steps_is_not_looked_at() -> None:
    """PyTorch ends the process if a gradient is read while another thread lets go of it."""
    (own, other), is_over = (torch.optim.SGD([torch.zeros(3, requires_grad=True)]) for _ in range(2)), threading.Event()
    states, has_stepped = OptimizerStates((), [own, other]), threading.Event()

    def step() -> None:
        states.stepped(other)
        has_stepped.set()
        is_over.wait(60)

    thread = threading.Thread(target=step)
    thread.start()
    has_stepped.wait(60)
    assert states.in_no_model([]) == []
    states.stepped(own)
    assert [id(each) for each in states.in_no_model([])] == [id(own.param_groups[0]["params"][0])]
    is_over.set()
    thread.join()
    assert len(states.in_no_model([])) == 2, "nobody else is there"


def test_parameters_of_models_that_were_trained_before_belong_to_these() -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    states = OptimizerStates((), optimizers)
    assert len(states.in_no_model(models[:1])) == 2
    states.to_attach(models, CPU)
    assert states.in_no_model(models[:1]) == []


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_optimizers_are_given(kind: type) -> None:
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    with pooch.auto(models, 2**30, kind(optimizers), tell=lambda _: None) as auto:
        states = auto._driver._persistence.states
        assert states.to_attach(models, CPU) == optimizers
        assert set(states.to_attach(models[1:], CPU)) == set(optimizers), "all that were given"


def test_where_a_program_updates_parameters_by_itself_optimizers_are_looked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking through all objects takes 80 ms with a compiler loaded: longer than steps of small models."""
    looks = list[type]()

    def looked(kind: type) -> list[object]:
        looks.append(kind)
        return live_objects(kind)

    monkeypatch.setattr(optimizer_states, "live_objects", looked)
    models = [nn.Linear(64, 64) for _ in range(2)]
    states = OptimizerStates((), [])
    assert [states.bytes_to_come(models[:1]) for _ in range(64)] == [0] * 64
    assert len(looks) == 7, "at 1, 2, 4 to 64"
    looks.clear()
    states = OptimizerStates((), [])
    assert [states.to_attach(models[:1], CPU) for _ in range(64)] == [[]] * 64
    assert len(looks) <= 7
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    assert states.bytes_to_come(models) == 2 * 2 * 65 * 64 * 4, "at once for other parameters"
    del optimizers
    assert states.bytes_to_come(models) == 0
    looks.clear()
    optimizer = torch.optim.AdamW(models[0].parameters())
    states.stepped(optimizer)
    assert states.bytes_to_come(models) == 2 * 65 * 64 * 4, "at once after a step"
    assert not looks, "what has stepped is known"

"""Local variables are looked at without keeping anything alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from pooch.ground.frames import local_of
from tests.autopilot.under import Under


class Held:
    """Something that can be referred to weakly."""


def caller() -> FrameType:
    return sys._getframe(2)


def looked_at() -> object:
    return local_of(caller(), "held")


def test_what_a_function_lets_go_of_does_not_live_on() -> None:
    held = Held()
    gone = weakref.ref(held)
    assert looked_at() is held
    held = Held()
    assert gone() is None
    assert looked_at() is held
    assert local_of(sys._getframe(), "missing") is None


def test_a_dictionary_that_the_program_holds_stays_as_it_is() -> None:
    held = Held()
    mine = locals()
    assert looked_at() is held
    assert mine["held"] is held


def test_names_of_a_class_and_of_a_module_stay() -> None:
    namespace: dict[str, Any] = {"looked_at": looked_at}
    exec("held = 1\nclass Body:\n    held = 2\n    found = looked_at()\nfound = looked_at()", namespace)
    assert (namespace["held"], namespace["found"]) == (1, 1)
    assert (namespace["Body"].held, namespace["Body"].found) == (2, 2)


def test_a_traced_function_keeps_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(frame: FrameType, event: str, argument: object) -> Any:
        return traced

    def generator() -> Iterator[Held]:
        held = Held()
        looked_at()
        yield held
        looked_at()
        yield held

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        first, second = generator()
    finally:
        sys.settrace(before)
    assert first is second


class Rebinding(nn.Module):
    """Notes whether each value that its forward pass lets go of is gone by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.are_gone = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)]), list[bool]()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + 1
            gone = weakref.ref(hidden)
            hidden = hidden * 2
            self.are_gone.append(gone() is None)
        return hidden.sum()


def test_the_forward_pass_of_a_step_that_is_new_lets_go_of_what_plain_training_does() -> None:
    torch.manual_seed(0)
    model, under = Rebinding(), Under(512 * 2**10)
    with under(model):
        model(torch.randn(512, 64)).backward()
    assert under.summary.recomputed_ops or under.summary.swapped_bytes
    assert model.are_gone == [True] * 4

"""Objects are found by their type, and none but those is held where another thread can run."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo  # what `torch.compile` has made is looked for once this is loaded
from torch import nn

import pooch
from pooch.autopilot.optimizer_states import OptimizerStates
from pooch.ground import live_objects as found_by
from pooch.ground.live_objects import freeze_known, live_objects, noting
from pooch.profiler.fake.world import FakeWorld
from pooch.torchtools.calls import compiled_of
from pooch.torchtools.memory_trace import live_tensors
from pooch.torchtools.watch import LIBRARY


@pytest.fixture(params=["natively", "in Python"], autouse=True)
def _found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By native code, where that is there, and without."""
    library = LIBRARY.get() if request.param == "natively" else None
    if request.param == "natively" and library is None:
        pytest.skip("there is no native code")
    monkeypatch.setattr(found_by, "_natively", None if library is None else library.objects_of)


class Kind:
    def __init__(self) -> None:
        self.itself = self  # so that it is tracked


class Derived(Kind): ...


class Odd(type):
    """Makes classes that have no hash."""

    __hash__ = None  # type: ignore[assignment]


class OfAnOddOne(Derived, metaclass=Odd): ...


class Claims:
    """Passes for another class, and notes each time that this is asked for."""

    asked: list[str]

    def __init__(self) -> None:
        self.asked = []

    @property
    def __class__(self) -> Any:
        self.asked.append("class")
        return Kind


def test_all_of_a_type_and_of_types_derived_from_it_are_found() -> None:
    gc.collect()
    there = [Kind(), Derived(), OfAnOddOne()]
    other = Claims()
    assert {id(each) for each in live_objects(Kind)} == {id(each) for each in there}
    assert {id(each) for each in live_objects(Derived)} == {id(each) for each in there[1:]}
    assert other.asked == []


def test_what_a_program_has_frozen_is_found_and_what_nobody_looks_for_stays_frozen() -> None:
    class Own:
        pass

    there = [Own() for _ in range(3)]
    freeze_known()
    frozen = gc.get_freeze_count()
    assert live_objects(Own) == []
    assert gc.get_freeze_count() > frozen / 2  # some may have ended
    there.append(Own())
    gc.freeze()  # as a program does before it forks, or to have less looked through
    assert {id(each) for each in live_objects(Own)} == {id(each) for each in there}
    assert gc.get_freeze_count() == 0


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    return OptimizerStates((), ()).optimizers_of(set(map(id, model.parameters())))


def fake_bytes(model: nn.Module) -> int:
    world = FakeWorld()
    fake = world.as_fake(torch.ones(3))
    return world.live_bytes() * fake.numel()


WALKS: dict[str, Callable[[nn.Module], Any]] = {
    "tensors": lambda model: live_tensors(),
    "fake tensors": fake_bytes,
    "optimizers": optimizers_of,
    "compiled models": lambda model: compiled_of([model]),
}


@pytest.mark.parametrize("walk", WALKS)
def test_no_other_object_is_held_where_threads_can_switch(walk: str) -> None:
    """Python switches between threads before an operation of Python code only, so counts are taken there."""
    model = nn.Linear(2, 2)
    optimizer, compiled = torch.optim.SGD(model.parameters()), torch.compile(model, backend="eager")
    other, counts = [object()], []  # such as the tuple that another thread is just filling

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        counts.append(sys.getrefcount(other))
        return look

    before, traced = sys.getrefcount(other), sys.gettrace()
    sys.settrace(look)
    try:
        found = WALKS[walk](model)
    finally:
        sys.settrace(traced)
    assert found
    assert len(counts) > 20
    assert set(counts) == {before}
    del optimizer, compiled


class Other:
    def __init__(self) -> None:
        self.itself = self


class DerivedOther(Other): ...


class Absent: ...


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often everything is looked through: one entry for each time."""
    made, look = list[int](), gc.get_objects

    def get_objects(generation: int | None = None) -> list[Any]:
        made.append(1)
        return look(generation)

    monkeypatch.setattr(gc, "get_objects", get_objects)
    return made


def test_one_look_finds_all_types_that_are_to_be_noted(looks: list[int]) -> None:
    kinds, others = [Kind(), Derived()], [Other(), DerivedOther()]
    with noting(Other, Absent):
        assert {*map(id, kinds)} <= {*map(id, live_objects(Kind))}
        assert {*map(id, others)} <= {*map(id, live_objects(Other))}
        assert live_objects(Absent) == []
        assert len(looks) == 1
        live_objects(Kind)
        assert len(looks) == 2, "what is not noted is looked for each time"
    live_objects(Other)
    assert len(looks) == 3


def test_what_is_noted_is_not_held(looks: list[int]) -> None:
    other = Other()
    with noting(Other):
        assert any(each is other for each in live_objects(Other))
        remaining = len(live_objects(Other))
        other.__dict__.clear()  # it held itself
        del other
        assert len(live_objects(Other)) == remaining - 1
        assert len(looks) == 1


def test_a_budget_begins_with_one_look(looks: list[int]) -> None:
    """With large libraries loaded, a look takes as long as a step."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    looks.clear()
    with pooch.auto(model, "1GiB", tell=lambda _: None) as auto:
        assert len(looks) == 1
        states = auto._persistence.states
        assert states.bytes_to_come([model]) == 2 * sum(each.nbytes for each in model.parameters())
        assert len(looks) == 1
    del optimizer

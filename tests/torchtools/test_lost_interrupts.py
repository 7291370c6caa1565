"""Ctrl-C that Python would print and forget."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import pooch
from pooch.executor import native_watch
from pooch.executor.records import Handle
from pooch.machine import StepLock, Value
from pooch.torchtools import lost_interrupts, watch
from pooch.torchtools.cpu_allocator.counting import CountingAllocator, counting_allocator
from pooch.torchtools.lost_interrupts import _Unraisable
from pooch.torchtools.stand_ins import Place, StandIns


class ToldInWords:
    """What Python tells of an error from 3.13 and 3.14 on: the function is in the text of the message alone."""

    def __init__(self, unraisable: Any) -> None:
        self.exc_type, self.exc_traceback = unraisable.exc_type, unraisable.exc_traceback
        is_of_native_handle = getattr(unraisable.object, "__name__", None) == "ended"  # which Pooch tells of itself
        is_of_tracer = self.exc_traceback.tb_frame.f_code.co_name == "interrupt"  # 3.11, as a function returns
        self.object = unraisable.object if is_of_native_handle or is_of_tracer else None


@pytest.fixture(params=["as the function", "in words"])
def printed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Python prints, while Pooch is in use."""
    found: list[Any] = []
    if request.param == "in words":
        called = lost_interrupts._called  # which is over when the interrupt is raised again
        monkeypatch.setattr(lost_interrupts, "_called", lambda unraisable: called(ToldInWords(unraisable)))
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(unraisable.exc_type))
    stand_in, user = StandIns(Place(sys, "unraisablehook", _Unraisable)), Owner()
    stand_in.use(user)
    yield found
    stand_in.leave(user)
    assert not isinstance(sys.unraisablehook, _Unraisable)


def raising(error: type[BaseException]) -> Callable[[object], None]:
    def ended(record: object) -> None:
        raise error

    ended.__module__ = Handle.__module__  # as what is called for Pooch
    return ended


class Owner:
    """What a finalizer waits for."""


class Interrupted(set[Any]):
    """The references of a weak collection."""

    def discard(self, reference: Any) -> None:
        raise KeyboardInterrupt


def wait_for(action: Callable[[], None]) -> None:
    action()
    for _ in range(10):
        pass


def drop_a_handle(error: type[BaseException]) -> None:
    drop(Handle, error)


def drop_a_native_handle(error: type[BaseException]) -> None:
    module = watch.LIBRARY.get()
    assert module is not None
    drop(module.Handle, error)


def drop(kind: Any, error: type[BaseException]) -> None:
    kind(None, Value(0), torch.ones(2), raising(error))
    for _ in range(10):
        pass


@pytest.mark.parametrize("drop_one", [drop_a_handle, drop_a_native_handle])
def test_what_comes_in_a_destructor_of_ours_is_raised_after_it(drop_one: Any, printed: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        drop_one(KeyboardInterrupt)
    assert printed == []


def test_what_comes_in_a_finalizer_is_raised_after_it(printed: list[Any]) -> None:
    handle = Owner()
    weakref.finalize(handle, raising(KeyboardInterrupt), None)
    owners = [handle]
    del handle
    with pytest.raises(KeyboardInterrupt):
        wait_for(owners.clear)
    assert printed == []


def test_what_comes_as_a_weak_collection_lets_go_is_raised_after_it(printed: list[Any]) -> None:
    owners = [Owner()]
    weak = weakref.WeakSet(owners)
    weak.data = Interrupted(weak.data)
    with pytest.raises(KeyboardInterrupt):
        wait_for(owners.clear)
    assert printed == []


def test_other_errors_are_printed_as_ever(printed: list[Any]) -> None:
    drop_a_handle(ValueError)
    assert printed == [ValueError]


def test_what_comes_in_a_destructor_of_the_program_is_printed_as_ever(printed: list[Any]) -> None:
    class Theirs:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    Theirs()
    assert printed == [KeyboardInterrupt]


@pytest.mark.parametrize("event", ["call", "return"])
def test_what_comes_as_an_allocation_asks_for_room_is_raised_once(event: str, printed: list[Any]) -> None:
    """Of two errors, the second would end the next step of a program that goes on after the first."""
    allocator = counting_allocator()
    assert isinstance(allocator, CountingAllocator), allocator
    assert allocator.install("a test")
    asked: list[int] = []

    def interrupt(frame: FrameType, found: str, argument: object) -> Any:
        if frame.f_code is CountingAllocator._ask.__code__ and found == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    allocator.set_limit(allocator.live_bytes(), asked.append)
    allocator.ask_for_room(True)
    try:
        sys.settrace(interrupt)
        wait_for(lambda: asked.append(torch.ones(1000).numel()))
        sys.settrace(None)
        with pytest.raises(KeyboardInterrupt):
            allocator.raise_failure()
        allocator.raise_failure()
    finally:
        sys.settrace(None)
        allocator.ask_for_room(False)
        allocator.lift_limit()
        allocator.remove("a test")
    assert asked == [4000, 1000]
    assert printed == []


@pytest.mark.parametrize("way", ["auto", "apply"])
def test_it_ends_a_backward_pass(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    rows = torch.randn(256, 64)
    monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # Python ends the handles

    def step() -> torch.Tensor:
        loss = model(rows).square().mean()
        loss.backward()
        model.zero_grad()
        return loss.detach()

    if way == "auto":
        run: Any = pooch.auto(model, "60%", tell=lambda _: None)
    else:
        profile = pooch.profile(lambda: model(rows).square().mean(), model)
        run = pooch.apply(pooch.plan(profile, "70%"), model)
    assert isinstance(sys.unraisablehook, _Unraisable)
    expected, real, calls = step(), StepLock.end, [0]

    def once(lock: StepLock, value: Value) -> None:
        real(lock, value)
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt

    once.__module__ = StepLock.__module__
    monkeypatch.setattr(StepLock, "end", once)
    with pytest.raises(KeyboardInterrupt):
        step()
    monkeypatch.undo()
    model.zero_grad()
    assert torch.equal(step(), expected)
    run.remove()

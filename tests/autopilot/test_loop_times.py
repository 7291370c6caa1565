"""What a step of a loop takes beside its forward and backward pass, as measured by a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from pooch.autopilot import loop_times
from pooch.autopilot.loop_times import MEASURED_STEPS, SETTLING_STEPS, Beside, LoopTimes


class Clock:
    """A clock that stands still, and what was waited for by then."""

    def __init__(self) -> None:
        self.now_ms = self.stall_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1000

    def passes(self, ms: float, *, stall_ms: float = 0.0) -> None:
        self.now_ms += ms
        self.stall_ms += stall_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(loop_times, "time", found)
    return found


class Loop:
    """A loop whose optimizer steps in slices of 10 ms, each of which 4 ms wait for copies, and 3 and 2 ms around it."""

    def __init__(self, clock: Clock, *, slices: int = 2, untimed: str = "") -> None:
        self.clock, self.slices = clock, slices
        self.times = LoopTimes(lambda: clock.stall_ms, untimed)
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
        self._before, self._after = self.times.before(self._takes(3)), self.times.after(self._takes(2))

    def _takes(self, ms: float) -> Callable[[Sequence[torch.Tensor]], None]:
        return lambda _: self.clock.passes(ms)

    def optimizer_steps(self) -> None:
        self.times.optimizer_steps(self.optimizer)
        for _ in range(self.slices):
            self._before([])
            self.clock.passes(10, stall_ms=4)
            self._after([])
        self.clock.passes(1)
        self.times.optimizer_stepped(self.optimizer)

    def step(self, *, waited_ms: float = 0.0) -> None:
        self.times.step_begins()
        self.times.waited(waited_ms)
        self.optimizer_steps()


def rounded(beside: Beside) -> tuple[float, float, float]:
    return round(beside.optimizer_ms, 6), round(beside.moving_ms, 6), round(beside.within_ms, 6)


def test_all_but_what_slices_compute_is_moving(clock: Clock) -> None:
    loop = Loop(clock)
    loop.optimizer_steps()
    assert rounded(loop.times.take()) == (2 * 6, 2 * (3 + 4 + 2) + 1, 0)
    assert loop.times.moving_in_optimizers_ms == pytest.approx(19)
    assert loop.times.take() == Beside()


def test_a_step_that_is_not_sliced_only_computes(clock: Clock) -> None:
    loop = Loop(clock, slices=0)
    loop.optimizer_steps()
    assert rounded(loop.times.take()) == (1, 0, 0)


def test_a_step_of_the_loop_within_that_of_the_optimizer_is_not_counted_twice(clock: Clock) -> None:
    loop = Loop(clock)
    loop.times.optimizer_steps(loop.optimizer)
    loop.times.step_begins()
    loop.times.optimizer_stepped(loop.optimizer)
    assert loop.times.take() == Beside()


def test_moving_is_known_once_it_has_settled(clock: Clock) -> None:
    loop = Loop(clock)
    loop.times.moves = True
    what = "what moving parameters, gradients and the optimizer's state takes"
    for number in range(SETTLING_STEPS + MEASURED_STEPS - 1):
        loop.step(waited_ms=100 if number < SETTLING_STEPS - 1 else 5)
        assert loop.times.is_measuring
        assert loop.times.beside.moving_ms == 0
        assert loop.times.missing() == f"{what} comes on top, and is still being measured"
        hooks = f"what hooks cost and {what} come on top, and are still being measured"
        assert loop.times.missing(has_hooks=False) == hooks
    loop.step(waited_ms=5)
    assert not loop.times.is_measuring
    assert loop.times.missing() == ""
    assert rounded(loop.times.beside) == (12, 5 + 19, 5), "of steps after everything has left first"


def test_where_nothing_moves_optimizers_are_known_from_their_second_step_on(clock: Clock) -> None:
    loop = Loop(clock, slices=0)
    loop.step()
    clock.passes(50)  # its first step made the state
    loop.step()
    assert loop.times.beside == Beside()
    loop.step()
    assert rounded(loop.times.beside) == (1, 0, 0)
    assert loop.times.missing(has_hooks=False) == "what hooks cost comes on top, and is still being measured"


def test_a_device_that_is_not_waited_for_has_no_times(clock: Clock) -> None:
    loop = Loop(clock, untimed="cuda")
    loop.times.moves = True
    for _ in range(2 * SETTLING_STEPS):
        loop.step(waited_ms=1)
    assert loop.times.beside == Beside()
    assert loop.times.missing().endswith("comes on top, and is not measured on cuda")

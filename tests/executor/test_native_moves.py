"""Values that a plan copies and brings back natively: as in Python, which does what is not simple about them."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.api.evaluation import StageEvaluator
from pooch.api.hooked import dataflow_of
from pooch.api.manual import manual_plan
from pooch.executor import Run, apply_plan, native_actions, native_watch
from pooch.executor.engines import cpu
from pooch.executor.native_actions import ActionParts
from pooch.executor.step import Step
from pooch.ir import Plan
from pooch.machine import Lane, StepLock
from pooch.torchtools import watch
from pooch.torchtools.moving_memory import MOVING
from tests.executor.support import all_of, quick_profile, tight_plan

pytestmark = [pytest.mark.cpu]
PROVING_STEPS = 4  # in which what is copied is looked at again before it goes


@pytest.fixture(autouse=True)
def _native() -> None:
    if watch.LIBRARY.get() is None:
        pytest.skip(f"no native watch: {watch.LIBRARY.why_not}")


class Chain(nn.Module):
    """Ops that save what they are given, which nothing holds after them."""

    def __init__(self, ops: int = 6) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(0.1, 1.0, 256))
        self.ops = ops
        self.in_the_middle: Callable[[], None] | None = None

    def forward(self, scale: Tensor) -> Tensor:
        hidden = self.start * scale
        for number in range(self.ops):
            if self.in_the_middle is not None and number == self.ops // 2:
                self.in_the_middle()
            hidden = hidden.sin()
            hidden = hidden.cos()
        return hidden.sum()


def swapping(model: nn.Module, scale: Tensor) -> Plan:
    profile = quick_profile(lambda: model(scale), model)
    return tight_plan(profile, all_of(profile, "swap", "model"), "model")


def gradient(model: Chain | Forked, scale: Tensor) -> Tensor:
    model.start.grad = None
    model(scale).backward()
    assert model.start.grad is not None
    return model.start.grad


def test_values_that_are_only_copied_move_without_python(in_python: Counter[str]) -> None:
    torch.manual_seed(0)
    model, scale = Chain(), torch.rand(256)
    plain = gradient(model, scale)
    plan = swapping(model, scale)
    with apply_plan(plan, model) as run:
        for _ in range(PROVING_STEPS):
            assert torch.equal(gradient(model, scale), plain)
        moved = dict(in_python)
        assert moved["copy_out"] > 0
        in_python.clear()
        assert torch.equal(gradient(model, scale), plain)
        stats = run.stats
    swapped_bytes = 1024 * len(plan.schedule.swapped)
    assert (stats.swapped_out_bytes, stats.swapped_in_bytes) == (swapped_bytes, swapped_bytes)
    assert stats.late_swaps == stats.mismatches == 0
    # The first read of a thread asks for room in Python, and what is not known to be released yet is looked at there.
    assert sum(in_python.values()) <= 4, in_python


@contextmanager
def moved_natively(model: Chain, scale: Tensor) -> Iterator[Run]:
    """A run whose values move natively from here on."""
    with apply_plan(swapping(model, scale), model) as run:
        for _ in range(PROVING_STEPS):
            gradient(model, scale)
        yield run


def test_bytes_are_free_between_the_passes() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale) as run:
        loss = model(scale)
        away = [value for value in _planned() if value.storage is None and value.is_copied]
        assert len(away) >= len(run.plan.schedule.swapped) - 2
        loss.backward()


def _latest_step() -> Step:
    steps = [each for each in gc.get_objects() if isinstance(each, Step) and each.guide is not None]
    return max(steps, key=lambda each: each.begin)


def _planned() -> list[Any]:
    """The planned values of the latest step."""
    guide = _latest_step().guide
    assert guide is not None
    return list(guide.values.planned.values())


@pytest.mark.parametrize("reads", [False, True])
def test_the_end_of_a_graph_frees_everything(reads: bool) -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        loss = model(scale)
        values = _planned()
        if reads:
            loss.backward()
        del loss
        assert all(value.storage is None and value.handles == 0 for value in values)


def test_what_was_written_over_is_an_error() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.changes = nn.Parameter(torch.linspace(0.1, 1.0, 256)), False

        def forward(self, scale: Tensor) -> Tensor:
            hidden = (self.start * scale).sin()
            result = hidden.cos().exp().sin().sum()
            if self.changes:
                with torch.no_grad():
                    hidden.mul_(2)
            return result

    changing, scale = Changing(), torch.rand(256)
    plan = swapping(changing, scale)
    with apply_plan(plan, changing):
        for _ in range(PROVING_STEPS):
            changing(scale).backward()
        changing.changes = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changing(scale).backward()


def test_a_second_backward_pass_reads_the_same() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        loss = model(scale)
        (first,) = torch.autograd.grad(loss, model.start, retain_graph=True)
        (second,) = torch.autograd.grad(loss, model.start)
        assert torch.equal(first, second)


def test_another_thread_that_holds_the_lock_is_waited_for(in_python: Counter[str]) -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        expected = gradient(model, scale)
        held, release = threading.Event(), threading.Event()

        def hold(lock: StepLock) -> None:
            with lock:
                held.set()
                release.wait(60)

        def in_the_middle() -> None:
            threading.Thread(target=hold, args=(_latest_step().lock,)).start()
            held.wait(60)
            threading.Timer(0.05, release.set).start()

        in_python.clear()
        model.in_the_middle = in_the_middle
        assert torch.equal(gradient(model, scale), expected)
        assert in_python["copy_out"] + in_python["hold"] >= 1  # one of them has waited there, and the rest has not
        assert in_python["hold"] <= 2


def test_copies_that_have_ended_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "FIRST_LOOK", 4)
    arenas: list[cpu.CpuArena] = []
    forget = cpu.CpuArena.forget_ended
    monkeypatch.setattr(cpu.CpuArena, "forget_ended", lambda arena: arenas.append(arena) or forget(arena))  # type: ignore[func-returns-value]
    model, scale = Chain(12), torch.rand(256)
    with moved_natively(model, scale):
        arenas.clear()
        gradient(model, scale)
        assert arenas


def test_what_is_asked_for_is_what_is_given() -> None:
    """The native part asks for its parts by name."""
    with pytest.raises(AttributeError):
        watch.LIBRARY.get().Moves(_region(), object())  # type: ignore[union-attr]
    fields = ActionParts.__dataclass_fields__
    given = type("Parts", (), {**dict.fromkeys(fields, None), "planned": {0: object()}})()
    with pytest.raises(AttributeError, match="handles"):
        watch.LIBRARY.get().Moves(_region(), given)  # type: ignore[union-attr]


def _region() -> Any:
    path = watch.path([(0,)], [None], [False], [False], [False], [0], [0], [], [])
    return watch.region(path, watch.storage_map())


def test_a_profile_of_the_program_shows_moves_by_name() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        with torch.profiler.profile() as profiler:
            gradient(model, scale)
        names = [event.name for event in profiler.events()]
        assert any(name.startswith("pooch: copy out") for name in names)
        assert any(name.startswith("pooch: copy in") for name in names)


def test_what_the_program_has_the_address_of_is_looked_at(in_python: Counter[str]) -> None:
    model, scale = Chain(), torch.rand(256)

    def hand_out() -> None:
        for value in _planned():
            value.handed_out = True

    with moved_natively(model, scale):
        expected = gradient(model, scale)
        in_python.clear()
        model.in_the_middle = hand_out
        assert torch.equal(gradient(model, scale), expected)
        assert in_python["copy_out"] > 0


def test_what_packing_spares_is_counted() -> None:
    model, scale = Chain(), torch.zeros(256)
    with moved_natively(model, scale) as run:
        gradient(model, scale)
        assert run.stats.spared_bytes > 0


def test_the_times_of_copies_are_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: Counter[tuple[int, str]] = Counter()
    note = Lane.note

    def noting(lane: Lane, size_bytes: int, copy_ms: float, copies: int = 1) -> None:
        learned[id(lane), "copies"] += copies
        learned[id(lane), "bytes"] += size_bytes
        learned[id(lane), "calls"] += 1
        assert copy_ms > 0
        note(lane, size_bytes, copy_ms, copies)

    model, scale = Chain(40), torch.rand(256)
    with moved_natively(model, scale) as run:
        monkeypatch.setattr(Lane, "note", noting)
        loss = model(scale)
        copies, speed = len(run.plan.schedule.swapped), _latest_step().evictor.store.speed
        loss.backward()
    for lane in (speed.out, speed.back):
        assert copies // 4 <= learned[id(lane), "copies"] <= copies
        assert learned[id(lane), "bytes"] == 1024 * learned[id(lane), "copies"]
        assert learned[id(lane), "calls"] < copies // 4


@pytest.mark.parametrize("when", ["in the forward pass", "between the passes"])
def test_values_that_pressure_knows_are_left_to_it(when: str) -> None:
    model, scale = Chain(), torch.rand(256)

    def everything_leaves() -> None:
        _latest_step().evictor.relieve()

    with moved_natively(model, scale):
        expected = gradient(model, scale)
        model.in_the_middle = everything_leaves if when == "in the forward pass" else None
        loss = model(scale)
        if when == "between the passes":
            everything_leaves()
        model.start.grad = None
        loss.backward()
        assert torch.equal(model.start.grad, expected)


def test_no_copy_is_begun_natively_where_memory_is_about_to_move(in_python: Counter[str]) -> None:
    model, scale = Chain(), torch.rand(256)

    def moving() -> None:
        MOVING.depth = 1

    try:
        with moved_natively(model, scale):
            expected = gradient(model, scale)
            in_python.clear()
            model.in_the_middle = moving
            loss = model(scale)
            MOVING.depth = 0
            assert in_python["copy_out"] > 0
            model.start.grad = None
            loss.backward()
            assert torch.equal(model.start.grad, expected)
    finally:
        MOVING.depth = 0


class Forked(nn.Module):
    """Values that are copied, which the backward pass reads first, and then to replay what was made from them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(0.1, 1.0, 256))

    def forward(self, scale: Tensor) -> Tensor:
        return torch.stack([self._part((self.start * scale).sin()) for _ in range(3)]).sum()

    @staticmethod
    def _part(swapped: Tensor) -> Tensor:
        sine = (swapped + 1).sin()
        return (sine + swapped.cos()).sum()


def forked_plan(model: Forked, scale: Tensor) -> Plan:
    profile = quick_profile(lambda: model(scale), model)
    dataflow = dataflow_of(profile, "model", hooked=True)
    decisions = all_of(profile, "swap", "model")
    made_by = {number: op.name for op in profile.ops for number in op.writes}
    decisions |= {number: "recompute" for number in decisions if made_by[number] == "aten.add.Tensor"}
    budgets = range(0, profile.peak_bytes, 512)  # what is emptied while the program holds it moves in Python
    plans = (manual_plan(dataflow, StageEvaluator(dataflow).evaluate(decisions, each), decisions) for each in budgets)
    plan = next(each for each in plans if "empty" not in {action.kind for action in each.schedule.actions})
    dropped = {action.target for action in plan.schedule.actions if action.kind == "drop"}
    assert dropped & set(plan.schedule.swapped)
    return plan


def test_values_that_replays_read_after_autograd_move_without_python(
    in_python: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scale = Forked(), torch.rand(256)
    plan, plain = forked_plan(model, scale), gradient(model, scale)
    found = []
    for moves in (native_actions.native_actions, lambda *_: None):
        monkeypatch.setattr(native_watch, "native_actions", moves)
        with apply_plan(plan, model) as run:
            for _ in range(PROVING_STEPS):
                assert torch.equal(gradient(model, scale), plain)
            in_python.clear()
            assert torch.equal(gradient(model, scale), plain)
            found.append((run.stats, dict(in_python)))
    (native, calls), (stats, in_full) = found
    assert native.recomputed_ops == 3
    assert (native.swapped_out_bytes, native.late_swaps) == (stats.swapped_out_bytes, 0)
    assert native.swapped_in_bytes == stats.swapped_in_bytes == native.swapped_out_bytes
    assert not calls.keys() & {"copy_out", "free"}
    assert in_full["copy_out"] == in_full["free"] == len(plan.schedule.swapped)
    assert not calls.keys() & {"hold", "replay", "put", "drop"}, "nor are those that are replayed"
    assert in_full["replay"] == 3

"""Values that a plan copies and brings back natively: as in Python, which does what is not simple about them."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import Run, apply_plan
from pooch.executor.engines import cpu
from pooch.executor.planned_values import PlannedValues
from pooch.executor.simple_moves import SimpleMoves
from pooch.executor.step import Step
from pooch.ir import Plan
from pooch.torchtools import watch
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

    def forward(self, scale: Tensor) -> Tensor:
        hidden = self.start * scale
        for _ in range(self.ops):
            hidden = hidden.sin()
            hidden = hidden.cos()
        return hidden.sum()


def swapping(model: nn.Module, scale: Tensor) -> Plan:
    profile = quick_profile(lambda: model(scale), model)
    return tight_plan(profile, all_of(profile, "swap", "model"), "model")


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is done in Python to values that move."""
    counted: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for name in ("copy_out", "free", "copy_in", "wait", "hold", "released"):
        count(PlannedValues, name)
    count(Step, "read")
    return counted


def gradient(model: Chain, scale: Tensor) -> Tensor:
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
        away = [value for value in _planned(loss) if value.storage is None and value.is_copied]
        assert len(away) >= len(run.plan.schedule.swapped) - 2
        loss.backward()


def _planned(loss: Tensor) -> list[Any]:
    """The planned values of the step that a loss is of."""
    steps = [each for each in gc.get_objects() if isinstance(each, Step) and each.guide is not None]
    guide = max(steps, key=lambda each: each.begin).guide
    assert guide is not None
    return list(guide.values.planned.values())


def test_the_end_of_a_graph_frees_everything() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        loss = model(scale)
        values = _planned(loss)
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
        loss = model(scale)
        steps = [each for each in gc.get_objects() if isinstance(each, Step) and each.guide is not None]
        lock = max(steps, key=lambda each: each.begin).lock
        del steps
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                release.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(60)
        in_python.clear()
        reading = threading.Timer(0.05, release.set)
        reading.start()
        model.start.grad = None
        loss.backward()
        holder.join()
        assert torch.equal(model.start.grad, expected)
        assert in_python["read"] >= 1  # it has waited there


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
    fields = SimpleMoves.__dataclass_fields__
    given = type("Parts", (), {**dict.fromkeys(fields, None), "planned": {0: object()}})()
    with pytest.raises(AttributeError, match="handles"):
        watch.LIBRARY.get().Moves(_region(), given)  # type: ignore[union-attr]


def _region() -> Any:
    path = watch.path([(0,)], [False], [False], [False], [0], [0], [], [])
    return watch.region(path, watch.storage_map())


def test_a_profile_of_the_program_shows_moves_by_name() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        with torch.profiler.profile() as profiler:
            gradient(model, scale)
        names = [event.name for event in profiler.events()]
        assert any(name.startswith("pooch: copy out") for name in names)
        assert any(name.startswith("pooch: copy in") for name in names)


def test_values_that_pressure_knows_are_left_to_it() -> None:
    model, scale = Chain(), torch.rand(256)
    with moved_natively(model, scale):
        expected = gradient(model, scale)
        loss = model(scale)
        steps = [each for each in gc.get_objects() if isinstance(each, Step) and each.guide is not None]
        latest = max(steps, key=lambda each: each.begin)
        latest.evictor.relieve()
        del steps
        model.start.grad = None
        loss.backward()
        assert torch.equal(model.start.grad, expected)

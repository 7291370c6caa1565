"""Copies that fail, tiers without room, ops at once, and memory: right results or a clear error, and nothing kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pooch.errors import TierError
from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.engines.spill_file import Mover
from pooch.executor.evictor import Evictor
from pooch.executor.mode import following
from pooch.executor.recording import CallRecorder
from pooch.executor.statistics import RunStats
from pooch.executor.step import Step
from tests.executor.online.support import copies_cost, holding, run_online, run_plainly, without_collector
from tests.executor.online.zoo import Cube, Layers, layers, rows
from tests.executor.support import assert_same

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by", "copied_in_python")]
STACK = layers(lambda hidden: Cube.apply(torch.tanh(hidden)))


@pytest.fixture(autouse=True)
def copies_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e-9)


def failing(monkeypatch: pytest.MonkeyPatch, name: str, times: int = 10**9) -> list[int]:
    """Have the first copies of one kind fail, and count them."""
    real, failed = getattr(Mover, name), []

    def fail(self: Mover, storage: torch.UntypedStorage, offset_bytes: int, buffer: object) -> None:
        if len(failed) < times:
            failed.append(offset_bytes)
            raise TierError("the disk is broken")
        real(self, storage, offset_bytes, buffer)

    monkeypatch.setattr(Mover, name, fail)
    return failed


def test_a_failed_write_keeps_the_value_or_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plainly(STACK)
    failed = failing(monkeypatch, "write")
    with pytest.warns(UserWarning, match="the disk is broken"):
        seen = run_online(STACK, plain.peak_bytes // 2)
    assert_same(plain.found, seen.found)
    assert failed
    assert seen.stats.recomputed_ops
    assert seen.peak_bytes <= plain.peak_bytes // 2 + seen.missing_bytes


def test_values_that_can_neither_be_written_nor_replayed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    make = layers(lambda hidden: functional.dropout(torch.tanh(hidden), 0.1))
    monkeypatch.setattr(CallRecorder, "_keep", lambda *_: None)
    plain = run_plainly(make)
    failing(monkeypatch, "write")
    with pytest.warns(UserWarning, match="the disk is broken"):
        seen = run_online(make, plain.peak_bytes // 2)
    assert_same(plain.found, seen.found)
    assert seen.missing_bytes
    assert seen.stats.recomputed_ops == 0


def test_a_failed_read_is_an_error_and_never_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second time, when the memory that was to be filled is there. After that the bytes are read after all."""
    with holding() as evictor:
        torch.manual_seed(5)
        model, inputs = Layers(torch.tanh), rows()
        model(inputs).square().mean().backward()
        plain = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        evictor.begin_step(RunStats())
        step = Step(evictor)
        with following(step):
            loss = model(inputs).square().mean()
        evictor.make_room(2**40)
        failed = failing(monkeypatch, "read", times=2)
        for _ in range(2):
            with pytest.raises(TierError, match="cannot be read back") as caught:
                loss.backward(retain_graph=True)
            assert "\n" not in str(caught.value)
            model.zero_grad()
        del caught
        loss.backward()
        assert len(failed) == 2
        assert all(map(torch.equal, plain, [p.grad for p in model.parameters()]))


class FullTier(CpuEngine):
    """Has room for nothing."""

    def open_arena(self, size_bytes: int, purpose: object = "step") -> object:  # type: ignore[override]
        if size_bytes:
            raise TierError("no room")
        return super().open_arena(0)


def test_without_room_in_the_tier_values_are_replayed_or_stay() -> None:
    plain = run_plainly(STACK)
    seen = run_online(STACK, plain.peak_bytes // 2, FullTier())
    assert_same(plain.found, seen.found)
    assert seen.stats.swapped_out_bytes == 0
    assert seen.stats.recomputed_ops
    assert seen.peak_bytes <= plain.peak_bytes // 2 + seen.missing_bytes


def test_the_host_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real, host_bytes = Evictor.__init__, 40_000
    copies_cost(monkeypatch, 1e-9)
    monkeypatch.setattr(Evictor, "__init__", lambda self, *arguments: real(self, *arguments, host_bytes))
    plain = run_plainly(STACK)
    seen = run_online(STACK, plain.peak_bytes // 2)
    assert_same(plain.found, seen.found)
    assert 0 < seen.stats.swapped_out_bytes <= host_bytes


def test_an_in_place_change_after_saving_is_pytorchs_error() -> None:
    def changed(region: bool) -> str:
        with holding() as evictor:
            evictor.begin_step(RunStats())
            leaf = torch.ones(1000, requires_grad=True)
            with following(Step(evictor)) if region else _nothing():
                saved = leaf.exp()
                loss = saved.sum()
                if region:
                    evictor.write_ahead()
                saved.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                loss.backward()
            return type(caught.value).__name__

    assert changed(True) == changed(False)


def test_an_in_place_change_after_the_region_is_pytorchs_error() -> None:
    with holding() as evictor:
        evictor.begin_step(RunStats())
        leaf = torch.ones(1000, requires_grad=True)
        with following(Step(evictor)):
            saved = leaf.exp()
            loss = saved.sum()
        saved.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_of_ops_that_overlap_none_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an op that ends while another runs would be replayed as that one."""
    copies_cost(monkeypatch, 1e9)
    first_runs, second_runs, first_ended = threading.Event(), threading.Event(), threading.Event()

    @torch.library.custom_op("pooch_tests::first", mutates_args=())
    def first(argument: Tensor) -> Tensor:
        first_runs.set()
        assert second_runs.wait(60)
        return argument.sin()

    @torch.library.custom_op("pooch_tests::second", mutates_args=())
    def second(argument: Tensor) -> Tensor:
        second_runs.set()
        assert first_ended.wait(60)
        return argument.cos()

    first.register_autograd(lambda ctx, gradient: gradient)

    with holding() as evictor:
        evictor.begin_step(RunStats())
        step = Step(evictor)
        leaf = torch.rand(1000, requires_grad=True)

        def beside() -> None:
            first_runs.wait(60)
            with following(step):
                second(leaf.detach())

        thread = threading.Thread(target=beside)
        thread.start()
        with following(step):
            hidden = first(leaf)
            first_ended.set()
            loss = hidden.exp().sum() + hidden.square().sum()
        thread.join()
        expected = leaf.detach().sin()
        del hidden
        evictor.make_room(2**40)
        loss.backward()
        assert evictor.stats.swapped_out_bytes
        assert torch.equal(leaf.grad, expected.exp() + 2 * expected)


def test_nothing_is_left_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copies_cost(monkeypatch, 1e-9)
    plain = run_plainly(STACK)
    with holding() as evictor, without_collector():
        model, inputs = Layers(lambda hidden: Cube.apply(torch.tanh(hidden))), rows()
        found: list[weakref.ref[object]] = []
        live: list[int] = []
        for number in range(200):
            start_bytes = evictor.live.now()
            evictor.set_budget(start_bytes + plain.peak_bytes // 2)
            evictor.begin_step(RunStats())
            step = Step(evictor)
            found.append(weakref.ref(step))
            with following(step):
                loss = model(inputs).square().mean()
            found += map(weakref.ref, evictor._values)
            del step
            if number % 10:  # some graphs are dropped without a backward pass
                loss.backward()
            del loss
            model.zero_grad()
            assert evictor.stats.swapped_out_bytes
            live.append(evictor.live.now())
        assert evictor._values == {}
        assert [each for each in found if each() is not None] == []
        assert len(set(live)) == 1
        assert len(evictor.engine._free["step"]) == 1  # the file of one step, used by each after the other
        assert not evictor.engine._in_use


def test_whoever_looks_at_all_objects_of_the_process_meets_nothing_that_is_dead() -> None:
    """People look for tensors so, and `isinstance` fails on a proxy of what is gone."""
    before = {id(each) for each in gc.get_objects() if type(each) in weakref.ProxyTypes}
    run_online(STACK, 2**20)
    gc.disable()
    try:
        after = [each for each in gc.get_objects() if type(each) in weakref.ProxyTypes and id(each) not in before]
    finally:
        gc.enable()
    assert after == []

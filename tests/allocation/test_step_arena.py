"""Training on an arena: the same bits as without one, whatever the steps do, and the arena serves."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import pooch
from pooch.allocation import ArenaOptions, StepArena, blocks_of, common_step, open_arena
from pooch.allocation.blocks import calls_that_repeat, part_of
from pooch.api.arenas import arena_for
from pooch.errors import UsageError
from pooch.executor import apply_plan
from pooch.packing import Block, pack
from pooch.torchtools.cpu_allocator import ALIVE, RecordedStep
from pooch.torchtools.memory_meter import MemoryMeter
from tests.allocation.support import WATCHED, Training, a_training, an_arena
from tests.children import child_environment
from tests.executor.support import mixed, quick_profile, tight_plan

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(180)]

Act = Callable[[Training, int], None]


def plain_step(training: Training, number: int) -> None:
    training.step()


def trained(act: Act, steps: int, arena: StepArena | None = None) -> list[bytes]:
    """What every step of a training left. It waits for packing, so that which step is served does not vary."""
    training = a_training()
    for number in range(steps):
        if arena is not None:
            arena.wait()
            arena.begin_step()
        act(training, number)
    training.trace += [p.detach().numpy().tobytes() for p in training.model.parameters()]
    training.trace += [b.numpy().tobytes() for b in training.model.buffers()]
    return training.trace


def served_alike(act: Act, steps: int = 14, options: ArenaOptions = WATCHED) -> Any:
    """Train with and without an arena, compare all bits, and return the arena's statistics before it was closed."""
    expected = trained(act, steps)
    with an_arena(options) as arena:
        actual = trained(act, steps, arena)
        stats = arena.stats
        assert arena.recorded is not None
        assert len(blocks_of(arena.recorded)) == stats.blocks
    assert actual == expected
    assert stats.counters.placed > 0
    return stats


def test_steps_are_served_and_leave_the_same_bits() -> None:
    stats = served_alike(plain_step)
    assert stats.state == "serving"
    assert stats.counters.steps == 14 - 4  # a warm one, two recorded, one that packed beside it
    assert stats.counters.fallbacks == 0
    assert stats.share_placed == 1.0
    assert stats.arena_bytes >= stats.bound_bytes > 100_000
    assert stats.counters.placed_bytes > 20 * stats.counters.other_bytes
    assert "100.00% of requests at their place" in stats.line()


@pytest.mark.parametrize("region", ["model", "step"])
def test_a_plan_on_an_arena_leaves_the_same_bits(region: Any) -> None:
    expected = a_training()
    for _ in range(10):
        expected.step()
    training = a_training()
    profile = quick_profile(lambda: training.model(training.data).square().mean(), training.model, training.optimizer)
    plan = tight_plan(profile, mixed(profile, region), region)
    with an_arena() as arena, apply_plan(plan, training.model, memory=arena, measure_every=None) as run:
        for _ in range(10):
            arena.wait()
            with run.forward_region():
                loss = training.model(training.data).square().mean()
            loss.backward()
            training.finish(loss)
            assert run.stats.recomputed_ops > 0
            assert run.stats.swapped_in_bytes > 0
        stats = run.totals.arena
        assert stats is not None
        assert stats.state == "serving"
        assert stats.counters.steps == 6
        assert stats.share_placed > 0.99
    assert training.trace == expected.trace
    assert arena.stats.state == "off"  # the run has closed it


def test_apply_takes_arena() -> None:
    training = a_training()
    profile = quick_profile(lambda: training.model(training.data).square().mean(), training.model, training.optimizer)
    plan = tight_plan(profile, mixed(profile, "model"), "model")
    with pooch.apply(plan, training.model, arena=True) as run:
        training.step()
        assert run.totals.arena is not None
        assert run.totals.arena.state == "waiting"
        training.step()
        assert run.totals.arena.state == "waiting" or run.totals.arena.state == "recording"
        with pytest.raises(UsageError, match="arena already"):
            open_arena(torch.device("cpu"))
    with an_arena():  # the run has let go, though it is still there
        assert run.totals.arena.state == "off"
    with pooch.apply(plan, training.model) as plain_run:
        training.step()
        assert plain_run.totals.arena is None


def test_a_plan_that_cannot_be_applied_leaves_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    training, other = a_training(), torch.nn.Linear(2, 2)
    profile = quick_profile(lambda: training.model(training.data).square().mean(), training.model, training.optimizer)
    plan = tight_plan(profile, mixed(profile, "model"), "model")
    made: list[Any] = []
    monkeypatch.setattr("pooch.api.applying.arena_for", lambda model: made.append(arena_for(model)) or made[0])
    with pytest.raises(pooch.PlanMismatch):
        pooch.apply(plan, other, arena=True)
    assert made[0].stats.state == "off"
    with an_arena():
        pass


# Steps that change ----------------------------------------------------------------------------------------------------


def another_shape(training: Training, number: int) -> None:
    training.step(5 if number in (7, 10) else None)


def test_a_step_of_another_shape_is_right_and_the_next_is_served() -> None:
    stats = served_alike(another_shape)
    assert stats.counters.unrecognised > 10
    per_step = stats.blocks + stats.unplaced_blocks
    assert stats.counters.placed >= 8 * (per_step - stats.unplaced_blocks) * 0.99
    assert stats.layouts == 1


def one_more_op(training: Training, number: int) -> None:
    x = training.data
    if number in (6, 9):
        x = (x * 1.0)[:, :, :23, :23].contiguous()
        x = torch.nn.functional.pad(x, (0, 1, 0, 1))
    loss = training.model(x).square().mean()
    loss.backward()
    training.finish(loss)


def test_one_more_op_costs_a_few_places_only() -> None:
    stats = served_alike(one_more_op)
    assert 0 < stats.counters.fallbacks < 20


def fewer_ops(training: Training, number: int) -> None:
    loss = training.model(training.data).square().mean()
    loss.backward()
    if number == 8:
        training.optimizer.zero_grad()  # and no optimizer's step
    training.finish(loss)


def test_a_step_with_fewer_requests_is_right() -> None:
    served_alike(fewer_ops)


def errors(training: Training, number: int) -> None:
    if number == 7:

        def fail(*_: Any) -> None:
            raise ValueError("in the forward pass")

        hook = training.model[4].register_forward_hook(fail)
        with pytest.raises(ValueError, match="forward"):
            training.step()
        hook.remove()
    elif number == 9:
        out = training.model(training.data)

        def stop(gradient: torch.Tensor) -> None:
            raise ValueError("in the backward pass")

        out.register_hook(stop)
        with pytest.raises(ValueError, match="backward"):
            out.square().mean().backward()
        training.optimizer.zero_grad()
    else:
        training.step()


def test_a_step_that_fails_is_followed_by_right_ones() -> None:
    stats = served_alike(errors)
    assert stats.counters.steps == 10


def test_retained_graphs_keep_their_contents() -> None:
    made: list[Any] = []

    def act(training: Training, number: int) -> None:
        outputs = training.model(training.data)
        loss = outputs.square().mean()
        loss.backward(retain_graph=number % 3 == 2)
        if number % 3 == 2:
            loss.backward()
            made.append((outputs.detach(), outputs.detach().numpy().tobytes()))
        training.finish(loss)

    stats = served_alike(act, steps=20, options=replace(WATCHED, bad_share=1.0))
    assert all(tensor.numpy().tobytes() == contents for tensor, contents in made)
    assert stats.counters.collided > 0  # what was kept has its place


def test_what_is_kept_from_each_step_keeps_its_contents() -> None:
    kept: list[tuple[torch.Tensor, bytes]] = []

    def act(training: Training, number: int) -> None:
        outputs = training.model(training.data)
        loss = outputs.square().mean()
        loss.backward()
        if number > 4:
            hidden = training.model[0](training.data).detach()
            kept.append((hidden, hidden.numpy().tobytes()))
        training.finish(loss)

    stats = served_alike(act, options=replace(WATCHED, bad_share=1.0))
    assert stats.counters.fallbacks > 0
    assert all(tensor.numpy().tobytes() == contents for tensor, contents in kept)


def test_steps_that_have_changed_for_good_are_recorded_again() -> None:
    def act(training: Training, number: int) -> None:
        training.step(None if number < 7 else 4)

    stats = served_alike(act, steps=26, options=replace(WATCHED, bad_steps=3))
    assert (stats.state, stats.layouts) == ("serving", 2)
    assert stats.share_placed == 1.0
    assert stats.counters.steps > 8


def test_steps_that_never_repeat_get_no_arena() -> None:
    rows = "abcacbabcbacabcacbacab"  # no part of it comes twice in a row
    act: Act = lambda training, number: training.step(1 + "abc".index(rows[number]))  # noqa: E731
    expected = trained(act, 20)
    with an_arena(replace(WATCHED, most_recorded=16)) as arena:
        actual = trained(act, 20, arena)
        assert arena.stats.state == "off"
        assert "16 steps did not repeat" in arena.stats.line()
    assert actual == expected


def test_an_arena_whose_steps_keep_changing_is_given_up() -> None:
    def act(training: Training, number: int) -> None:
        training.step(1 + number // 8)

    expected = trained(act, 50)
    with an_arena(replace(WATCHED, bad_steps=2, most_layouts=2)) as arena:
        actual = trained(act, 50, arena)
        assert (arena.stats.state, arena.stats.layouts) == ("off", 2)
        assert "kept changing" in arena.stats.reason
    assert actual == expected


def test_gradients_that_accumulate_are_right() -> None:
    def act(training: Training, number: int) -> None:
        for half in (training.data[:4], training.data[4:]):
            training.model(half).square().mean().backward()
        training.step()

    assert served_alike(act).share_placed == 1.0


def accumulating(calls: int, skipped: int = -1) -> Act:
    """Gradients over so many calls, each of which is told to the arena; one call is left out."""
    made = {"calls": 0}

    def act(training: Training, number: int) -> None:
        if number == 0:
            made["calls"] = 0
        made["calls"] += 2 if number == skipped else 1
        loss = training.model(training.data).square().mean()
        loss.backward()
        if made["calls"] % calls == 0:
            training.finish(loss)

    return act


def test_two_calls_that_accumulate_gradients_are_packed_as_one_step() -> None:
    stats = served_alike(accumulating(2), steps=20)
    assert (stats.state, stats.calls, stats.layouts) == ("serving", 2, 1)
    assert stats.counters.fallbacks == 0
    assert stats.counters.placed_bytes > 20 * stats.counters.other_bytes
    assert "blocks of 2 calls" in stats.line()


def test_three_calls_are_one_step_although_two_ask_for_the_same_sizes() -> None:
    """The gradients of the first stay, and those of the second do not."""
    stats = served_alike(accumulating(3), steps=30)
    assert (stats.state, stats.calls, stats.layouts) == ("serving", 3, 1)
    assert stats.counters.fallbacks == 0


def test_the_middle_of_a_longer_step_is_not_taken_for_a_step_for_long() -> None:
    """Of five calls, the second to fourth are alike."""
    stats = served_alike(accumulating(5), steps=70, options=replace(WATCHED, bad_steps=2))
    assert (stats.state, stats.calls) == ("serving", 5)
    assert stats.layouts > 1
    assert stats.counters.fallbacks == 0


def test_a_call_that_is_left_out_only_costs_places_until_the_end_of_its_step() -> None:
    stats = served_alike(accumulating(2, skipped=16), steps=40)
    assert (stats.state, stats.calls, stats.layouts) == ("serving", 2, 1)
    assert 0 < stats.counters.fallbacks < stats.blocks / 2


def test_a_plain_training_that_accumulates_is_served() -> None:
    training = a_training()
    with pooch.arena(training.model) as arena:
        for number in range(20):
            training.model(training.data).square().mean().backward()
            if number % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()
            arena.wait()
        assert arena.stats is not None
        assert (arena.stats.state, arena.stats.calls) == ("serving", 2)
        assert arena.stats.share_placed == 1.0


def test_gradients_that_stay_are_not_placed() -> None:
    def act(training: Training, number: int) -> None:
        training.model(training.data).square().mean().backward()
        training.trace += [p.grad.numpy().tobytes() for p in training.model.parameters() if p.grad is not None]
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)

    assert served_alike(act).share_placed == 1.0


# Threads, processes, other tools --------------------------------------------------------------------------------------


def test_another_thread_that_computes_beside_is_right() -> None:
    is_over = threading.Event()
    wrong: list[int] = []

    def beside() -> None:
        weights = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64).remainder(7)
        expected = (weights @ weights).clone()
        while not is_over.is_set():
            if not torch.equal(weights @ weights, expected):
                wrong.append(1)

    thread = threading.Thread(target=beside)
    thread.start()
    try:
        stats = served_alike(plain_step)
    finally:
        is_over.set()
        thread.join()
    assert wrong == []
    assert stats.share_placed == 1.0
    assert stats.counters.elsewhere > 0


def test_backward_passes_run_in_the_thread_that_is_served() -> None:
    """Otherwise most of a step would fall back."""
    training, seen = a_training(), set()
    for parameter in training.model.parameters():
        parameter.register_hook(lambda gradient: seen.add(threading.get_ident()))
    training.step()
    assert seen == {threading.get_ident()}


def test_workers_of_a_data_loader_and_their_batches_are_right() -> None:
    rows = torch.arange(96 * 3 * 24 * 24, dtype=torch.float32).reshape(96, 3, 24, 24).remainder(11)

    def run(arena: StepArena | None) -> list[bytes]:
        training = a_training()
        for number, batch in enumerate(DataLoader(Doubled(rows), batch_size=8, num_workers=2)):
            if arena is not None:
                arena.wait()
                arena.begin_step()
            assert torch.equal(batch, rows[8 * number : 8 * number + 8] * 2)
            training.data = batch
            training.step()
        return training.trace

    expected = run(None)
    with an_arena() as arena:
        assert run(arena) == expected
        assert arena.stats.counters.steps == 8
        assert arena.stats.share_placed == 1.0


class Doubled(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that a worker computes."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index] * 2


def test_a_meter_measures_the_same_peak_on_an_arena() -> None:
    training = a_training()
    peaks = []
    with an_arena() as arena:
        for _ in range(8):
            arena.wait()
            arena.begin_step()
            with MemoryMeter(torch.device("cpu")) as meter:
                training.step()
            peaks.append(meter.peak_bytes)
        assert arena.stats.state == "serving"
    assert len(set(peaks[2:])) == 1


def test_auto_counts_while_an_arena_serves() -> None:
    expected = a_training()
    for _ in range(8):
        expected.step()
    training = a_training()
    with an_arena() as arena, pooch.auto(training.model, "1GiB") as auto:
        for _ in range(8):
            arena.wait()
            arena.begin_step()
            training.step()
        assert arena.stats.state == "serving"
        assert arena.stats.counters.placed > 0
        assert auto.summary().peak_bytes > 0
    assert training.trace == expected.trace


def test_a_thousand_steps_do_not_drift() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    training = Training(model, torch.optim.Adam(model.parameters()), torch.randn(32, 64))
    with an_arena(ArenaOptions(pack_limit_s=0.3)) as arena:
        for number in range(1000):
            if number == 4:
                arena.wait()
            arena.begin_step()
            training.step()
            training.trace.clear()
            if number in (20, 999):
                mapped = arena._functions.mapped_bytes()
                live = arena._functions.live_blocks()
                if number == 20:
                    earlier = (mapped, live)
        assert (mapped, live) == earlier
        counters = arena.stats.counters
        assert counters.fallbacks == 0
        assert counters.placed == arena.stats.blocks * counters.steps
        assert counters.steps > 900


# Plain training -------------------------------------------------------------------------------------------------------


def test_beside_its_bytes_an_arena_takes_hardly_any_private_memory() -> None:
    """What `ulimit -d` counts: no stack of 8 MiB for the thread that packs, and no huge page too many.

    The heap is counted apart: malloc gives pages of it back when it likes, and blocks that move to the arena leave it.
    """
    text = """
import pathlib, torch, pooch
from tests.allocation.support import a_training
def heap_bytes():
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    (extent,) = (line.split()[0] for line in lines if line.endswith("[heap]"))
    begin, end = (int(address, 16) for address in extent.split("-"))
    return end - begin
def private_bytes():
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    return 1024 * int(line.split()[1]) - heap_bytes()
training = a_training()
with pooch.arena(training.model) as arena:
    found = []
    for _ in range(7):
        training.step()
        training.trace.clear()
        arena.wait()
        found.append((private_bytes(), arena.stats))
print(arena.stats.state, found[-1][1].arena_bytes, found[-1][0] - found[2][0])
"""
    done = subprocess.run(
        [sys.executable, "-c", text], env=child_environment(MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1"),
        capture_output=True, text=True, check=True, timeout=150,
    )  # fmt: skip
    state, arena_bytes, grown_bytes = done.stdout.split()
    assert state == "off"
    assert 2**19 < int(arena_bytes) <= int(grown_bytes) < int(arena_bytes) + 3 * 2**19


def test_plain_training_on_an_arena() -> None:
    expected = a_training()
    for _ in range(10):
        expected.step()
    training = a_training()
    with pooch.arena(training.model) as arena:
        for number in range(10):
            if number == 5:
                with torch.no_grad():
                    training.model.eval()(training.data)  # no step of the training
                training.model.train()
            arena.wait()
            training.step()
        assert arena.stats is not None
        assert arena.stats.counters.steps == 6
        assert arena.stats.state == "serving"
        assert 0 < arena.stats.counters.beyond < 40  # the evaluation
        with pytest.raises(UsageError, match="on an arena"):
            pooch.arena(training.model)
    assert training.trace == expected.trace
    training.step()
    with pooch.arena(training.model):
        pass


def test_without_a_compiler_one_warning_says_so(tmp_path: Path) -> None:
    text = """
import warnings, torch, pooch
model = torch.nn.Linear(4, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with pooch.arena(model) as arena:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
print(arena.stats, len(caught), caught[0].message)
"""
    environment = child_environment(POOCH_CACHE_DIRECTORY=str(tmp_path), CXX="/nonexistent/c++")
    done = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.startswith("None 1 no arena (there is no /nonexistent/c++")
    assert done.stdout.count("\n") == 1


def test_an_arena_for_another_device_is_refused_in_words() -> None:
    told = open_arena(torch.device("meta"))
    assert isinstance(told, str)
    assert "meta" in told


def test_an_arena_that_nobody_closes_lets_go() -> None:
    arena = open_arena(torch.device("cpu"))
    assert isinstance(arena, StepArena)
    arena.begin_step()
    del arena
    gc.collect()
    with an_arena():
        pass


# From recorded steps to blocks ----------------------------------------------------------------------------------------


def recorded(sizes: list[int], deaths: list[int]) -> RecordedStep:
    return RecordedStep(np.array(sizes, dtype=np.int64), np.array(deaths, dtype=np.int64))


def test_blocks_live_as_long_as_in_either_step() -> None:
    common = common_step(recorded([64, 100, 8], [1, 3, ALIVE]), recorded([64, 100, 8], [2, 2, 3]))
    assert common is not None
    assert common.deaths.tolist() == [2, 3, ALIVE]
    assert blocks_of(common) == {0: Block(0, 2, 64, 64, "of request 0"), 1: Block(1, 3, 128, 64, "of request 1")}
    assert common_step(recorded([64], [1]), recorded([65], [1])) is None
    assert common_step(recorded([64], [1]), recorded([64, 64], [1, 2])) is None
    assert pack(list(blocks_of(common).values())).arena_bytes == 192


def test_calls_repeat_where_their_sizes_do() -> None:
    def found(calls: str, most: int = 16, least: int = 0, by_sizes: bool = False) -> int:
        """Blocks in capitals outlive the recording."""
        letters = calls.replace(" ", "")
        deaths = [ALIVE if letter.isupper() else number + 1 for number, letter in enumerate(letters)]
        begins = np.cumsum([0, *map(len, calls.split(" "))]).tolist()
        step = recorded([ord(letter.lower()) for letter in letters], deaths)
        return calls_that_repeat(step, begins, most, least, by_sizes=by_sizes)

    assert found("ab ab") == 1
    assert found("ab a") == 0
    assert found("x ab c ab c") == 2
    assert found("ab c ab cd") == 0
    assert found("a a b a a b") == 3
    assert found("b a a") == 1
    assert found("b a a", least=3) == 0
    assert found("a a b a a b", most=2) == 0
    assert found("ab a b") == 0
    assert found("a") == found("") == 0
    assert found("Ab ab abc Ab ab abc") == 3
    assert found("Ab ab", by_sizes=True) == 1


def test_a_part_of_a_recording_is_a_step() -> None:
    whole = recorded([1, 2, 3, 4, 5], [1, ALIVE, 4, 5, 5])
    part = part_of(whole, 2, 4)
    assert (part.sizes.tolist(), part.deaths.tolist()) == ([3, 4], [2, ALIVE])


def test_packing_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise UsageError("no way to pack today")

    monkeypatch.setattr("pooch.allocation.driver.pack", fails)
    with an_arena() as arena, warnings.catch_warnings():
        trained(plain_step, 6, arena)
        assert arena.stats.state == "off"
        assert "no way to pack today" in arena.stats.reason

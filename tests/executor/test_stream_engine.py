"""The stream engine's ordering rules, under a fake of streams and events that finds races; and that it finds them."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pooch.api.guarding import Guard
from pooch.api.manual import plan_from_decisions
from pooch.errors import TierError, UsageError
from pooch.executor import apply_plan
from pooch.executor.engines import pinned
from pooch.executor.engines.pinned import PinnedBlock, blocks_kept
from pooch.executor.engines.streams import StreamArena, StreamEngine, StreamTicket
from pooch.executor.mode import StepMode
from pooch.executor.planned_values import PlannedValues
from pooch.executor.step import Step
from pooch.executor.verification import PROOFS
from pooch.torchtools import accelerators, cuda_only
from tests.executor.fake_streams import Event, Machine, Race, Stream, install
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, mixed, profile_job, quick_profile, tight_plan, train

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    fake = Machine()
    install(fake, monkeypatch)
    yield fake
    gc.collect()  # engines that a test leaves behind unlock their blocks here


def storage(fill: int, size: int = 64) -> torch.UntypedStorage:
    return torch.full((size,), fill, dtype=torch.uint8, device=CPU).untyped_storage()


# One step, told as the executor would do it ---------------------------------------------------------------------


def one_step(machine: Machine, engine: StreamEngine, fill: int = 1) -> None:
    """Produce, copy out, free, compute with the room, copy in, read, let go; then the step is over."""
    arena = engine.open_arena(8192)
    machine.compute.work()
    value = storage(fill)
    out = arena.copy_out(value, 0)
    out.wait()
    del value
    machine.compute.work()
    back = storage(0)
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    machine.check_read(back)
    assert bytes(back) == bytes(storage(fill))
    machine.compute.work()
    del back
    arena.close()


def abandoned_step(machine: Machine, engine: StreamEngine) -> None:
    """A step whose backward pass never comes: nobody waits for its copies."""
    arena = engine.open_arena(8192)
    machine.compute.work()
    value, back = storage(1), storage(0)
    arena.copy_out(value, 0)
    arena.copy_in(back, 0)
    arena.close()
    del value, back


def test_steps_keep_the_rules_of_order(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    for number in range(3):
        one_step(machine, engine, number)
    abandoned_step(machine, engine)
    one_step(machine, engine)
    assert machine.races == []
    assert len(machine.copies) == 10
    assert [kind for kind, _ in machine.log] == ["lock"]  # one block all the while


def test_a_wait_blocks_no_host_and_orders_compute(machine: Machine) -> None:
    arena = StreamEngine(CPU).open_arena(64)
    value = storage(1)
    ticket = arena.copy_out(value, 0)
    copy = machine.copies[-1]
    assert not copy.is_before(machine.compute.clock)
    assert ticket.wait() == 0.0
    assert copy.is_before(machine.compute.clock)


def test_a_step_on_another_stream(machine: Machine) -> None:
    """Each step on its own stream: the second must not write into the block before the first is done reading it."""
    engine = StreamEngine(CPU)
    abandoned_step(machine, engine)
    other = Stream()
    machine.compute = other
    with machine.program_on(other):
        machine.programs.remove(machine.programs[0])
        one_step(machine, engine)
    assert machine.races == []


def test_a_step_that_ends_on_another_stream(machine: Machine) -> None:
    """A graph may be let go of by any thread, whose current stream is not the one that gets the memory back."""
    engine = StreamEngine(CPU)
    arena = engine.open_arena(8192)
    value = storage(1)
    arena.copy_out(value, 0)
    with machine.stream(Stream()):
        arena.close()
        del value
    assert machine.races == []


def test_a_value_that_is_read_on_another_stream(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    arena = engine.open_arena(8192)
    value, back = storage(1), storage(0)
    arena.copy_out(value, 0).wait()
    elsewhere = Stream()
    with machine.program_on(elsewhere):
        arena.copy_in(back, 0).wait()
        machine.check_read(back)
    machine.check_read(back)  # the compute stream waits as well
    assert {stream for _, stream in machine.recorded} == {machine.compute, elsewhere}
    assert machine.races == []


def shared_room(machine: Machine) -> None:
    """A value comes back, and before anybody waits for it another one goes where it was."""
    engine = StreamEngine(CPU)
    arena = engine.open_arena(8192)
    first, second, back = storage(1), storage(2, 32), storage(0)
    arena.copy_out(first, 0).wait()
    arena.copy_in(back, 0)
    arena.copy_out(second, 32)
    arena.close()
    assert bytes(back) == bytes(first)


def test_room_that_two_values_have_in_turn(machine: Machine) -> None:
    shared_room(machine)
    assert machine.races == []


def test_room_that_is_taken_too_early_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out = StreamArena.copy_out

    def forgetful(self: StreamArena, *given: Any) -> StreamTicket:
        self._read_rooms.clear()
        return copy_out(self, *given)

    monkeypatch.setattr(StreamArena, "copy_out", forgetful)
    assert any("not done with" in race for race in judged(lambda: shared_room(machine), machine))


def test_measuring_copies_wait_for_nothing_that_computes(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    arena = engine.open_arena(8192)
    machine.compute.work()
    with engine.aside() as completed:
        machine.programs.clear()
        arena.copy_out(storage(1), 0).wait()
        completed()
    copy = machine.copies[-1]
    assert engine.out_stream.clock.get(machine.compute.name, 0) == 0
    assert not copy.is_before(machine.compute.clock)


# Each rule, broken -----------------------------------------------------------------------------------------------


def nothing(*_: Any) -> float:
    return 0.0


def starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamArena, "_wait_for_compute", nothing)


def compute_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTicket, "wait", nothing)


def one_event_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are taken before the copy, not after it."""
    mark = StreamEngine.mark
    early: list[Any] = []

    def stale(self: StreamEngine, stream: Any, *, timed: bool = False) -> Any:
        if stream not in (self.out_stream, self.in_stream):
            return mark(self, stream, timed=timed)
        early.append(mark(self, stream, timed=timed))
        return early[max(0, len(early) - 2)] if len(early) > 1 else torch.Event(CPU)

    monkeypatch.setattr(StreamEngine, "mark", stale)


def copy_in_ignores_copy_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in = StreamArena.copy_in

    def forgetful(self: StreamArena, target: Any, offset: int) -> Any:
        self._out_events[offset] = torch.Event(CPU)
        return copy_in(self, target, offset)

    monkeypatch.setattr(StreamArena, "copy_in", forgetful)


def the_end_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    close = StreamArena.close

    def careless(self: StreamArena) -> None:
        self._last.clear()
        close(self)

    monkeypatch.setattr(StreamArena, "close", careless)


def blocks_are_given_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    take_back = StreamEngine.take_back

    def careless(self: StreamEngine, block: PinnedBlock, purpose: Any) -> None:
        block.in_use_until = ()
        take_back(self, block, purpose)

    monkeypatch.setattr(StreamEngine, "take_back", careless)


def only_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamArena, "compute_streams", lambda self: [self._engine.current_stream()])


def judged(scenario: Callable[[], None], machine: Machine) -> list[str]:
    """Races that a scenario has, whether they were raised or noted by a finalizer."""
    with contextlib.suppress(AssertionError):  # a `Race` is one
        scenario()
    gc.collect()
    return machine.races


BROKEN: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (starts_at_once, "before what was computed"),
    (compute_never_waits, "before its copy"),
    (one_event_for_all, "before its copy"),
    (copy_in_ignores_copy_out, "not done with"),
    (the_end_waits_for_nothing, "given back before"),
]


@pytest.mark.parametrize(("breaks", "complaint"), BROKEN, ids=lambda item: getattr(item, "__name__", ""))
def test_a_broken_rule_is_found(
    breaks: Callable[[pytest.MonkeyPatch], None], complaint: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    engine = StreamEngine(CPU)

    def scenario() -> None:
        if breaks is not the_end_waits_for_nothing:
            one_step(machine, engine)
        abandoned_step(machine, engine)

    assert any(complaint in race for race in judged(scenario, machine))


def test_a_block_given_out_at_once_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_are_given_out_at_once(monkeypatch)
    assert any("not done with" in race for race in judged(lambda: test_a_step_on_another_stream(machine), machine))


@pytest.mark.parametrize(
    "scenario", [test_a_step_that_ends_on_another_stream, test_a_value_that_is_read_on_another_stream]
)
def test_minding_the_current_stream_alone_is_found(
    scenario: Callable[[Machine], None], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_the_current_stream(monkeypatch)
    assert judged(lambda: scenario(machine), machine)


def test_a_storage_that_is_emptied_too_early_is_found(machine: Machine) -> None:
    """Its memory goes back while the program still holds it."""
    arena = StreamEngine(CPU).open_arena(8192)
    value = storage(1)
    ticket = arena.copy_out(value, 0)
    with pytest.raises(Race, match="given back before"):
        value.resize_(0)
    ticket.wait()
    value.resize_(0)
    arena.close()


# The executor on the fake ---------------------------------------------------------------------------------------


def watch_program(machine: Machine, monkeypatch: pytest.MonkeyPatch, on_side: Callable[[int], bool]) -> None:
    """Every op of the region is a job of the current stream and reads and writes its arguments; every read of the
    backward pass is judged too. `on_side`: which ops run on a second stream, by number.
    """
    count, side = 0, Stream()
    dispatch, unpack, pack = StepMode.__torch_dispatch__, Step.unpack, Step.pack

    def op(self: StepMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nonlocal count
        count += 1
        machine.current.work()
        if not on_side(count):
            return dispatch(self, func, types, args, kwargs)
        side.wait_event(event_of(machine.current))
        with machine.program_on(side):
            side.work()
            result = dispatch(self, func, types, args, kwargs)
        machine.current.wait_event(event_of(side))
        return result

    def read(self: Step, packed: object) -> torch.Tensor:
        machine.current.work()
        tensor = unpack(self, packed)
        machine.check_read(tensor.untyped_storage())
        return tensor

    monkeypatch.setattr(StepMode, "__torch_dispatch__", op)
    monkeypatch.setattr(Step, "unpack", read)
    monkeypatch.setattr(Step, "pack", pack)


class Overwriting(nn.Module):
    """Saves the result of its exp; `inside`: writes over it at once, while its copy out may be under way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))
        self.inside = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first = (rows @ self.weight).exp()
        later = first * 3
        if self.inside:
            first.mul_(2)
        return later.sin().sum() + first.sum()


def watch_writes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every storage that an op of the region writes over is judged when the op runs; returns how many copies out of it
    were made before, one number for each.
    """
    found: list[int] = []
    before_op = Step.before_op

    def judged_op(self: Step, func: Any, facts: Any, args: Any, kwargs: Any, written: Any) -> None:
        before_op(self, func, facts, args, kwargs, written)
        for tensor in written.values():
            found.append(sum(copy.outwards for copy in machine._touching.get(tensor.untyped_storage()._cdata, ())))
            machine.check_write(tensor.untyped_storage())

    monkeypatch.setattr(Step, "before_op", judged_op)
    return found


def test_an_op_that_writes_over_a_value_waits_for_its_copy_out(
    on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = Overwriting(), torch.rand(16, 16)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "swap", "model"), "model")
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    copies_of_written = watch_writes(on_the_fake, monkeypatch)
    model.inside = True
    with apply_plan(plan, model):
        with pytest.warns(UserWarning, match="left the planned path"):
            loss = model(rows)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert copies_of_written == [1]
    assert on_the_fake.races == []


class Stopped(Exception):
    """The step ends here."""


@pytest.mark.usefixtures("without_floor")
def test_a_value_that_is_let_go_of_in_mid_copy_stays_until_the_copy_is_done(
    on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error ends the step while values are on their way out or back, at every op and at every read there is."""
    passed = stop_at = 0
    under_way: set[str] = set()
    let_go = PlannedValues._let_go

    def noted(self: PlannedValues, value: Any) -> None:
        if value.ticket is not None:
            under_way.add("back" if value.is_copied else "out")
        let_go(self, value)

    def stopping(method: Callable[..., Any]) -> Callable[..., Any]:
        def until(*given: Any, **named: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed > stop_at:
                raise Stopped
            return method(*given, **named)

        return until

    job = make_job("conv")
    profile = profile_job(job)
    plan = plan_from_decisions(profile, all_of(profile, "swap"), int(0.9 * profile.peak_bytes), region="step")
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    monkeypatch.setattr(StepMode, "__torch_dispatch__", stopping(StepMode.__torch_dispatch__))
    monkeypatch.setattr(Step, "unpack", stopping(Step.unpack))
    monkeypatch.setattr(PlannedValues, "_let_go", noted)
    with apply_plan(plan, job.model) as run:
        for stop_at in itertools.count():
            passed = 0
            with contextlib.suppress(Stopped):
                with run.step():
                    loss = job.forward()
                loss.backward()
            loss = None
            if passed <= stop_at:  # nothing stopped it
                break
    assert under_way == {"out", "back"}
    assert on_the_fake.races == []


def event_of(stream: Stream) -> Any:
    event: Any = torch.Event(CPU)
    event.record(stream)
    return event


@pytest.fixture
def on_the_fake(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Plans are applied with the stream engine."""
    monkeypatch.setattr("pooch.executor.apply.make_engine", lambda *_, **__: StreamEngine(CPU))
    return machine


@pytest.mark.parametrize("kind", ["conv", "transformer", "unet"])
def test_whole_steps_have_no_race(kind: str, on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(make_job(kind), None, steps=5)
    job = make_job(kind)
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    planned, stats = train(job, plan, steps=5)
    gc.collect()
    assert stats is not None
    assert stats.swapped_in_bytes > 0
    assert stats.recomputed_ops > 0
    assert stats.mismatches == stats.late_swaps == 0
    kinds = [action.kind for action in plan.schedule.actions]
    assert kinds.count("empty") >= kinds.count("refill") > 0
    moved = 5 * sum(kinds.count(kind) for kind in ("copy_out", "copy_in", "refill"))
    unproven = PROOFS * sum(choice.choice == "recompute" for choice in plan.choices)
    assert moved < len(on_the_fake.copies) <= moved + unproven
    assert on_the_fake.races == []
    # One block for the steps, and one for the copies of what is not proven yet.
    assert [kind for kind, _ in on_the_fake.log] == ["lock", "lock", "unlock", "unlock"]
    assert_same(plain, planned)


@pytest.mark.parametrize("breaks", [starts_at_once, compute_never_waits])
def test_a_broken_rule_shows_in_whole_steps(
    breaks: Callable[[pytest.MonkeyPatch], None], on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("unet")
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    breaks(monkeypatch)
    assert judged(lambda: train(job, plan) and None, on_the_fake)


def test_a_model_on_two_streams_leaves_the_plan_and_stays_right(
    on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = train(make_job("conv"), None)
    job = make_job("conv")
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    ops = len(plan.expected)
    watch_program(on_the_fake, monkeypatch, lambda count: count % ops == ops // 2)
    with pytest.warns(UserWarning, match="on another stream"):
        planned, stats = train(job, plan)
    gc.collect()
    assert stats is not None
    assert stats.mismatches == 1
    assert stats.swapped_in_bytes > 0
    assert on_the_fake.races == []
    assert_same(plain, planned)


# Times -----------------------------------------------------------------------------------------------------------


def test_a_stall_is_what_compute_stood_still_for_and_not_what_the_copy_took(machine: Machine) -> None:
    """A copy of 5 ms, 2 ms of compute beside it, then the wait: 3 ms. The copy back has nothing beside it: 5 ms."""
    arena = StreamEngine(CPU).open_arena(64)
    machine.compute.work(10)
    value, back = storage(1), storage(0)
    out = arena.copy_out(value, 0)
    machine.compute.work(2)
    assert out.wait() == 0.0
    arena.copy_in(back, 0).wait()
    machine.compute.work(4)
    arena.close()
    assert Event.host_waits == 0
    assert arena.clock.stall_ms == 3 + 5
    assert arena.clock.step_ms == 10 + 2 + 3 + 5 + 4


def test_a_copy_that_is_done_when_it_is_waited_for_stalls_nothing(machine: Machine) -> None:
    arena = StreamEngine(CPU).open_arena(64)
    ticket = arena.copy_out(storage(1), 0)
    machine.compute.work(50)
    ticket.wait()
    arena.close()
    assert arena.clock.stall_ms == 0
    assert arena.clock.step_ms == 50


def test_asking_in_mid_step_waits_for_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = StreamEngine(CPU).open_arena(64)
    arena.copy_out(storage(1), 0).wait()
    monkeypatch.setattr(Event, "is_device_done", False)
    assert (arena.clock.stall_ms, arena.clock.step_ms) == (0.0, 0.0)
    monkeypatch.setattr(Event, "is_device_done", True)
    assert (arena.clock.stall_ms, arena.clock.step_ms) == (5.0, 0.0)
    assert Event.host_waits == 0
    arena.close()
    assert arena.clock.step_ms == 5.0
    assert Event.host_waits == 1


def test_a_step_tells_its_stalls_and_its_time_from_the_device(
    on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device where each op, each read and each copy takes its time, and nothing else does."""
    job = make_job("conv")
    profile = profile_job(job)
    plan = tight_plan(profile, all_of(profile, "swap"))
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    with apply_plan(plan, job.model, measure_every=None) as run:
        start_ms, done, waited = on_the_fake.compute.now_ms, on_the_fake.compute.issued, Event.host_waits
        with run.step():
            loss = job.forward()
        assert run.stats.step_ms == 0
        loss.backward()
        worked_ms = on_the_fake.compute.issued - done
        assert Event.host_waits == waited  # not once in a whole step
        assert run.stats.swapped_in_bytes > 0
        assert run.stats.stall_ms > 0
        assert run.stats.step_ms == pytest.approx(worked_ms + run.stats.stall_ms)
        assert run.stats.step_ms == pytest.approx(on_the_fake.compute.now_ms - start_ms)
        assert run.stats.host_stall_ms == 0


def test_finding_the_stream_of_each_op_asks_for_it_once_by_number(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a device in its place PyTorch compares types and looks for the current device, for each op."""
    arena = StreamEngine(torch.device("cpu", 0)).open_arena(0)
    asked: list[Any] = []

    def current(index: Any) -> Stream:
        asked.append(index)
        return machine.current

    monkeypatch.setattr(torch.accelerator, "current_stream", current)
    made = Stream.made
    assert not any(arena.is_beside() for _ in range(10))
    assert asked == [0] * 10
    assert Stream.made == made


# Pinned memory ---------------------------------------------------------------------------------------------------


def test_blocks_have_the_planned_size_and_are_unlocked(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    under_way = engine.open_arena(5000)
    engine.open_arena(5000).close()
    assert machine.log == [("lock", 5000), ("lock", 5000)]
    engine.close()
    assert [kind for kind, _ in machine.log].count("unlock") == 1
    under_way.close()
    assert [kind for kind, _ in machine.log].count("unlock") == 2
    assert machine.locked == {}


def test_a_block_that_became_too_small_is_not_used_again(machine: Machine) -> None:
    """A step with little to swap ends after a larger plan has begun: its block comes back and must not be given out."""
    engine = StreamEngine(CPU)
    small = engine.open_arena(4096)
    engine.open_arena(8192).close()
    engine.open_arena(8192).close()
    small.close()
    assert machine.log == [("lock", 4096), ("lock", 8192)]  # a step may be under way, and unlocking would wait for it
    arenas = [engine.open_arena(8192) for _ in range(2)]
    assert machine.log == [("lock", 4096), ("lock", 8192), ("unlock", 4096), ("lock", 8192)]
    for arena in arenas:
        value, back = storage(7, 8192), storage(0, 8192)
        arena.copy_out(value, 0).wait()
        arena.copy_in(back, 0).wait()
        assert bytes(back) == bytes(value)
        arena.close()
    assert machine.races == []


def test_free_blocks_that_are_too_small_for_the_next_step_are_given_up(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    engine.open_arena(4096).close()
    arena = engine.open_arena(8192)
    assert machine.log == [("lock", 4096), ("unlock", 4096), ("lock", 8192)]
    arena.copy_out(storage(7, 8192), 0).wait()
    assert machine.copies[-1].room == (0, 8192)
    arena.close()


@pytest.mark.parametrize("how", ["the engine is closed", "the engine is forgotten", "the block is too small"])
def test_memory_is_unlocked_only_when_the_device_is_done_with_it(how: str, machine: Machine) -> None:
    """Compute waits for a copy at the end of a step, and the host does not: the copy may still be under way."""
    engine: StreamEngine | None = StreamEngine(CPU)
    assert engine is not None
    abandoned_step(machine, engine)
    if how == "the engine is closed":
        engine.close()
    elif how == "the block is too small":
        engine.open_arena(2 * 8192).close()
    else:
        engine = None
        gc.collect()
    assert ("unlock", 8192) in machine.log
    assert machine.races == []


def test_unlocking_too_early_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "synchronize", nothing)
    engine = StreamEngine(CPU)
    abandoned_step(machine, engine)
    engine.close()
    assert machine.races == ["memory is unlocked before a copy is done with it"]


def test_a_forgotten_engine_unlocks_its_blocks(machine: Machine) -> None:
    engine = StreamEngine(CPU)
    engine.open_arena(5000).close()
    del engine
    gc.collect()
    assert machine.log == [("lock", 5000), ("unlock", 5000)]


def test_nothing_is_locked_where_nothing_is_swapped(machine: Machine) -> None:
    arena = StreamEngine(CPU).open_arena(0)
    assert not arena.is_beside()
    arena.close()
    assert machine.log == []


def test_memory_that_cannot_be_locked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(torch, "zeros", lambda count, device=None: launched.append(count))
    machine.refuse_to_lock = 2
    with pytest.raises(TierError, match=r"cannot be page-locked \(CUDA error 2\)") as caught:
        PinnedBlock(4096, CPU)
    assert "\n" not in str(caught.value)
    assert launched == [1]  # the next kernel of the program is not blamed for it


def test_more_than_the_machine_has(machine: Machine) -> None:
    with pytest.raises(TierError, match="set a smaller host budget"):
        StreamEngine(CPU).open_arena(2**60)
    assert machine.log == []


def test_a_default_device_and_dtype_of_the_users(machine: Machine) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            one_step(machine, StreamEngine(CPU))
    finally:
        torch.set_default_dtype(torch.float32)
    assert machine.races == []


def test_host_memory_is_what_the_control_group_leaves(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has more; but whoever passes the group's limit is killed."""
    monkeypatch.setattr("pooch.torchtools.device_memory.left_by_control_groups", lambda: [5000])
    StreamEngine(CPU).open_arena(5000).close()
    with pytest.raises(TierError, match="needs 8192 bytes of host memory, 5000 are available: set a smaller"):
        StreamEngine(CPU).open_arena(8192)
    assert [size for kind, size in machine.log if kind == "lock"] == [5000]


def test_the_largest_host_budget_that_has_room_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system and the program keep some of what is left."""
    left_bytes = 2 * pinned.RESERVE_BYTES
    monkeypatch.setattr("pooch.torchtools.device_memory.left_by_control_groups", lambda: [left_bytes])
    with pytest.raises(
        TierError, match=f"at most {pinned.RESERVE_BYTES / 2**20:.2f} MiB \\({pinned.RESERVE_BYTES} bytes"
    ):
        StreamEngine(CPU).open_arena(pinned.RESERVE_BYTES + 4096)
    StreamEngine(CPU).open_arena(pinned.RESERVE_BYTES).close()


@pytest.mark.parametrize("size", [1, 4095, 8192, 8193, 3 * 8192 + 5])
def test_a_block_is_locked_in_parts_of_exactly_its_size(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(pinned, "PART_BYTES", 8192)
    block = PinnedBlock(size, CPU)
    locked = [bytes_ for kind, bytes_ in machine.log if kind == "lock"]
    assert sum(locked) == size
    assert max(locked) <= 8192
    for offset in {0, 1, 4096, 8191, 8192, size // 2} & set(range(size)):
        for length in {1, size - offset, min(8192, size - offset)}:
            pieces = list(block.pieces(offset, length))
            assert [place for place, _ in pieces] == [0, *itertools.accumulate(len(each) for _, each in pieces)][:-1]
            assert sum(len(each) for _, each in pieces) == length
            for place, each in pieces:
                position = offset + place
                part = block.parts[position // 8192]
                assert each.data_ptr() == part.data_ptr() + position % 8192
    block.unlock()
    assert machine.locked == {}


def test_values_that_lie_across_parts_come_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "PART_BYTES", 8192)
    arena = StreamEngine(CPU).open_arena(5 * 8192)
    values = [torch.randint(256, (20000,), dtype=torch.uint8).untyped_storage() for _ in range(2)]
    for number, value in enumerate(values):
        arena.copy_out(value, number * 20480).wait()
    for number, value in enumerate(values):
        back = storage(0, 20000)
        arena.copy_in(back, number * 20480).wait()
        machine.check_read(back)
        assert bytes(back) == bytes(value)
    arena.close()
    assert machine.races == []


def test_what_was_locked_before_a_part_is_refused_is_given_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PART_BYTES", 8192)
    lock, calls = cuda_only.lock_pages, itertools.count()
    monkeypatch.setattr(cuda_only, "lock_pages", lambda *given: 2 if next(calls) == 2 else lock(*given))
    with pytest.raises(TierError, match="cannot be page-locked"):
        PinnedBlock(5 * 8192, CPU)
    assert machine.locked == {}
    assert [kind for kind, _ in machine.log] == ["lock", "lock", "unlock", "unlock"]


def test_what_cannot_be_locked_is_ordinary_memory_and_told_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PART_BYTES", 8192)
    lock, calls = cuda_only.lock_pages, itertools.count()
    monkeypatch.setattr(cuda_only, "lock_pages", lambda *given: 2 if next(calls) == 2 else lock(*given))
    engine = StreamEngine(CPU)
    lines: list[str] = []
    engine.health.tell = lines.append
    assert engine.description == "pinned host memory"
    arena = engine.open_arena(5 * 8192)
    assert next(calls) == 3  # no more are tried: each takes time
    assert sorted(machine.locked.values()) == [8192, 8192]
    value = torch.randint(256, (40000,), dtype=torch.uint8).untyped_storage()
    arena.copy_out(value, 0).wait()
    back = storage(0, 40000)
    arena.copy_in(back, 0).wait()
    machine.check_read(back)
    assert bytes(back) == bytes(value)
    arena.close()
    engine.open_arena(6 * 8192).close()
    assert len(lines) == 1
    assert "24.00 KiB of 40.00 KiB of host memory cannot be page-locked (CUDA error 2)" in lines[0]
    assert engine.description == "host memory that is not page-locked"
    engine.close()
    assert machine.locked == {}
    assert machine.races == []


def test_locking_can_be_switched_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOCH_PAGE_LOCKED", "0")
    engine = StreamEngine(CPU)
    lines: list[str] = []
    engine.health.tell = lines.append
    engine.open_arena(8192).close()
    assert machine.locked == {}
    assert lines == []
    assert engine.description == "host memory that is not page-locked"
    PinnedBlock(8192, CPU).unlock()  # as to try it
    assert [kind for kind, _ in machine.log] == ["lock", "unlock"]


@pytest.mark.parametrize("size", [1, 2**20, 3 * 2**20, 7 * 2**20 + 12345])
def test_pytorchs_blocks_are_asked_for_in_powers_of_two(size: int) -> None:
    """Larger ones are rounded up to the next."""
    sizes = pinned._powers_of_two(size)
    assert sum(sizes) == size
    taken = sum(1 << (each - 1).bit_length() for each in sizes)
    assert taken - size <= 2**20
    assert sum(pinned._powers_of_two(12 * 2**30)) == 12 * 2**30
    assert set(pinned._powers_of_two(12 * 2**30)) == {4 * 2**30}


def test_other_accelerators_get_pinned_memory_from_pytorch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    empty = torch.empty

    def noted(*size: Any, **options: Any) -> torch.Tensor:
        given.append(options)
        return empty(*size, **(options | {"pin_memory": False}))

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(cuda_only, "locks_in_place", lambda device: False)
    engine = StreamEngine(CPU)
    arena = engine.open_arena(64)
    assert [options["pin_memory"] for options in given if "pin_memory" in options] == [True]
    value, back = storage(3), storage(0)
    arena.copy_out(value, 0).wait()
    arena.copy_in(back, 0).wait()
    assert bytes(back) == bytes(value)
    arena.close()
    engine.close()
    assert machine.log == []


def test_memory_stays_locked_from_one_engine_to_the_next_while_somebody_keeps_it(machine: Machine) -> None:
    with blocks_kept():
        for size_bytes in (8192, 8192, 4096):
            engine = StreamEngine(CPU)
            one_step(machine, engine) if size_bytes == 8192 else engine.open_arena(size_bytes).close()
            engine.close()
        assert machine.log == [("lock", 8192)]
        engine = StreamEngine(CPU)
        engine.open_arena(2 * 8192).close()  # the host never has both
        engine.close()
        assert machine.log == [("lock", 8192), ("unlock", 8192), ("lock", 16384)]
    assert machine.locked == {}
    engine = StreamEngine(CPU)
    engine.open_arena(8192).close()
    engine.close()
    assert machine.log[-2:] == [("lock", 8192), ("unlock", 8192)]  # at once, where nobody keeps it
    assert machine.races == []


# What is kept aside to repeat a step -----------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Small buffers, which change with each step, and parameters whose gradients are large enough for the tier."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(640, 640), nn.BatchNorm1d(640)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.tanh(self.inner(rows)))).sum()


@pytest.fixture
def guarded(on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Guard, nn.Module]]:
    torch.manual_seed(3)
    model, rows = WithBuffers(), torch.rand(8, 640)
    profile = quick_profile(lambda: model(rows), model)
    plan = tight_plan(profile, all_of(profile, "swap"))
    monkeypatch.setattr("pooch.executor.snapshot.has_streams", lambda device: True)
    watch_program(on_the_fake, monkeypatch, lambda count: False)
    with Guard(plan, model, lambda target: plan, measured_steps=0) as guard:
        yield guard, model


def test_a_guarded_step_waits_for_nothing_and_locks_nothing(
    guarded: tuple[Guard, nn.Module], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buffers in every step, and gradients that accumulate from the second one on."""
    guard, model = guarded
    from_the_device: list[int] = []
    cpu, rows = torch.Tensor.cpu, torch.rand(8, 640)

    def read(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        from_the_device.append(self.numel())
        return cpu(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "cpu", read)
    waited, locked = Event.host_waits, list(machine.log)
    in_the_step: list[list[tuple[str, int]]] = []

    def forward() -> torch.Tensor:
        in_the_step.append(list(machine.log))
        return torch.as_tensor(model(rows))

    for _ in range(4):
        guard.step(forward)
        assert in_the_step[-1] == machine.log
    assert guard.run.stats.swapped_in_bytes > 0
    assert from_the_device == []
    assert (
        Event.host_waits == waited + 1
    )  # once, before a step: what the first snapshots had is too small with gradients
    gradients = sum(4 * p.numel() for p in model.parameters())
    sizes = [size for kind, size in machine.log[len(locked) :] if kind == "lock"]
    assert len(sizes) == 2  # of the buffers alone, then with the gradients
    assert sizes[1] > gradients > sizes[0]
    assert machine.races == []


def test_a_guard_locks_once_for_plans_that_need_no_more_and_gives_all_back(
    guarded: tuple[Guard, nn.Module], machine: Machine
) -> None:
    guard, model = guarded
    rows = torch.rand(8, 640)
    guard.step(lambda: model(rows))
    locked = [size for kind, size in machine.log if kind == "lock"]
    guard._replace(guard.plan, "another path", 0)
    model.zero_grad()
    guard.step(lambda: model(rows))
    assert [size for kind, size in machine.log if kind == "lock"] == locked
    guard.remove()
    assert machine.locked == {}
    assert machine.races == []


def test_what_was_kept_aside_is_put_back(guarded: tuple[Guard, nn.Module], machine: Machine) -> None:
    guard, model = guarded
    rows = torch.rand(8, 640)
    guard.step(lambda: model(rows))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    snapshot = guard.run.snapshot()
    for _ in range(2):
        with guard.run.step():
            loss = model(rows)
        loss.backward()
        assert not torch.equal(model.get_buffer("norm.running_mean"), before["norm.running_mean"])
        snapshot.restore()
        assert_same(before, dict(model.named_buffers()))
        assert_same(gradients, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    snapshot.close()
    assert machine.races == []


# CUDA graphs -----------------------------------------------------------------------------------------------------


def test_a_planned_step_cannot_be_captured(on_the_fake: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job("conv")
    profile = profile_job(job)
    plan = tight_plan(profile, mixed(profile))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with apply_plan(plan, job.model) as run, pytest.raises(UsageError, match="CUDA graph"), run.step():
        job.forward()

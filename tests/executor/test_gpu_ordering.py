"""Each rule of ordering that the engine keeps, alone, on a device with streams.

On a GPU the side that has to be waited for is kept busy, so that a missing wait gives other bytes; the simulated device
reports the missing wait itself. `tests/simulated_cuda/mutations.py` breaks the rules one after the other.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import apply_plan
from pooch.executor.engines.pinned import blocks_kept
from pooch.executor.engines.streams import StreamArena, StreamEngine
from pooch.executor.snapshot import StepSnapshot
from pooch.executor.step import Step
from pooch.torchtools import accelerators
from tests.executor.nets import make_job
from tests.executor.support import all_of, is_same, profile_job, tight_plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = 8 * 2**20


@pytest.fixture
def engine() -> Iterator[StreamEngine]:
    made = StreamEngine(torch.device("cuda", 0))
    yield made
    torch.cuda.synchronize()
    made.close()
    torch.cuda.empty_cache()


def keep_busy(stream: torch.Stream) -> None:
    """For some time: whatever does not wait for what the stream gets next is early."""
    with accelerators.on_stream(stream):
        torch.cuda._sleep(20 * 10**6)


def here() -> torch.Stream:
    return accelerators.current_stream(torch.device("cuda", 0))


def full_of(number: int, size: int = SIZE) -> Tensor:
    return torch.full((size,), number, dtype=torch.uint8, device="cuda")


def room_for(size: int = SIZE) -> torch.UntypedStorage:
    return torch.UntypedStorage(size, device="cuda")


def on(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def assert_full_of(number: int, contents: Tensor | torch.UntypedStorage) -> None:
    """Nothing here shows the contents themselves: to print a storage takes minutes."""
    found = (contents if isinstance(contents, Tensor) else on(contents)).cpu().unique().tolist()
    assert found == [number], "the bytes differ"


def in_the_tier(arena: StreamArena, number: int, offset_bytes: int = 0, size: int = SIZE) -> None:
    """Copy a value out that nobody else holds."""
    arena.copy_out(full_of(number, size).untyped_storage(), offset_bytes).wait()


# Rooms in the tier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("second", "size"), [(0, SIZE), (SIZE // 2, SIZE), (0, SIZE // 2)])
def test_a_room_is_read_after_it_is_filled_and_filled_again_after_it_is_read(
    engine: StreamEngine, second: int, size: int
) -> None:
    """The second value's room is the first one's, or lies across its end or within it."""
    arena = engine.open_arena(2 * SIZE)
    values, back = (full_of(1), full_of(2, size)), (room_for(), room_for(size))
    keep_busy(engine.out_stream)
    arena.copy_out(values[0].untyped_storage(), 0)
    keep_busy(engine.in_stream)
    tickets = [arena.copy_in(back[0], 0)]
    arena.copy_out(values[1].untyped_storage(), second)
    tickets.append(arena.copy_in(back[1], second))
    for ticket in tickets:
        ticket.wait()
    assert_full_of(1, back[0])
    assert_full_of(2, back[1])
    arena.close()


def test_each_value_has_a_room_of_its_own(engine: StreamEngine) -> None:
    arena, back = engine.open_arena(3 * SIZE), [room_for() for _ in range(3)]
    for number in range(3):
        in_the_tier(arena, number + 1, number * SIZE)
    for number, storage in enumerate(back):
        arena.copy_in(storage, number * SIZE).wait()
    for number, storage in enumerate(back):
        assert_full_of(number + 1, storage)
    arena.close()


# Device memory --------------------------------------------------------------------------------------------------------


def test_what_a_copy_still_reads_goes_to_nobody_else(engine: StreamEngine) -> None:
    arena, back = engine.open_arena(SIZE), room_for()
    keep_busy(engine.out_stream)
    arena.copy_out(full_of(7).untyped_storage(), 0)  # its ticket and its storage are let go of
    other = full_of(99)
    arena.copy_in(back, 0).wait()
    assert_full_of(7, back)
    assert_full_of(99, other)
    arena.close()


def test_memory_is_filled_after_compute_is_done_with_it(engine: StreamEngine) -> None:
    arena = engine.open_arena(SIZE)
    in_the_tier(arena, 7)
    torch.cuda.synchronize()
    before = full_of(1)
    keep_busy(here())
    seen = before + 1
    address = before.data_ptr()
    del before
    back = room_for()
    assert back.data_ptr() == address
    arena.copy_in(back, 0).wait()
    assert_full_of(2, seen)
    assert_full_of(7, back)
    arena.close()


def test_memory_is_free_once_compute_waits_for_the_copy(engine: StreamEngine) -> None:
    arena = engine.open_arena(SIZE)
    before = torch.cuda.memory_allocated()
    in_the_tier(arena, 7)
    assert torch.cuda.memory_allocated() == before
    arena.copy_in(room_for(), 0).wait()
    assert torch.cuda.memory_allocated() == before
    arena.close()


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_step_that_ends_with_copies_under_way_leaves_them_their_memory(engine: StreamEngine, direction: str) -> None:
    arena = engine.open_arena(SIZE)
    if direction == "in":
        in_the_tier(arena, 7)
    value = full_of(5)
    keep_busy(engine.in_stream)
    keep_busy(engine.out_stream)
    (arena.copy_in if direction == "in" else arena.copy_out)(value.untyped_storage(), 0)
    arena.close()
    address = value.data_ptr()
    del value
    other = full_of(99)
    assert other.data_ptr() == address
    torch.cuda.synchronize()
    assert_full_of(99, other)


# Pinned blocks --------------------------------------------------------------------------------------------------------


def test_the_next_step_fills_a_block_after_the_last_one_has_read_it(engine: StreamEngine) -> None:
    """On another stream, which waits for nothing of the step before."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        value = full_of(2)
    first, back = engine.open_arena(SIZE), room_for()
    in_the_tier(first, 1)
    keep_busy(engine.in_stream)
    first.copy_in(back, 0).wait()
    first.close()
    with torch.cuda.stream(side):
        second = engine.open_arena(SIZE)
        second.copy_out(value.untyped_storage(), 0).wait()
        second.close()
    assert_full_of(1, back)


def test_steps_under_way_at_once_have_blocks_of_their_own(engine: StreamEngine) -> None:
    for _ in range(2):  # with new blocks, then with those that came back
        arenas, back = [engine.open_arena(SIZE) for _ in range(3)], [room_for() for _ in range(3)]
        assert [arena._block is not None and arena._block.parts[0].is_pinned() for arena in arenas] == [True] * 3
        for number, arena in enumerate(arenas):
            in_the_tier(arena, number + 1)
        for arena, storage in zip(arenas, back, strict=True):
            arena.copy_in(storage, 0).wait()
        for number, storage in enumerate(back):
            assert_full_of(number + 1, storage)
        for arena in arenas:
            arena.close()


def test_a_block_that_became_too_small_is_not_used_again(engine: StreamEngine) -> None:
    first = engine.open_arena(SIZE)
    engine.open_arena(2 * SIZE).close()
    first.close()
    arenas, back = [engine.open_arena(2 * SIZE) for _ in range(2)], room_for()
    for arena in arenas:
        in_the_tier(arena, 3, SIZE)
        arena.copy_in(back, SIZE).wait()
        assert_full_of(3, back)
        arena.close()


@pytest.mark.parametrize(("before", "after"), list(permutations((SIZE, 2 * SIZE))))
def test_a_kept_block_is_taken_over_where_it_is_large_enough(before: int, after: int) -> None:
    device, back = torch.device("cuda", 0), room_for(after)
    with blocks_kept():
        for size in (before, after):
            engine = StreamEngine(device)
            arena = engine.open_arena(size)
            in_the_tier(arena, 5, 0, size)
            keep_busy(engine.in_stream)
            if size == after:
                arena.copy_in(back, 0).wait()
            arena.close()
            engine.close()
    assert_full_of(5, back)


def test_kept_blocks_stay_locked_and_go_to_one_engine_each() -> None:
    device, back = torch.device("cuda", 0), [room_for() for _ in range(2)]
    with blocks_kept():
        for engine in [StreamEngine(device) for _ in range(2)]:
            engine.open_arena(SIZE).close()
            engine.close()
        engines = [StreamEngine(device) for _ in range(2)]
        arenas = [engine.open_arena(SIZE) for engine in engines]
        assert [arena._block is not None and arena._block.parts[0].is_pinned() for arena in arenas] == [True] * 2
        for number, arena in enumerate(arenas):
            in_the_tier(arena, number + 1)
        for arena, storage in zip(arenas, back, strict=True):
            arena.copy_in(storage, 0).wait()
        for number, storage in enumerate(back):
            assert_full_of(number + 1, storage)
        for arena, engine in zip(arenas, engines, strict=True):
            arena.close()
            engine.close()


def test_a_block_is_unlocked_after_its_last_copy(engine: StreamEngine) -> None:
    """Also one that an earlier step has, and that is too small by now."""
    value = full_of(3)
    arenas = [engine.open_arena(size) for size in (SIZE, 2 * SIZE)]
    for arena in arenas:
        keep_busy(engine.out_stream)
        arena.copy_out(value.untyped_storage(), 0)
        arena.close()
    engine.open_arena(3 * SIZE).close()  # unlocks both
    arena = engine.open_arena(SIZE)
    keep_busy(engine.out_stream)
    arena.copy_out(value.untyped_storage(), 0)
    arena.close()
    engine.close()
    torch.cuda.synchronize()
    assert_full_of(3, value)


def test_a_block_stays_locked_while_a_step_has_it(engine: StreamEngine) -> None:
    """Though a larger one is asked for, and though the engine is closed."""
    arena, back = engine.open_arena(SIZE), room_for()
    in_the_tier(arena, 4)
    engine.open_arena(2 * SIZE).close()
    assert arena._block is not None
    assert arena._block.parts[0].is_pinned()
    engine.close()
    assert arena._block.parts[0].is_pinned()
    keep_busy(engine.in_stream)
    arena.copy_in(back, 0).wait()
    arena.close()
    assert_full_of(4, back)


# Other streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_copies_aside", [False, True])
def test_copies_wait_for_every_stream_that_works_on_the_plans_values(
    engine: StreamEngine, after_copies_aside: bool
) -> None:
    """Also where the thread has copied aside before."""
    arena, side, value, back = engine.open_arena(SIZE), torch.cuda.Stream(), full_of(1), room_for()
    side.wait_stream(torch.cuda.current_stream())
    if after_copies_aside:
        with engine.aside():
            pass
    with torch.cuda.stream(side):
        arena.join([value.untyped_storage()])
        keep_busy(side)
        value.add_(5)
    arena.copy_out(value.untyped_storage(), 0).wait()
    arena.copy_in(back, 0).wait()
    assert_full_of(6, back)
    arena.close()


def test_every_stream_that_works_on_the_plans_values_waits_for_copies(engine: StreamEngine) -> None:
    arena, side, value, back = engine.open_arena(SIZE), torch.cuda.Stream(), full_of(1), room_for()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arena.join([value.untyped_storage()])
    arena.copy_out(value.untyped_storage(), 0).wait()
    keep_busy(engine.in_stream)
    arena.copy_in(back, 0).wait()
    with torch.cuda.stream(side):
        seen = on(back) + 1
    torch.cuda.synchronize()
    assert_full_of(2, seen)
    arena.close()


@pytest.mark.parametrize("filled", [False, True])
def test_memory_that_a_joined_stream_reads_goes_to_nobody_before(engine: StreamEngine, filled: bool) -> None:
    """A value that the stream joined for, and one that is filled afterwards."""
    arena, side, value = engine.open_arena(SIZE), torch.cuda.Stream(), full_of(1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        arena.join([value.untyped_storage()])
    if filled:
        in_the_tier(arena, 1)
        back = room_for()
        arena.copy_in(back, 0).wait()
        value = on(back)
        del back
    with torch.cuda.stream(side):
        keep_busy(side)
        seen = value + 1
    del value
    other = full_of(99)
    torch.cuda.synchronize()
    assert_full_of(2, seen)
    assert_full_of(99, other)
    arena.close()


def test_copies_that_another_stream_asks_for_wait_for_it_and_it_waits_for_them(engine: StreamEngine) -> None:
    """As where a step is repeated on another stream than the one on which its snapshot was taken."""
    arena, side = engine.open_arena(SIZE), torch.cuda.Stream()
    with torch.cuda.stream(side):
        keep_busy(side)
        arena.copy_out(full_of(3).untyped_storage(), 0).wait()
        back = room_for()
        keep_busy(engine.in_stream)
        arena.copy_in(back, 0).wait()
        assert_full_of(3, back)
    arena.close()


def test_what_is_done_at_home_comes_after_the_callers_work_and_before_what_follows(engine: StreamEngine) -> None:
    arena, side = engine.open_arena(SIZE), accelerators.new_stream(torch.device("cuda", 0))
    home = here()
    with accelerators.on_stream(side):
        keep_busy(side)
        made = full_of(1)
        with arena.at_home():
            assert here() == home
            keep_busy(home)
            there = made + 1
        assert here() == side
        seen = there + 1
    torch.cuda.synchronize()
    assert_full_of(3, seen)
    arena.close()


def test_who_copies_aside_is_told_when_the_copies_are_complete(engine: StreamEngine) -> None:
    arena, value, complete = engine.open_arena(SIZE), full_of(1), []
    torch.cuda.synchronize()

    def copy() -> None:
        with engine.aside() as completed:
            keep_busy(engine.out_stream)
            ticket = arena.copy_out(value.untyped_storage(), 0)
            ticket.wait()
            completed()
            complete.append(ticket.event.query())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert complete == [True]
    arena.close()


# Snapshots ------------------------------------------------------------------------------------------------------------


class WithBuffers(nn.Module):
    """Gradients of more than 1 MiB, and buffers of less."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(512 * 1024 + 1, device="cuda")) for _ in range(2))
        for number in range(2):
            self.register_buffer(f"mean_{number}", torch.rand(1000, device="cuda"))
        for weight in self.weights:
            weight.grad = torch.rand_like(weight)


def test_a_step_begins_and_is_repeated_while_the_snapshots_copies_are_under_way(engine: StreamEngine) -> None:
    model = WithBuffers()
    tensors = [*(weight.grad for weight in model.weights), *model.buffers()]
    before = [tensor.clone() for tensor in tensors]
    drawn_from = torch.cuda.get_rng_state()
    keep_busy(engine.out_stream)
    snapshot = StepSnapshot(model, engine, torch.device("cuda", 0))
    for tensor in tensors:
        tensor.add_(1)
    torch.rand(10, device="cuda")
    for weight in model.weights:
        weight.grad = None
    keep_busy(engine.in_stream)
    snapshot.restore()
    again = [tensor.clone() for tensor in (*(weight.grad for weight in model.weights), *model.buffers())]
    assert all(is_same(*pair) for pair in zip(before, again, strict=True))
    assert is_same(torch.cuda.get_rng_state(), drawn_from)
    snapshot.close()


# A step's reads -------------------------------------------------------------------------------------------------------


def test_a_read_ahead_of_the_schedules_wait_waits_for_the_copy() -> None:
    job = make_job("conv", 2, "cuda")
    profile = profile_job(job)
    with apply_plan(tight_plan(profile, all_of(profile, "swap")), job.model) as run:
        with run.step():
            loss = job.forward()
        step = next(each for each in gc.get_objects() if isinstance(each, Step) and each.stats is run._stats)
        away = [
            each
            for each in step.guide.values.planned.values()
            if each.is_copied and each.storage is None and each.handles
        ]
        record = max(away, key=lambda each: each.size_bytes)
        keep_busy(run._engine.in_stream)  # type: ignore[attr-defined]
        step.guide.values.copy_in(record)
        storage = step.guide.values.ensure(record)
        seen = on(storage).clone()
        torch.cuda.synchronize()
        assert is_same(seen, on(storage))
        loss.backward()
        assert run.stats.mismatches == 0


def test_numbers_are_drawn_from_a_snapshot_as_often_as_a_replay_needs_them() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.init()  # before that there is no generator
    snapshot, before = accelerators.random_snapshot(device), torch.cuda.get_rng_state()
    drawn = []
    for _ in range(2):
        drawn.append(accelerators.called_drawing_from(device, snapshot, lambda: torch.rand(100, device=device)))
    assert is_same(*drawn)
    assert is_same(torch.cuda.get_rng_state(), before)
    assert is_same(torch.rand(100, device=device), drawn[0])

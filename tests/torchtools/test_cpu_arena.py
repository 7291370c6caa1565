"""The arena of the CPU allocator: blocks at their places, everything else as ever, and no block over another."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest
import torch

from pooch.torchtools.cpu_allocator import ALIVE, NO_PLACE, ArenaFunctions, CountingAllocator
from pooch.torchtools.memory_trace import MemoryTracer
from tests.children import child_environment
from tests.counting import counting

pytestmark = [pytest.mark.cpu, pytest.mark.timeout(120)]
KIB = 1024


@pytest.fixture
def allocator() -> Iterator[CountingAllocator]:
    gc.collect()  # what earlier tests left in cycles does not die in this one
    with counting() as found:
        yield found
        found.arena.stop()
        gc.collect()
        assert found.arena.mapped_bytes() == 0


@pytest.fixture
def arena(allocator: CountingAllocator) -> ArenaFunctions:
    return allocator.arena


def block(kib: float) -> torch.Tensor:
    return torch.empty(int(kib * KIB), dtype=torch.uint8)


def holds(tensor: torch.Tensor, value: int) -> bool:
    """Whether all bytes of a tensor have a value, found without allocating a tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) == bytes([value]) * tensor.nbytes


def serve(arena: ArenaFunctions, kib: list[int], offsets_kib: list[int], *, canaries: bool = False) -> None:
    """Serve steps of these sizes at these offsets; -1: no place. Canaries take a KiB behind each block."""
    sizes = np.array(kib, dtype=np.int64) * KIB
    offsets = np.array([NO_PLACE if each < 0 else each * KIB for each in offsets_kib], dtype=np.int64)
    rooms = sizes + KIB * canaries
    arena_bytes = int(max(offsets + rooms, default=0))
    assert arena.serve(sizes, offsets, rooms, arena_bytes, canaries=canaries)


def test_a_recording_tells_sizes_and_deaths(arena: ArenaFunctions) -> None:
    earlier = block(9)
    arena.record()
    first = block(1)
    second = block(2)
    del first, earlier
    third = block(3)
    torch.empty(0)
    del third
    step = arena.recorded()
    assert step.sizes.tolist() == [1 * KIB, 2 * KIB, 3 * KIB]
    assert step.deaths.tolist() == [2, ALIVE, 3]
    del second
    block(1)
    assert arena.recorded().sizes.tolist() == [1 * KIB, 2 * KIB, 3 * KIB]  # it has ended


def test_other_threads_are_not_recorded_but_what_they_free_is(arena: ArenaFunctions) -> None:
    arena.record()
    held = [block(1), block(2)]
    freed = threading.Thread(target=lambda: (block(7), held.pop(0)))
    freed.start()
    freed.join()
    block(3)
    assert arena.recorded().deaths.tolist() == [2, ALIVE, 3]


def test_requests_get_their_places_in_every_step(arena: ArenaFunctions) -> None:
    serve(arena, [4, 8, 2], [0, 4, 12])
    for step in range(3):
        if step:
            arena.begin_step()
        held = [block(4), block(8), block(2)]
        begin = held[0].data_ptr()
        assert [each.data_ptr() - begin for each in held] == [0, 4 * KIB, 12 * KIB]
        assert all(arena.contains(each.data_ptr()) for each in held)
        assert begin % (2 << 20) == 0
        del held
    counters = arena.counters()
    assert (counters.steps, counters.placed, counters.requests, counters.fallbacks) == (3, 9, 9, 0)
    assert counters.placed_bytes == 3 * 14 * KIB


def test_a_place_that_is_taken_is_not_given_again(arena: ArenaFunctions) -> None:
    serve(arena, [4, 8], [0, 2])  # the layout itself is wrong: they overlap
    first = block(4).fill_(1)
    second = block(8).fill_(2)
    assert not arena.contains(second.data_ptr())
    arena.begin_step()
    third = block(4).fill_(3)  # the first still lives
    assert not arena.contains(third.data_ptr())
    assert [holds(first, 1), holds(second, 2), holds(third, 3)] == [True] * 3
    assert arena.counters().collided == 2
    del first
    assert arena.contains(block(8).data_ptr())


def test_requests_without_a_place_are_no_fallbacks(arena: ArenaFunctions) -> None:
    serve(arena, [4, 8, 2], [0, -1, 4])
    held = [block(4), block(8), block(2)]
    assert [arena.contains(each.data_ptr()) for each in held] == [True, False, True]
    assert (arena.counters().unplaced, arena.counters().fallbacks) == (1, 0)


def test_an_added_request_does_not_disturb_those_after_it(arena: ArenaFunctions) -> None:
    serve(arena, [4, 8, 2], [0, 4, 12])
    held = [block(4), block(5), block(8), block(2)]
    assert [arena.contains(each.data_ptr()) for each in held] == [True, False, True, True]
    assert arena.counters().unrecognised == 1


def test_after_missing_requests_the_sequence_goes_on(arena: ArenaFunctions) -> None:
    sizes = list(range(1, 11))
    serve(arena, sizes, np.cumsum([0, *sizes[:-1]]).tolist())
    held = [block(each) for each in (1, 2, 5, 6, 7, 8)]  # 3 and 4 are missing
    assert [arena.contains(each.data_ptr()) for each in held] == [True, True, False, False, True, True]
    arena.begin_step()
    del held
    assert arena.contains(block(1).data_ptr())  # in step again


def test_requests_beyond_the_step_are_counted(arena: ArenaFunctions) -> None:
    serve(arena, [4], [0])
    held = [block(4), block(4), block(9)]
    assert [arena.contains(each.data_ptr()) for each in held] == [True, False, False]
    assert arena.counters().beyond == 2


def test_other_threads_get_no_place_and_give_places_back(arena: ArenaFunctions) -> None:
    serve(arena, [4, 4], [0, 0])
    held = [block(4)]
    seen: list[bool] = []

    def beside() -> None:
        seen.append(arena.contains(block(4).data_ptr()))
        held.clear()

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert seen == [False]
    assert arena.counters().elsewhere == 1
    assert arena.contains(block(4).data_ptr())


def test_the_thread_that_begins_the_step_is_served(arena: ArenaFunctions) -> None:
    serve(arena, [4], [0])
    seen: list[bool] = []

    def another() -> None:
        arena.begin_step()
        seen.append(arena.contains(block(4).data_ptr()))

    thread = threading.Thread(target=another)
    thread.start()
    thread.join()
    assert seen == [True]
    assert not arena.contains(block(4).data_ptr())  # this thread's requests are not the step's any more


def test_blocks_outlive_their_arena(allocator: CountingAllocator, arena: ArenaFunctions) -> None:
    before = allocator.live_bytes()
    serve(arena, [64, 8], [0, 64])
    kept, other = block(64).fill_(7), block(8)
    arena.stop()
    del other
    assert not arena.contains(block(64).data_ptr())
    serve(arena, [4], [0])  # another arena beside it
    small = block(4).fill_(5)
    assert arena.mapped_bytes() == (72 + 4) * KIB  # whole pages, and no more
    assert holds(kept, 7)
    assert holds(small, 5)
    assert allocator.live_bytes() - before == 68 * KIB
    del kept
    assert arena.mapped_bytes() == 4 * KIB
    del small
    assert allocator.live_bytes() == before
    assert arena.mapped_bytes() == 4 * KIB  # it still serves


def test_without_the_allocator_in_place_nothing_is_placed_and_blocks_stay_valid() -> None:
    gc.collect()
    with counting() as allocator:
        serve(allocator.arena, [4, 4], [0, 4])
        kept = block(4).fill_(3)
    outside = block(4)
    assert not allocator.arena.contains(outside.data_ptr())
    assert holds(kept, 3)
    assert kept.untyped_storage().resize_(16 * KIB).nbytes() == 16 * KIB  # by its own allocator, which is not in place
    assert holds(kept, 3)
    allocator.arena.stop()
    del kept
    assert allocator.arena.mapped_bytes() == 0


def test_storages_that_grow_and_empty_themselves_give_their_places_back(arena: ArenaFunctions) -> None:
    serve(arena, [4, 8, 4], [0, 4, 0])
    tensor = block(4).fill_(1)
    tensor.resize_(8 * KIB)  # request 1; what it held is copied there
    assert holds(tensor[: 4 * KIB], 1)
    again = block(4).fill_(2)  # request 2, where the tensor was
    assert arena.contains(tensor.data_ptr())
    assert arena.contains(again.data_ptr())
    assert holds(tensor[: 4 * KIB], 1)
    tensor.untyped_storage().resize_(0)
    assert arena.live_blocks() == 1


def test_live_and_peak_bytes_and_torchs_profiler_see_blocks_in_the_arena(
    allocator: CountingAllocator, arena: ArenaFunctions
) -> None:
    tracer = MemoryTracer(torch.device("cpu"))
    tracer.start()
    serve(arena, [64, 32, 16], [0, 64, 0])
    start_bytes = allocator.live_bytes()
    allocator.reset_peak()
    first = block(64)
    second = block(32)
    del first
    third = block(16)
    live_bytes, peak_bytes = allocator.live_bytes() - start_bytes, allocator.peak_bytes() - start_bytes
    trace = tracer.stop()
    assert arena.counters().placed == 3
    assert (live_bytes, peak_bytes) == (48 * KIB, 96 * KIB)
    assert trace.peak_bytes == peak_bytes
    assert sum(event.size_bytes for event in trace.events) == live_bytes
    del second, third


def test_threads_that_ask_for_room_still_do(allocator: CountingAllocator, arena: ArenaFunctions) -> None:
    asked: list[int] = []
    serve(arena, [4, 4], [0, 4])
    allocator.set_limit(allocator.live_bytes() + 6 * KIB, asked.append)
    allocator.ask_for_room(True)
    held = [block(4), block(4)]
    allocator.ask_for_room(False)
    assert asked == [2 * KIB]
    assert all(arena.contains(each.data_ptr()) for each in held)


def test_canaries_notice_writes_behind_a_block(arena: ArenaFunctions) -> None:
    serve(arena, [4, 4], [0, 8], canaries=True)
    first, second = block(4).fill_(1), block(4).fill_(2)
    del first
    assert arena.counters().broken_canaries == 0
    ctypes.memset(second.data_ptr() + 4 * KIB + 10, 0, 3)
    del second
    assert arena.counters().broken_canaries == 3


def test_places_outside_of_the_arena_or_too_small_are_none(arena: ArenaFunctions) -> None:
    sizes = np.array([4 * KIB, 4 * KIB, 4 * KIB], dtype=np.int64)
    offsets = np.array([0, 8 * KIB, -64], dtype=np.int64)
    rooms = np.array([KIB, 4 * KIB, 4 * KIB], dtype=np.int64)
    assert arena.serve(sizes, offsets, rooms, 8 * KIB)
    held = [block(4), block(4), block(4)]
    assert not any(arena.contains(each.data_ptr()) for each in held)


def test_an_arena_that_the_system_has_no_room_for_is_not_served(arena: ArenaFunctions) -> None:
    one = np.array([KIB], dtype=np.int64)
    assert not arena.serve(one, np.zeros(1, dtype=np.int64), one, 2**60)
    assert not arena.contains(block(1).data_ptr())


class Program:
    """A random program of allocations and frees, whose every block holds a value of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.alive: list[tuple[torch.Tensor, int]] = []
        self.numbers = 0

    def allocate(self, size_bytes: int) -> None:
        self.numbers = self.numbers % 250 + 1
        self.alive.append((torch.full((size_bytes,), self.numbers, dtype=torch.uint8), self.numbers))

    def free(self, position: int) -> None:
        tensor, number = self.alive.pop(position)
        assert holds(tensor, number)

    def check(self) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t, _ in self.alive)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert all(holds(tensor, number) for tensor, number in self.alive)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_program_does_no_block_lies_over_another(arena: ArenaFunctions, seed: int) -> None:
    """Against a layout of random, overlapping places: right results must not depend on the layout."""
    program = Program(seed)
    rng = program.random
    sizes = [rng.randrange(1, 5000) for _ in range(120)]
    rooms = np.array([-(-size // 64) * 64 for size in sizes], dtype=np.int64)
    offsets = np.array([rng.randrange(0, 1500) * 64 for _ in sizes], dtype=np.int64)
    assert arena.serve(np.array(sizes, dtype=np.int64), offsets, rooms, int((offsets + rooms).max()), canaries=True)
    keeper: list[tuple[torch.Tensor, int]] = []
    for _ in range(12):
        arena.begin_step()
        for size in sizes:
            if rng.random() < 0.03:
                continue
            if rng.random() < 0.03:
                program.allocate(rng.randrange(1, 5000))
            program.allocate(size)
            while program.alive and rng.random() < 0.5:
                place = rng.randrange(len(program.alive))
                if rng.random() < 0.3:  # freed by another thread
                    keeper.append(program.alive.pop(place))
                    thread = threading.Thread(target=keeper.clear)
                    thread.start()
                    thread.join()
                else:
                    program.free(place)
        program.check()
    counters = arena.counters()
    assert counters.placed > 200
    assert counters.collided > 50
    assert counters.unrecognised > 10
    assert counters.broken_canaries == 0
    program.alive.clear()
    assert arena.live_blocks() == 0


def test_threads_that_free_while_the_step_allocates_do_no_harm(arena: ArenaFunctions) -> None:
    serve(arena, [1] * 400, [number % 40 for number in range(400)])
    changed: list[int] = []

    def free(blocks: SimpleQueue[tuple[torch.Tensor, int] | None]) -> None:
        while (taken := blocks.get()) is not None:
            if not holds(*taken):
                changed.append(taken[1])
            del taken

    for step in range(30):
        blocks: SimpleQueue[tuple[torch.Tensor, int] | None] = SimpleQueue()
        threads = [threading.Thread(target=free, args=(blocks,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        arena.begin_step()
        for number in range(400):
            value = (step + number) % 256
            blocks.put((block(1).fill_(value), value))
        for _ in threads:
            blocks.put(None)
        for thread in threads:
            thread.join()
    assert changed == []
    assert arena.live_blocks() == 0
    assert arena.counters().placed >= 30 * 40  # a step begins with all places free


# Processes of their own -----------------------------------------------------------------------------------------------

BEGIN = """
import numpy as np, os, sys, torch
from pooch.torchtools.cpu_allocator import counting_allocator
allocator = counting_allocator()
assert allocator.install("a test")
arena = allocator.arena
sizes = np.array([4096, 4096], dtype=np.int64)
assert arena.serve(sizes, np.array([0, 4096], dtype=np.int64), sizes, 8192)
block = lambda: torch.empty(4096, dtype=torch.uint8)
first = block().fill_(1)
assert arena.contains(first.data_ptr())
"""
FORK = """
child = os.fork()
if child == 0:
    second = block().fill_(9)
    placed = arena.contains(second.data_ptr())
    kept = bool((first.numpy() == 1).all())
    first.fill_(5)
    del first
    arena.begin_step()
    third = block()
    os._exit(10 * placed + kept + 100 * arena.contains(third.data_ptr()))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, bool((first.numpy() == 1).all()), arena.contains(block().data_ptr()))
"""


def run(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], env=child_environment(), capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fork_keeps_its_copies_and_places_nothing() -> None:
    assert run(BEGIN + FORK) == "1 True True"


def test_an_interpreter_ends_while_blocks_live_in_the_arena() -> None:
    keep = (
        "sys.kept = first; torch.kept = block(); import builtins; builtins.kept = torch.kept.view(-1); print('ended')"
    )
    assert run(BEGIN + keep) == "ended"
    assert run(BEGIN + "arena.stop(); allocator.remove('a test'); sys.kept = first; print('ended')") == "ended"

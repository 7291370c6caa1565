"""The CUDA arena on a device that exists in Python alone: which memory it gives out, and after which events."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

from pooch.torchtools.cpu_allocator import ALIVE, NO_PLACE
from pooch.torchtools.cuda_allocator import CudaArena, DeviceFunctions
from pooch.torchtools.cuda_allocator.allocator import built_library

pytestmark = pytest.mark.timeout(60)
KIB, MIB = 1024, 2**20
MAIN, COPIES, OTHER = 101, 202, 303  # streams


class Device:
    """Memory as addresses, streams and events as a list of what was asked for."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.next = total_bytes, 0x10_0000_0000
        self.blocks: dict[int, int] = {}
        self.events: set[int] = set()
        self.log: list[tuple[object, ...]] = []
        self.current = 0
        self.waits_fail = False
        self.pending_error = 0
        kinds = [kind for _, kind in DeviceFunctions._fields_]
        own = (
            self.malloc, self.free, self.create, self.record, self.wait, self.destroy, self.set, self.get, self.error,
            self.info,
        )  # fmt: skip
        self.functions = DeviceFunctions(*(kind(function) for kind, function in zip(kinds, own, strict=True)))

    def malloc(self, out: ctypes._Pointer[ctypes.c_void_p], size: int) -> int:
        if sum(self.blocks.values()) + size > self.total_bytes:
            self.pending_error = 2
            return 2
        out[0] = ctypes.c_void_p(self.next)
        self.blocks[self.next] = size
        self.next += size + MIB
        return 0

    def free(self, pointer: int) -> int:
        del self.blocks[pointer]  # a second free is an error
        return 0

    def create(self, out: ctypes._Pointer[ctypes.c_void_p], flags: int) -> int:
        assert flags == 2
        self.next += 1
        self.events.add(self.next)
        out[0] = ctypes.c_void_p(self.next)
        return 0

    def record(self, event: int, stream: int) -> int:
        assert event in self.events
        self.log.append(("record", event, stream))
        return 0

    def wait(self, stream: int, event: int, flags: int) -> int:
        assert event in self.events
        if self.waits_fail:
            return 1
        self.log.append(("wait", event, stream))
        return 0

    def destroy(self, event: int) -> int:
        self.events.remove(event)
        return 0

    def set(self, device: int) -> int:
        self.current = device
        return 0

    def get(self, out: ctypes._Pointer[ctypes.c_int]) -> int:
        out[0] = self.current
        return 0

    def error(self) -> int:
        found, self.pending_error = self.pending_error, 0
        return found

    def info(self, free: ctypes._Pointer[ctypes.c_size_t], total: ctypes._Pointer[ctypes.c_size_t]) -> int:
        free[0] = self.total_bytes - sum(self.blocks.values())
        total[0] = self.total_bytes
        return 0

    def waited(self) -> list[tuple[int, int]]:
        """Pairs of streams: the second waited for the first."""
        recorded = {event: stream for what, event, stream in self.log if what == "record"}
        return [(recorded[event], stream) for what, event, stream in self.log if what == "wait"]


@pytest.fixture
def arena() -> Iterator[CudaArena]:
    found = CudaArena(built_library())
    yield found
    found.stop()
    found.empty_pool(0)


@pytest.fixture
def device(arena: CudaArena) -> Iterator[Device]:
    made = Device(64 * MIB)
    arena.use(made.functions)
    arena.reset_peaks(0)
    yield made
    arena.stop()
    arena.empty_pool(0)
    arena.empty_pool(1)
    assert made.blocks == {}
    assert made.events == set()
    assert made.pending_error == 0


def serve(arena: CudaArena, kib: list[int], offsets_kib: list[int]) -> None:
    sizes = np.array(kib, dtype=np.int64) * KIB
    offsets = np.array([NO_PLACE if each < 0 else each * KIB for each in offsets_kib], dtype=np.int64)
    assert arena.serve(0, MAIN, sizes, offsets, sizes, int((offsets + sizes).max()))
    assert arena.begin_step(MAIN)


def take(arena: CudaArena, kib: int, stream: int = MAIN) -> int:
    pointer = arena.alloc(kib * KIB, 0, stream)
    assert pointer
    return pointer


def test_a_recording_holds_what_the_stream_asks_for(arena: CudaArena, device: Device) -> None:
    arena.record(0, MAIN)
    first, copy, second = take(arena, 1), take(arena, 9, COPIES), take(arena, 2)
    arena.free(first, KIB, 0, MAIN)
    third = take(arena, 3)
    step = arena.recorded()
    assert step.sizes.tolist() == [1 * KIB, 2 * KIB, 3 * KIB]
    assert step.deaths.tolist() == [2, ALIVE, ALIVE]
    for pointer in (copy, second, third):
        arena.free(pointer, 0, 0, MAIN)
    assert arena.bytes(0).requested == arena.bytes(0).blocks == 0


def test_steps_get_their_places_without_any_event(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 8, 4], [0, 4, 0])
    (base,) = device.blocks
    for step in range(3):
        assert step == 0 or arena.begin_step(MAIN)
        first, second = take(arena, 4), take(arena, 8)
        arena.free(first, 4 * KIB, 0, MAIN)
        third = take(arena, 4)
        assert (first - base, second - base, third - base) == (0, 4 * KIB, 0)
        arena.free(second, 8 * KIB, 0, MAIN)
        arena.free(third, 4 * KIB, 0, MAIN)
    assert device.log == []
    assert (arena.counters().placed, arena.counters().fallbacks) == (9, 0)
    assert arena.bytes(0).peak_reserved == 12 * KIB
    assert arena.bytes(0).peak_requested == arena.bytes(0).peak_allocated == 12 * KIB


def test_what_a_copy_reads_is_reused_after_its_event_alone(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 4, 4], [0, 0, 4])
    first = take(arena, 4)
    arena.record_stream(first, COPIES)
    arena.free(first, 4 * KIB, 0, MAIN)
    assert [(what, stream) for what, _, stream in device.log] == [("record", COPIES)]
    second = take(arena, 4)
    assert second == first
    assert device.waited() == [(COPIES, MAIN)]
    third = take(arena, 4)
    assert len(device.log) == 2  # it lies elsewhere
    for pointer in (second, third):
        arena.free(pointer, 4 * KIB, 0, MAIN)


def test_every_event_over_a_place_is_waited_for(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 4, 6], [0, 4, 1])
    for _ in range(2):
        pointer = take(arena, 4)
        arena.record_stream(pointer, COPIES)
        arena.record_stream(pointer, OTHER)
        arena.free(pointer, 4 * KIB, 0, MAIN)
    take_both = take(arena, 6)
    assert sorted(device.waited()) == [(COPIES, MAIN)] * 2 + [(OTHER, MAIN)] * 2
    arena.free(take_both, 0, 0, MAIN)


def test_a_place_whose_event_cannot_be_waited_for_is_not_used(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 4], [0, 0])
    first = take(arena, 4)
    arena.record_stream(first, COPIES)
    arena.free(first, 4 * KIB, 0, MAIN)
    device.waits_fail = True
    second = take(arena, 4)
    assert second != first
    assert (arena.counters().placed, arena.counters().collided) == (1, 1)
    arena.free(second, 4 * KIB, 0, MAIN)
    device.waits_fail = False


def test_steps_that_change_their_stream_come_after_the_last_one(arena: CudaArena, device: Device) -> None:
    serve(arena, [4], [0])
    first = take(arena, 4)
    assert arena.begin_step(OTHER)
    assert device.waited() == [(MAIN, OTHER)]
    arena.free(first, 4 * KIB, 0, MAIN)  # its stream goes on: the place needs another event
    second = take(arena, 4, OTHER)
    assert second == first
    assert device.waited() == [(MAIN, OTHER), (MAIN, OTHER)]
    arena.free(second, 4 * KIB, 0, OTHER)


def test_live_places_are_not_given_out(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 4], [0, 2])
    first, second = take(arena, 4), take(arena, 4)
    assert abs(first - second) >= 4 * KIB
    assert arena.counters().collided == 1
    arena.free(first, 0, 0, MAIN)
    arena.free(second, 0, 0, MAIN)


def test_other_streams_and_unknown_sizes_come_from_the_pool_of_their_stream(arena: CudaArena, device: Device) -> None:
    serve(arena, [4], [0])
    copy, unknown = take(arena, 4, COPIES), take(arena, 5)
    arena.free(copy, 0, 0, COPIES)
    assert take(arena, 4) not in (copy, unknown)  # the step's own place
    assert take(arena, 4) != copy  # kept for its stream
    assert (arena.counters().elsewhere, arena.counters().unrecognised, arena.counters().beyond) == (1, 1, 1)
    assert take(arena, 4, COPIES) == copy
    assert device.log == []
    for pointer in list(device.blocks):
        arena.free(pointer, 0, 0, MAIN)


def test_blocks_of_the_pool_wait_for_other_streams_too(arena: CudaArena, device: Device) -> None:
    first = take(arena, 4)
    arena.record_stream(first, COPIES)
    arena.free(first, 0, 0, MAIN)
    assert device.waited() == []
    assert take(arena, 4) == first
    assert device.waited() == [(COPIES, MAIN)]
    arena.free(first, 0, 0, MAIN)


def test_a_full_device_gets_the_pool_back_before_memory_is_out(arena: CudaArena, device: Device) -> None:
    kept = arena.alloc(40 * MIB, 0, MAIN)
    arena.free(kept, 0, 0, MAIN)
    assert arena.bytes(0).reserved == 40 * MIB
    larger = arena.alloc(50 * MIB, 0, MAIN)
    assert larger
    assert arena.bytes(0).reserved == 50 * MIB
    assert arena.alloc(50 * MIB, 0, MAIN) == 0
    assert device.pending_error == 0  # PyTorch would take it for the error of its next kernel
    arena.free(larger, 0, 0, MAIN)


def test_no_more_is_reserved_than_the_share_that_is_allowed(arena: CudaArena, device: Device) -> None:
    arena.limit(0.5, 0)
    try:
        kept = arena.alloc(20 * MIB, 0, MAIN)
        assert arena.alloc(13 * MIB, 0, MAIN) == 0
        elsewhere = arena.alloc(13 * MIB, 1, MAIN)
        assert elsewhere
        arena.free(kept, 0, 0, MAIN)
        arena.free(elsewhere, 0, 1, MAIN)
    finally:
        arena.limit(1.0, 0)


def test_each_device_has_counters_by_pytorchs_names(arena: CudaArena, device: Device) -> None:
    first, second = arena.alloc(1000, 0, MAIN), arena.alloc(2000, 1, MAIN)
    arena.free(first, 0, 0, MAIN)
    counters = arena.memory_counters(0)
    assert (counters["requested_bytes.all.peak"], counters["requested_bytes.all.current"]) == (1000, 0)
    assert (counters["allocated_bytes.all.peak"], counters["allocated_bytes.all.current"]) == (1024, 0)
    assert (counters["allocation.small_pool.peak"], counters["reserved_bytes.all.current"]) == (1, 1024)
    assert arena.bytes(1).requested == 2000
    arena.free(second, 0, 1, MAIN)


def test_an_arena_with_live_blocks_stays_until_the_last(arena: CudaArena, device: Device) -> None:
    serve(arena, [4, 4], [0, 4])
    first, second = take(arena, 4), take(arena, 4)
    arena.free(first, 0, 0, MAIN)
    arena.stop()
    assert len(device.blocks) == 1
    arena.record_stream(second, COPIES)
    arena.free(second, 0, 0, MAIN)
    assert device.blocks == {}
    assert arena.bytes(0).reserved == 0


def test_an_arena_that_does_not_fit_is_not_served(arena: CudaArena, device: Device) -> None:
    one = np.array([KIB], dtype=np.int64)
    assert not arena.serve(0, MAIN, one, one * 0, one, 100 * MIB)
    pointer = take(arena, 1)
    arena.free(pointer, 0, 0, MAIN)


def test_each_device_gets_its_own_memory(arena: CudaArena, device: Device) -> None:
    serve(arena, [4], [0])
    pointer = arena.alloc(4 * KIB, 1, MAIN)
    assert device.current == 0  # as before
    assert arena.counters().elsewhere == 1
    arena.free(pointer, 0, 1, MAIN)
    assert arena.alloc(4 * KIB, 0, COPIES) != pointer
    for left in list(device.blocks):
        arena.free(left, 0, 0, COPIES)

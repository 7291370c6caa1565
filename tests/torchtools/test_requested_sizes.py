"""Blocks in a memory trace: counted as they were asked for, whatever the allocator's cache made of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pooch.torchtools.memory_trace import MemoryTracer
from pooch.torchtools.reported_memory import MemoryEvent
from pooch.torchtools.requested_sizes import allocated_as_requested, as_requested, without_unsplit_rest
from tests.executor.support import quick_profile

MIB = 2**20
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("block", "asked", "counted"),
    [
        (1024, 700, 1024),
        (12 * MIB, 11 * MIB + 100, 11 * MIB + 512),
        (12 * MIB, 11 * MIB, 11 * MIB),
        # THEN more than an unsplit rest was added on purpose: powers of two, blocks that are never split
        (64 * MIB, 33 * MIB, 64 * MIB),
        # AND what cannot be stays as the allocator counted it
        (512, 700, 512),
    ],
)
def test_a_block_counts_without_its_unsplit_rest(block: int, asked: int, counted: int) -> None:
    assert without_unsplit_rest(block, asked) == counted


def test_events_get_what_was_asked_for_at_their_address_in_order() -> None:
    events = [
        MemoryEvent(1, 7, 12 * MIB),
        MemoryEvent(2, 9, 1024),
        MemoryEvent(3, 7, -12 * MIB),
        MemoryEvent(4, 7, 2 * MIB),
        MemoryEvent(5, 5, -3 * MIB),  # it lived before
    ]
    asked = {7: [11 * MIB + 512, -(11 * MIB + 512), 2 * MIB - 1024], 9: [600], 5: [-(2 * MIB + 512)]}
    sizes = [event.size_bytes for event in as_requested(events, asked)]
    assert sizes == [11 * MIB + 512, 1024, -(11 * MIB + 512), 2 * MIB - 1024, -(2 * MIB + 512)]


@pytest.mark.parametrize("asked", [{}, {7: [11 * MIB]}, {7: [-11 * MIB, 11 * MIB]}, {7: [11 * MIB, -11 * MIB, 5]}])
def test_blocks_stay_where_the_allocators_history_does_not_agree(asked: dict[int, list[int]]) -> None:
    events = (MemoryEvent(1, 7, 12 * MIB), MemoryEvent(3, 7, -12 * MIB))
    assert as_requested(events, asked) == events


@pytest.fixture
def cache_of_large_blocks() -> Iterator[None]:
    """Free blocks that are taken whole by what is somewhat smaller."""
    torch.cuda.empty_cache()
    blocks = [torch.empty(12 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del blocks
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@on_a_gpu
def test_a_trace_has_what_was_asked_for(cache_of_large_blocks: None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    asked = 12 * MIB - 600 * 1024
    before = allocated_as_requested(device)
    earlier = torch.empty(asked, dtype=torch.uint8, device=device)
    assert allocated_as_requested(device) - before == asked
    tracer = MemoryTracer(device)
    tracer.start()
    tensor = torch.empty(asked, dtype=torch.uint8, device=device)
    del tensor, earlier
    sizes = [event.size_bytes for event in tracer.stop().events]
    assert sizes == [asked, -asked, -asked]
    assert not torch._C._cuda_isHistoryEnabled()


@pytest.mark.gpu
@on_a_gpu
def test_a_history_that_the_program_keeps_is_left_alone(cache_of_large_blocks: None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.memory._record_memory_history(context=None)
    try:
        tracer = MemoryTracer(device)
        tracer.start()
        tensor = torch.empty(12 * MIB, dtype=torch.uint8, device=device)
        (event,) = tracer.stop().events
        assert event.size_bytes == tensor.nbytes
        assert torch._C._cuda_isHistoryEnabled()
        assert torch.cuda.memory._snapshot()["device_traces"][device.index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("mode", ["run", "offload"])
def test_a_profile_does_not_depend_on_what_the_cache_holds(mode: str, cache_of_large_blocks: None) -> None:
    rows = torch.rand(2900, 1024, device="cuda")  # 11.3 MiB
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(1024, 1024), nn.Tanh()))).cuda()
    forward = lambda: model(rows).sum()  # noqa: E731
    profile = quick_profile(forward, model, mode=mode)
    made = [value for value in profile.values if value.role == "made" and value.size_bytes == rows.nbytes]
    assert len(made) == 6
    assert {value.allocated_bytes for value in made} == {-(-rows.nbytes // 512) * 512}

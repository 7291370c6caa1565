"""Counting live bytes where no allocator counts them."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

import pooch
from pooch.executor import live_bytes
from tests.counting import the_allocator
from tests.live_before import live_before

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("watched_by")]


def test_a_walk_over_all_tensors_is_not_made_at_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, figures = [0.0], iter((100, 200))

    def walk(_: object) -> int:
        clock[0] += 1.0  # a walk takes a second
        return next(figures)

    monkeypatch.setattr(live_bytes, "live_bytes", walk)
    monkeypatch.setattr(live_bytes, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    counter = live_bytes.WalkedBytes()
    assert [counter.recent() for _ in range(50)] == [100] * 50
    assert counter.look() is None
    clock[0] += live_bytes._TIMES_A_WALK
    assert counter.look() == (200, 0)
    assert counter.peak() == 200


def test_a_budget_whose_making_was_interrupted_leaves_no_allocator_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = the_allocator()
    users = dict(allocator._users)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(live_bytes.CountedBytes, "recount", interrupted)
        with pytest.raises(KeyboardInterrupt):
            live_bytes.live_bytes_of(torch.device("cpu"))
    gc.collect()
    assert allocator._users == users
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    for _ in range(2):
        counter.close()
    assert allocator._users == users
    live_bytes.live_bytes_of(torch.device("cpu"))  # never closed
    gc.collect()
    assert allocator._users == users


@pytest.mark.parametrize("gone", ["nothing", "freed", "other data", "gradient"])
def test_what_was_counted_is_counted_again_where_some_of_it_is_gone(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With large libraries loaded, a walk over all objects takes as long as a small step."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.zeros(1000)
    others, walks = [torch.zeros(1000) for _ in range(3)], list[int]()
    gc.collect()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    before_bytes, walk = counter.now(), live_bytes.live_tensors
    monkeypatch.setattr(live_bytes, "live_tensors", lambda: walks.append(1) or walk())
    if gone == "freed":
        del others[0]
    elif gone == "other data":
        others[0].data = torch.zeros(0)
    elif gone == "gradient":
        parameter.grad = None
    counter.recount(if_less=True)
    assert (counter.now(), len(walks)) == ((before_bytes, 0) if gone == "nothing" else (before_bytes - 4000, 1))
    counter.recount()
    assert counter.now() == before_bytes - 4000 * (gone != "nothing")
    counter.close()


def test_what_was_counted_can_be_swapped_with_other_tensors() -> None:
    """PyTorch refuses to swap tensors that have weak references, as some libraries do with a model's parameters."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    one, other = torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.ones(1000))
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    torch.utils.swap_tensors(one, other)
    assert one.sum() == 1000
    counter.close()


def test_what_came_past_the_allocator_since_it_was_counted_does_not_count_below_zero() -> None:
    """Storages that Python makes, as in copies and pickles, are no allocations of the allocator in place."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    earlier = torch.UntypedStorage(4000)
    there = torch.empty(0).set_(earlier)  # counting looks for tensors
    gc.collect()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    before_bytes = counter.now()
    later = torch.UntypedStorage(8000)
    for storage, came_bytes in ((earlier, 0), (later, 8000)):
        for _ in range(2):  # counted once
            ended = counter.uncounted(storage.data_ptr(), storage.nbytes())
            assert counter.now() == before_bytes + came_bytes
        assert ended is not None
        ended(storage.nbytes())
        before_bytes -= storage.nbytes() - came_bytes
        assert counter.now() == before_bytes
    counter.close()
    del there


def test_a_peak_stays_what_it_was_where_something_that_was_there_before_ends() -> None:
    """As where parameters leave for the first time after the peak, which was then reported too low by their bytes."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    before = torch.zeros(100_000)
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    ended = counter.uncounted(before.data_ptr(), before.nbytes)
    assert ended is not None
    counter.reset_peak()
    passing = torch.zeros(50_000)
    peak_bytes = counter.peak()
    assert peak_bytes == counter.now()
    del passing
    ended(before.nbytes)
    assert counter.now() == peak_bytes - 600_000
    assert counter.peak() == peak_bytes
    higher = torch.zeros(160_000)
    assert counter.peak() == counter.now() == peak_bytes + 40_000
    del higher, before
    counter.reset_peak()
    assert counter.peak() == counter.now()
    counter.close()


def test_what_a_step_is_given_in_shared_memory_is_counted_until_it_is_gone() -> None:
    """So loaders hand over batches. No allocation tells of them."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    batch = torch.zeros(1000).share_memory_()
    gc.collect()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    before_bytes = counter.now()
    counter.count_given([batch, batch[10:]])
    assert counter.now() == before_bytes, "it was there"
    batch = torch.zeros(3000).share_memory_()
    assert counter.now() == before_bytes, "nobody knows yet"
    counter.count_given([batch])
    assert counter.now() == before_bytes + 8000
    counter.count_given([torch.zeros(500)])
    assert counter.now() == before_bytes + 8000, "it is alive, and the other was allocated"
    ended = counter.uncounted(batch.data_ptr(), batch.nbytes)
    assert ended is not None
    ended(batch.nbytes)
    del batch
    counter.count_given([])
    assert counter.now() == before_bytes - 4000, "whoever asked has told of its end"
    counter.close()


def test_what_somebody_else_tells_the_end_of_is_subtracted_once_though_steps_are_given_it() -> None:
    """As a batch from before the budget that may leave, and is still there when the next step is given it."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    batch = torch.zeros(1000)
    gc.collect()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    before_bytes = counter.now()
    ended = counter.uncounted(batch.data_ptr(), batch.nbytes)
    assert ended is not None
    counter.count_given([batch])
    counter.recount()
    counter.count_given([batch])
    assert counter.now() == before_bytes
    ended(batch.nbytes)
    del batch
    counter.count_given([])
    assert counter.now() == before_bytes - 4000
    counter.close()


def test_batches_in_shared_memory_count_in_each_step_under_a_budget() -> None:
    if the_allocator().is_in_use:
        pytest.skip("something counts already")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    counted, found = list[int](), list[int]()
    with pooch.auto(model, 2**20 + live_before(), tell=lambda _: None) as auto:
        live = auto._driver._live

        def look(*_: object) -> None:
            counted.append(live.now())
            live.recount()
            found.append(live.now())

        model[0].register_forward_pre_hook(look)
        for rows in (256, 128, 256, 192, 320, 64, 256, 128):
            model(torch.rand(rows, 64).share_memory_()).sum().backward()
    assert counted == found
    assert len(set(counted)) > 4


def _sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.zeros(256, 256)
    dense[::4, ::4] = 1  # in blocks of 2x2, which are half empty
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    return dense.to_sparse(layout=layout, blocksize=blocks)


UNUSUAL = {
    "coo": lambda: _sparse(torch.sparse_coo),
    "csr": lambda: _sparse(torch.sparse_csr),
    "csc": lambda: _sparse(torch.sparse_csc),
    "bsr": lambda: _sparse(torch.sparse_bsr),
    "bsc": lambda: _sparse(torch.sparse_bsc),
    "gradient": lambda: torch.nn.Embedding(50, 64, sparse=True),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(128, 128), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(40, 64), torch.zeros(24, 64)]),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_every_layout_that_were_there_before_are_counted(kind: str) -> None:
    """Such as the adjacency matrix of a graph, which often takes most."""
    if the_allocator().is_in_use:
        pytest.skip("something counts already")

    def made() -> object:
        found = UNUSUAL[kind]()
        if isinstance(found, torch.nn.Embedding):
            found(torch.arange(50)).sum().backward()
        return found

    gc.collect()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    before_bytes, kept = counter.now(), made()
    own_bytes = counter.now() - before_bytes  # as the allocator counts them
    counter.close()
    assert own_bytes > 10_000
    del kept
    gc.collect()
    kept = made()
    counter = live_bytes.live_bytes_of(torch.device("cpu"))
    try:
        assert abs(counter.now() - before_bytes - own_bytes) <= 256
    finally:
        counter.close()
    del kept


def test_functional_tensors_that_tracing_has_left_behind_count_for_nothing() -> None:
    """AOTAutograd may leave some, and asking for their addresses raises."""
    model = torch.nn.Linear(64, 64)
    before = live_bytes.live_bytes(torch.device("cpu"))
    left = torch._to_functional_tensor(model.weight.detach())
    assert live_bytes.live_bytes(torch.device("cpu")) == before
    with pooch.auto(model, "1GiB") as auto:
        model(torch.randn(8, 64)).sum().backward()
    assert auto.summary().steps == 1
    assert torch._is_functional_tensor(left)

"""The allocator that counts: exact, removable at any time, and never in the way."""

from __future__ import annotations

import copy
import gc
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from pooch.torchtools.cpu_allocator import CountingAllocator
from pooch.torchtools.cpu_allocator.building import built_library
from pooch.torchtools.cpu_allocator.counting import _Callback
from pooch.torchtools.memory_trace import MemoryTracer
from tests.children import child_environment
from tests.counting import counting

pytestmark = pytest.mark.cpu
KIB = 1024


def block(kib: int) -> torch.Tensor:
    return torch.empty(kib * KIB, dtype=torch.uint8)


def is_counting(allocator: CountingAllocator) -> bool:
    before = allocator.live_bytes()
    tensor = block(1)
    return allocator.live_bytes() - before == tensor.nbytes


def test_live_and_peak_are_those_of_torchs_profiler() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    pixels = torch.rand(2, 3, 16, 16)
    gc.collect()
    gc.disable()
    try:
        with counting() as allocator:
            tracer = MemoryTracer(torch.device("cpu"))
            tracer.start()
            start_bytes = allocator.live_bytes()
            allocator.reset_peak()
            model(pixels).square().mean().backward()
            live_bytes, peak_bytes = allocator.live_bytes() - start_bytes, allocator.peak_bytes() - start_bytes
            trace = tracer.stop()
    finally:
        gc.enable()
    assert live_bytes == sum(event.size_bytes for event in trace.events) > 0
    assert peak_bytes == trace.peak_bytes > live_bytes


def test_deep_copies_are_counted() -> None:
    """PyTorch takes what its storages are cloned to from its own allocator, whichever is in place."""
    tensor = torch.arange(256 * KIB, dtype=torch.uint8)
    with counting() as allocator:
        before = allocator.live_bytes()
        copied = copy.deepcopy({"weight": tensor, "tied": tensor})
        assert allocator.live_bytes() - before == tensor.nbytes
    assert torch.equal(copied["tied"], tensor)
    copied["tied"].resize_(512 * KIB)
    del copied
    assert allocator.live_bytes() == before
    assert "clone" not in vars(torch.UntypedStorage)
    assert torch.equal(copy.deepcopy(tensor), tensor)


def test_blocks_outlive_removal_and_are_still_counted_off() -> None:
    with counting() as allocator:
        before = allocator.live_bytes()
        tensor = block(64).fill_(7)
    uncounted = block(32)
    assert allocator.live_bytes() == before + tensor.nbytes
    assert bool((tensor == 7).all())
    del tensor
    assert allocator.live_bytes() == before
    del uncounted
    assert allocator.live_bytes() == before


def test_clones_of_storages_are_counted_until_they_are_emptied() -> None:
    """PyTorch makes their storages past the allocator that is in place, as all that Python constructs."""
    tensor = torch.arange(64 * KIB, dtype=torch.float32)
    with counting() as allocator:
        before = allocator.live_bytes()
        copied = copy.deepcopy({"state": [tensor, tensor[:8]]})  # of one storage
        assert allocator.live_bytes() - before == tensor.nbytes
        assert torch.equal(copied["state"][0], tensor)
        storage = tensor.untyped_storage().clone()
        assert allocator.live_bytes() - before == 2 * tensor.nbytes
        storage.resize_(0)
        assert allocator.live_bytes() - before == tensor.nbytes
    storage = tensor.untyped_storage().clone()  # and works as ever, once nobody counts
    assert storage.nbytes() == tensor.nbytes
    del copied
    assert allocator.live_bytes() == before


def test_blocks_from_before_are_not_counted_off() -> None:
    earlier = block(64)
    with counting() as allocator:
        before = allocator.live_bytes()
        del earlier
        assert allocator.live_bytes() == before


def test_growing_storages_count() -> None:
    with counting() as allocator:
        before = allocator.live_bytes()
        tensor = block(1)
        tensor.resize_(8 * KIB)
        assert allocator.live_bytes() == before + 8 * KIB
        tensor.untyped_storage().resize_(0)
        assert allocator.live_bytes() == before


def test_all_threads_count_together() -> None:
    with counting() as allocator:
        before, kept = allocator.live_bytes(), [[] for _ in range(4)]

        def allocate(mine: list[torch.Tensor]) -> None:
            for number in range(300):
                mine.append(block(1))
                if number % 3:
                    mine.pop()

        threads = [threading.Thread(target=allocate, args=(mine,)) for mine in kept]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert allocator.live_bytes() == before + 400 * KIB
        kept.clear()
        assert allocator.live_bytes() == before


def test_a_thread_that_asks_is_told_how_much_is_missing() -> None:
    asked: list[tuple[int, int]] = []
    with counting() as allocator:
        held = [block(100)]
        allocator.set_limit(allocator.live_bytes() + 10 * KIB, lambda missing: asked.append((missing, get_ident())))

        def beside() -> None:
            held.append(block(20))
            held.pop()

        get_ident = threading.get_ident
        held.append(block(20))
        assert asked == []  # it does not ask yet
        held.pop()
        allocator.ask_for_room(True)
        held.append(block(10))
        held.pop()
        assert asked == []  # just fits
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert asked == []  # a thread does not ask because another does
        held.append(block(20))
        assert asked == [(10 * KIB, get_ident())]
        allocator.ask_for_room(False)
        held.append(block(20))
        assert len(asked) == 1


def test_what_makes_room_may_free_and_allocate() -> None:
    with counting() as allocator:
        held = [block(100)]
        limit = allocator.live_bytes() + 10 * KIB

        def make_room(missing: int) -> None:
            block(50)  # not asked for again
            held.pop(0)

        allocator.set_limit(limit, make_room)
        allocator.ask_for_room(True)
        held.append(block(60))
        assert allocator.live_bytes() <= limit
        held.append(block(60))  # it asks each time
        assert len(held) == 1


def test_the_limit_may_be_changed_by_what_makes_room() -> None:
    """Also repeatedly, so that a callback that is freed while it runs would be noticed."""
    asked: list[int] = []
    with counting() as allocator:
        before = allocator.live_bytes()

        def make_room(missing: int) -> None:
            asked.append(missing)
            for _ in range(100):
                allocator.set_limit(allocator.live_bytes() + 1 * KIB, make_room)
                gc.collect(0)

        allocator.set_limit(before + KIB, make_room)
        allocator.ask_for_room(True)
        held = [block(2) for _ in range(20)]
        assert len(asked) == len(held)


def test_it_knows_what_it_counts() -> None:
    earlier = block(1)
    with counting() as allocator:
        later = block(1)
        assert [allocator.knows(tensor.data_ptr()) for tensor in (earlier, later)] == [False, True]
        address = later.data_ptr()
        del later
        assert not allocator.knows(address)


def test_an_error_in_what_makes_room_is_kept_and_the_allocation_goes_ahead() -> None:
    errors = iter((ValueError("no room today"), ValueError("nor tomorrow")))

    def make_room(missing: int) -> None:
        raise next(errors)

    with counting() as allocator:
        allocator.set_limit(0, make_room)
        allocator.ask_for_room(True)
        tensor = block(4).fill_(1)
        second = block(4)
        allocator.ask_for_room(False)
        with pytest.raises(ValueError, match="no room today"):
            allocator.raise_failure()
        allocator.raise_failure()  # once
    assert bool((tensor == 1).all())
    assert second.nbytes


def test_an_interrupt_while_room_is_made_is_raised_afterwards() -> None:
    reached: list[str] = []

    def make_room(missing: int) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of making room")

    with counting() as allocator:
        allocator.set_limit(0, make_room)
        allocator.ask_for_room(True)
        block(4)
        with pytest.raises(KeyboardInterrupt):
            allocator.raise_failure()
        allocator.raise_failure()
    assert reached == []


def test_an_interrupt_that_leaves_the_callback_is_not_lost_and_room_is_made() -> None:
    """One that came while an operator computed is raised in the first Python code that runs, which is the callback."""
    asked: list[int] = []

    def leaves_at_first(missing: int) -> None:
        asked.append(missing)
        if len(asked) > 1:
            allocator._functions["end_request"]()

    callback = _Callback(leaves_at_first)
    with counting() as allocator:
        allocator._functions["set_limit"](0, callback)
        allocator.ask_for_room(True)
        block(4)
        with pytest.raises(KeyboardInterrupt):
            allocator.raise_failure()
        allocator.raise_failure()
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_it_leaves_with_its_last_user() -> None:
    with counting() as allocator:
        with counting():
            assert is_counting(allocator)
        assert is_counting(allocator)
    assert not is_counting(allocator)


def test_the_limit_is_lifted() -> None:
    asked: list[int] = []
    with counting() as allocator:
        allocator.set_limit(0, asked.append)
        allocator.ask_for_room(True)
        allocator.lift_limit()
        block(1)
    assert asked == []


def test_an_allocation_that_cannot_be_made_is_pytorchs_error() -> None:
    with counting() as allocator:
        before = allocator.live_bytes()
        with pytest.raises(RuntimeError, match="memory"):
            torch.empty(2**58, dtype=torch.uint8)
        assert allocator.live_bytes() == before


# Processes of their own -----------------------------------------------------------------------------------------------

TRAIN = """
import warnings, torch
from pooch.executor.live_bytes import live_bytes_of
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    counters = [live_bytes_of(torch.device("cpu")) for _ in range(2)]
tensor = torch.ones(1000)
print(type(counters[0]).__name__, counters[0].now() >= 4000, len(caught), *(w.message for w in caught[:1]))
"""


def run(text: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text], env=child_environment() | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("way", ["no such compiler", "no compiler", "a compiler that fails"])
def test_without_a_build_there_is_one_warning_and_bytes_are_counted_otherwise(way: str, tmp_path: Path) -> None:
    compilers = {
        "no such compiler": {"CXX": "/nonexistent/c++"},
        "no compiler": {"PATH": str(tmp_path), "CXX": ""},
        "a compiler that fails": {"CXX": "false"},
    }
    cache = tmp_path / "cache"
    printed = run(TRAIN, POOCH_CACHE_DIRECTORY=str(cache), **compilers[way])
    assert printed.startswith("WalkedBytes True 1 no counting allocator (")
    assert "\n" not in printed
    assert list((cache / "native").iterdir()) == []  # nothing half done stays


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    cache, own = tmp_path / "cache", tmp_path / "own"
    cache.write_text("a file is in the way")
    own.mkdir()
    assert run(TRAIN, POOCH_CACHE_DIRECTORY=str(cache), TMPDIR=str(own)) == "CountedBytes True 0"
    assert list(own.iterdir()) == []


def test_processes_that_build_it_at_once_do_not_disturb_one_another(tmp_path: Path) -> None:
    environment = child_environment() | {"POOCH_CACHE_DIRECTORY": str(tmp_path)}
    both = [
        subprocess.Popen([sys.executable, "-c", TRAIN], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [child.communicate()[0].strip() for child in both] == ["CountedBytes True 0"] * 2
    (library,) = (tmp_path / "native").glob("*.so")
    built = library.stat().st_mtime_ns
    library.parent.chmod(0o500)  # what is there serves, even if nothing can be written
    try:
        assert run(TRAIN, POOCH_CACHE_DIRECTORY=str(tmp_path)) == "CountedBytes True 0"
    finally:
        library.parent.chmod(0o700)
    assert library.stat().st_mtime_ns == built


def test_a_library_that_cannot_be_loaded_is_built_again(tmp_path: Path) -> None:
    library = tmp_path / "native" / built_library().name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"not a library")
    assert run(TRAIN, POOCH_CACHE_DIRECTORY=str(tmp_path)) == "CountedBytes True 0"
    assert library.stat().st_size > 1000


FORK = """
import os, sys, torch
from pooch.torchtools.cpu_allocator import counting_allocator
allocator = counting_allocator()
assert allocator.install("a test")
asked = []
allocator.set_limit(0, asked.append)
allocator.ask_for_room(True)
torch.empty(1)
assert len(asked) == 1
child = os.fork()
torch.empty(1)
if child == 0:
    os._exit(len(asked))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(asked))
"""


def test_a_forked_process_asks_for_nothing() -> None:
    """The workers of a data loader have a step's memory, and no say in it."""
    assert run(FORK) == "1 2"


ANOTHER = """
import ctypes, sys, torch
from pooch.torchtools.cpu_allocator import building, counting_allocator
import shutil
from pathlib import Path
copy = Path(sys.argv[1]) / "another.so"
shutil.copy(building.built_library(), copy)
another = ctypes.PyDLL(str(copy))
assert another.pooch_allocator_install()
print(counting_allocator().install("a test"))
another.pooch_allocator_remove()
print(counting_allocator().install("a test"))
"""


def test_another_allocator_in_place_stays(tmp_path: Path) -> None:
    text = ANOTHER.replace("sys.argv[1]", repr(str(tmp_path)))
    assert run(text).split() == ["False", "True"]

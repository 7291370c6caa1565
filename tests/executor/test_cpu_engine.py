"""The CPU engine: every byte comes back, nothing is left in the directory, and faults are told instead of hanging."""

from __future__ import annotations

import errno
import gc
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.errors import TierError
from pooch.executor import apply_plan
from pooch.executor.engines import spill_file
from pooch.executor.engines.cpu import CpuEngine
from pooch.executor.engines.spill_file import CHUNK_BYTES
from pooch.torchtools.spill_directory import SpillDirectory
from tests.executor.copiers import copy_threads
from tests.executor.nets import make_job
from tests.executor.support import all_of, assert_same, profile_job, tight_plan, train

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("copied_by")]

SIZES = [1, 3, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 777]
PATIENCE_S = 20


def storage_of(size_bytes: int, seed: int = 0) -> torch.UntypedStorage:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator).untyped_storage()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload, no-any-return]


def test_every_size_comes_back(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    rooms = [-(-size // 4096) * 4096 for size in SIZES]
    arena = engine.open_arena(sum(rooms))
    offsets = [sum(rooms[:i]) for i in range(len(rooms))]
    storages = [storage_of(size, i) for i, size in enumerate(SIZES)]
    outwards = [arena.copy_out(s, o) for s, o in zip(storages, offsets, strict=True)]
    back = [torch.UntypedStorage(size) for size in SIZES]
    inwards = [arena.copy_in(s, o) for s, o in zip(back, offsets, strict=True)]  # queued behind the copies out
    for ticket in (*inwards, *outwards):
        ticket.wait()
        assert ticket.error is None
        held: Any = ticket
        assert held.storage is None  # the engine holds no memory longer than the copy lasts
    for one, other in zip(storages, back, strict=True):
        assert torch.equal(bytes_of(one), bytes_of(other))
    assert list(tmp_path.iterdir()) == []
    arena.close()
    engine.close()


def test_arenas_open_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    arenas = [engine.open_arena(8192) for _ in range(3)]
    storages = [storage_of(8192, seed) for seed in range(3)]
    for arena, storage in zip(arenas, storages, strict=True):
        arena.copy_out(storage, 0)
    for arena, storage in zip(arenas, storages, strict=True):
        back = torch.UntypedStorage(8192)
        arena.copy_in(back, 0).wait()
        assert torch.equal(bytes_of(back), bytes_of(storage))
    for arena in arenas:
        arena.close()
    engine.close()


def test_files_are_used_again_and_closed() -> None:
    engine = CpuEngine()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(50):
        arena = engine.open_arena(4096)
        arena.copy_out(storage_of(100), 0)
        arena.close()
    assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208
    engine.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_missing_or_unwritable_directory(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="is missing: create it, or choose another with spill_directory=") as caught:
        CpuEngine(tmp_path / "missing").open_arena(1)
    assert str(tmp_path / "missing") in str(caught.value)
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(TierError, match="is not a directory: choose another with spill_directory="):
        CpuEngine(file).open_arena(1)


def test_a_full_disk_when_the_room_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(TierError, match=r"is full, with .* free of the 4.00 KiB needed") as caught:
        spill_file.SpillFile(SpillDirectory.of(tmp_path), 4096)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_short_writes_and_reads_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(spill_file.os, "pwrite", lambda fd, view, at: pwrite(fd, view[: max(4096, len(view) // 2)], at))
    monkeypatch.setattr(
        spill_file.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][: max(4096, len(views[0]) // 2)]], at)
    )
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(1 << 20)
    storage, back = storage_of(1 << 20), torch.UntypedStorage(1 << 20)
    arena.copy_out(storage, 0)
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    assert ticket.error is None
    assert torch.equal(bytes_of(storage), bytes_of(back))
    arena.close()
    engine.close()


def swapping_job(kind: str = "conv") -> tuple[Any, Any]:
    job = make_job(kind)
    profile = profile_job(job)
    return job, tight_plan(profile, all_of(profile, "swap"))


def fail_on(monkeypatch: pytest.MonkeyPatch, function: str, code: int, after: int = 0) -> None:
    """Let a system call fail from its `after`-th use on."""
    real, count = getattr(os, function), 0

    def failing(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(code, os.strerror(code))
        return int(real(*args))

    monkeypatch.setattr(spill_file.os, function, failing)


@pytest.mark.parametrize("after", [0, 3])
def test_a_failing_write_keeps_the_tensor(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    plain, _ = train(make_job("conv"), None)
    job, plan = swapping_job()
    fail_on(monkeypatch, "pwrite", errno.ENOSPC, after)
    with pytest.warns(UserWarning, match="No space left on device") as caught:
        planned, stats = train(job, plan)
    assert len(caught) == 1
    assert stats is not None
    assert stats.kept_after_errors == len(plan.schedule.swapped)
    assert stats.swapped_in_bytes == 0
    assert_same(plain, planned)


def test_a_failing_read_is_an_error_and_never_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = swapping_job()
    with apply_plan(plan, job.model) as run:
        with run.step():
            loss = job.forward()
        with monkeypatch.context() as patch:
            fail_on(patch, "preadv", errno.EIO)
            with pytest.raises(TierError, match="cannot be read back"):
                loss.backward(retain_graph=True)
            with pytest.raises(TierError, match="cannot be read back"):
                loss.backward()
        del loss
        with run.step():
            loss = job.forward()
        loss.backward()
        assert run.stats.swapped_in_bytes > 0


def test_closing_with_copies_in_flight_completes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate = threading.Event()
    real = os.pwrite

    def slow(*args: Any) -> int:
        gate.wait(PATIENCE_S)
        return real(*args)

    monkeypatch.setattr(spill_file.os, "pwrite", slow)
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4096)
    ticket = arena.copy_out(storage_of(4096), 0)
    engine.close()  # a step is under way, so its thread and file stay
    assert not ticket.is_done()
    gate.set()
    arena.close()
    assert ticket.is_done()
    assert ticket.error is None
    assert not engine.copier.is_alive()


def test_room_is_given_back_only_when_its_last_copy_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gate, begun, write = threading.Event(), threading.Event(), os.pwrite

    def held_back(*args: Any) -> int:
        begun.set()
        gate.wait(PATIENCE_S)
        return write(*args)

    monkeypatch.setattr(spill_file.os, "pwrite", held_back)
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4096)
    ticket = arena.copy_out(storage_of(4096), 0)
    closing = threading.Thread(target=arena.close)
    closing.start()
    try:
        assert begun.wait(PATIENCE_S)
        closing.join(0.1)
        assert closing.is_alive()
        assert len(engine._free["step"]) == 0
    finally:
        gate.set()
        closing.join()
    assert ticket.is_done()
    assert ticket.error is None
    assert len(engine._free["step"]) == 1
    engine.close()


def test_threads_end_with_their_engines() -> None:
    before = copy_threads()
    for _ in range(5):
        engine = CpuEngine()
        engine.open_arena(10).close()
        engine.close()
    abandoned = CpuEngine()
    del abandoned
    gc.collect()
    assert copy_threads() == before


def test_a_fork_gets_a_thread_and_a_file_of_its_own(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4096)
    arena.copy_out(storage_of(4096, 1), 0).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        os._exit(0 if _round_trip(engine, 2) else 1)
    deadline = threading.Timer(PATIENCE_S, lambda: os.kill(child, 9))
    deadline.start()
    _, status = os.waitpid(child, 0)
    deadline.cancel()
    assert status == 0
    back = torch.UntypedStorage(4096)
    arena.copy_in(back, 0).wait()
    assert torch.equal(bytes_of(back), bytes_of(storage_of(4096, 1)))
    arena.close()
    engine.close()


def test_a_fork_leaves_the_free_files_of_its_parent_alone(tmp_path: Path) -> None:
    """A file that waits for the next step is open in both processes. Both take their next one, the parent first; the
    child writes before the parent reads.
    """
    engine = CpuEngine(tmp_path)
    engine.open_arena(4096).close()  # now there is a free file
    go, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        os.read(go, 1)
        os._exit(0 if _round_trip(engine, 2) else 1)
    arena = engine.open_arena(4096)
    arena.copy_out(storage_of(4096, 1), 0).wait()
    os.write(tell, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.UntypedStorage(4096)
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    assert ticket.error is None  # the checksum is another one, had the child written here
    assert torch.equal(bytes_of(back), bytes_of(storage_of(4096, 1)))
    arena.close()
    engine.close()
    for end in (go, tell):
        os.close(end)


def test_a_fork_reads_an_arena_of_its_parent_and_does_not_write_to_it(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4096)
    arena.copy_out(storage_of(4096, 1), 0).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        back = torch.UntypedStorage(4096)
        arena.copy_in(back, 0).wait()
        ticket = arena.copy_out(storage_of(4096, 2), 0)
        ticket.wait()
        is_right = torch.equal(bytes_of(back), bytes_of(storage_of(4096, 1)))
        os._exit(0 if is_right and isinstance(ticket.error, TierError) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.UntypedStorage(4096)
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    assert ticket.error is None
    assert torch.equal(bytes_of(back), bytes_of(storage_of(4096, 1)))
    arena.close()
    engine.close()


def test_a_fork_is_told_that_its_parent_has_gone_on(tmp_path: Path) -> None:
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(4096)
    arena.copy_out(storage_of(4096, 1), 0).wait()
    go, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        os.read(go, 1)
        ticket = arena.copy_in(torch.UntypedStorage(4096), 0)
        ticket.wait()
        is_told = ticket.error is not None and "forked from has gone on" in str(engine.health.failed(ticket.error))
        os._exit(0 if is_told else 1)
    arena.copy_out(storage_of(4096, 2), 0).wait()
    os.write(tell, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    arena.close()
    engine.close()
    for end in (go, tell):
        os.close(end)


def _round_trip(engine: CpuEngine, seed: int) -> bool:
    arena = engine.open_arena(4096)
    arena.copy_out(storage_of(4096, seed), 0)
    back = torch.UntypedStorage(4096)
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    return ticket.error is None and torch.equal(bytes_of(back), bytes_of(storage_of(4096, seed)))

"""From `apply` to the end of a run, whichever way it ends: nothing stays open, nothing is lost."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import Run, apply_plan
from pooch.executor.engines import spill_file
from pooch.executor.engines.cpu import CpuEngine
from pooch.ir import Plan
from pooch.torchtools import spill_directory
from pooch.torchtools.spill_directory import SpillDirectory
from tests.executor.copiers import copy_threads
from tests.executor.nets import Job, make_job
from tests.executor.support import all_of, assert_same, profile_job, tight_plan

pytestmark = pytest.mark.cpu  # its tier: spill files and the threads that copy
PATIENCE_S = 60


def swapping_job() -> tuple[Job, Plan]:
    job = make_job("conv")
    job.model.eval()  # each step draws and moves nothing, so that steps can be compared
    profile = profile_job(job)
    return job, tight_plan(profile, all_of(profile, "swap"))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain_gradients() -> dict[str, Tensor]:
    job, _ = swapping_job()
    job.forward().backward()
    return gradients(job.model)


def spill_files(directory: Path) -> list[str]:
    """What this process has open in a directory."""
    found = []
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
        except FileNotFoundError:
            continue  # the listing's own
    return [path for path in found if path.startswith(str(directory))]


def step(job: Job, run: Run) -> Tensor:
    with run.step():
        return job.forward()


def test_runs_that_are_dropped_leave_no_file_and_no_thread(tmp_path: Path) -> None:
    plan = swapping_job()[1]
    threads = copy_threads()
    for _ in range(12):
        job, _ = swapping_job()
        run = apply_plan(plan, job.model, spill_directory=tmp_path)
        step(job, run).backward()
        assert run.stats.swapped_in_bytes > 0
        assert len(spill_files(tmp_path)) == 1
        del run, job
    gc.collect()  # modules hold themselves at times
    assert spill_files(tmp_path) == []
    assert copy_threads() == threads


def test_a_run_whose_model_is_gone_in_mid_step_gives_everything_back_after_it(tmp_path: Path) -> None:
    """The graph needs the engine, and so it has it."""
    expected = plain_gradients()
    job, plan = swapping_job()
    parameters = dict(job.model.named_parameters())
    loss = step(job, apply_plan(plan, job.model, spill_directory=tmp_path))
    gone = weakref.ref(job.model)
    del job
    gc.collect()
    assert gone() is None
    assert len(spill_files(tmp_path)) == 1
    loss.backward()
    assert_same(expected, {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
    del loss
    gc.collect()
    assert spill_files(tmp_path) == []


def test_a_run_that_is_removed_in_mid_step_ends_it_and_closes_its_file(tmp_path: Path) -> None:
    expected = plain_gradients()
    job, plan = swapping_job()
    run = apply_plan(plan, job.model, spill_directory=tmp_path)
    loss = step(job, run)
    run.remove()
    loss.backward()
    assert run.stats.swapped_in_bytes > 0
    assert_same(expected, gradients(job.model))
    del loss
    assert spill_files(tmp_path) == []


def test_a_copy_of_a_model_in_mid_step_trains_by_itself(tmp_path: Path) -> None:
    expected = plain_gradients()
    job, plan = swapping_job()
    with apply_plan(plan, job.model, spill_directory=tmp_path) as run:
        loss = step(job, run)
        copied = copy.deepcopy(job.model)
        job.loss(copied, job.batch).backward()
        loss.backward()
        assert run.stats.swapped_in_bytes > 0
        assert_same(expected, gradients(job.model))
        assert_same(expected, gradients(copied))


# The spill file -----------------------------------------------------------------------------------------------------


def test_a_spill_file_never_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_directory.tempfile, "mkstemp", lambda **_: pytest.fail("a name was given"))
    file = spill_file.SpillFile(SpillDirectory.of(tmp_path), 4096)
    assert os.fstat(file.descriptor).st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that has none."""
    real = os.open

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest)

    monkeypatch.setattr(spill_file.os, "open", opened)


def test_a_link_put_in_the_place_of_a_spill_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files need a name, somebody else may write into the directory at once."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1024)
    without_unnamed_files(monkeypatch)
    real = spill_directory.tempfile.mkstemp

    def attacked(**options: Any) -> tuple[int, str]:
        descriptor, name = real(**options)
        Path(name).unlink()
        Path(name).symlink_to(victim)
        return descriptor, name

    monkeypatch.setattr(spill_directory.tempfile, "mkstemp", attacked)
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(8192)
    source = torch.randint(0, 256, (8192,), dtype=torch.uint8)
    back = torch.UntypedStorage(8192)
    arena.copy_out(source.untyped_storage(), 0).wait()
    ticket = arena.copy_in(back, 0)
    ticket.wait()
    assert ticket.error is None
    assert torch.equal(torch.tensor([], dtype=torch.uint8).set_(back), source)
    assert victim.read_bytes() == b"precious" * 1024
    arena.close()
    engine.close()
    assert list(tmp_path.iterdir()) == [victim]


@pytest.mark.parametrize("named", [False, True])
def test_a_spill_file_is_moved_directly_where_the_disk_can(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("this directory's file system has no direct I/O")
    if named:
        without_unnamed_files(monkeypatch)
    assert spill_file.SpillFile(SpillDirectory.of(tmp_path), 4096).direct


# The garbage collector in the thread that copies --------------------------------------------------------------------


@pytest.mark.usefixtures("copied_in_python")
def test_a_step_that_ends_in_the_thread_that_copies_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may run there, and find a run, its model and a step under way that nobody has any more."""
    job, plan = swapping_job()
    run = apply_plan(plan, job.model, spill_directory=tmp_path)
    threads = copy_threads()
    loss: Any = step(job, run)
    nobodys = [loss, run, job, job.model]
    del loss, run, job
    engine = CpuEngine(tmp_path)
    del nobodys[2:]  # the step and the run are left
    real = spill_file.Mover.write
    ended = threading.Event()

    def collecting(mover: Any, *arguments: Any) -> None:
        real(mover, *arguments)
        nobodys.clear()
        gc.collect()
        ended.set()

    monkeypatch.setattr(spill_file.Mover, "write", collecting)
    arena = engine.open_arena(4096)
    ticket = arena.copy_out(torch.UntypedStorage(4096), 0)
    assert ended.wait(PATIENCE_S)
    ticket.wait()
    arena.close()
    del arena, ticket
    engine.close()
    assert spill_files(tmp_path) == []
    assert copy_threads() <= threads


@pytest.mark.usefixtures("copied_in_python")
def test_a_run_that_ends_in_its_own_copy_thread_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = CpuEngine(tmp_path)
    thread: threading.Thread = engine.copier.thread  # type: ignore[attr-defined]
    arena = engine.open_arena(4096)
    started, go_on, held = threading.Event(), threading.Event(), [engine, arena]
    real = spill_file.Mover.write

    def ending(mover: Any, *arguments: Any) -> Any:
        """A copy, while which the thread that does it lets go of the engine."""
        started.set()
        assert go_on.wait(PATIENCE_S)
        while held:
            held.pop().close()
        gc.collect()
        return real(mover, *arguments)

    monkeypatch.setattr(spill_file.Mover, "write", ending)
    ticket = arena.copy_out(torch.UntypedStorage(4096), 0)
    assert started.wait(PATIENCE_S)
    del engine, arena
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert ticket.error is None
    del ticket
    gc.collect()
    assert spill_files(tmp_path) == []

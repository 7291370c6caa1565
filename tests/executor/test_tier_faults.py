"""Faults of the tier under a planned step: nothing hangs, and nothing is silently wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pooch.errors import TierError
from pooch.executor import Run, apply_plan, engines
from pooch.executor.engines import cpu, spill_file
from pooch.executor.engines.cpu import CpuEngine
from pooch.ir import Plan
from tests.children import child_environment
from tests.executor.nets import Job, make_job
from tests.executor.support import all_of, assert_same, profile_job, tight_plan, train

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("copied_by")]
PATIENCE_S = 60
SLOW_S = 0.004


def swapping_job() -> tuple[Job, Plan]:
    job = make_job("conv")
    profile = profile_job(job)
    return job, tight_plan(profile, all_of(profile, "swap"))


def changed_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write flips one bit of the first byte on its way to the disk."""
    real = os.pwrite

    def flipping(descriptor: int, view: memoryview, offset: int) -> int:
        first = view[0]
        view[0] = first ^ 1
        try:
            return real(descriptor, view, offset)
        finally:
            view[0] = first

    monkeypatch.setattr(spill_file.os, "pwrite", flipping)


def test_bytes_that_change_on_the_disk_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = swapping_job()

    def step(run: Run) -> None:
        with run.step():
            loss = job.forward()
        loss.backward()

    with apply_plan(plan, job.model) as run, monkeypatch.context() as patch:
        changed_on_disk(patch)
        # In the forward pass already, where a value that left in it comes back there.
        with pytest.raises(TierError, match="other bytes than were written") as caught:
            step(run)
    assert "\n" not in str(caught.value)


def test_without_the_check_they_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is the check that finds them; and the step after a bad one is right again."""
    plain, _ = train(make_job("conv"), None)
    job, plan = swapping_job()
    state = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    random_state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        changed_on_disk(patch)
        with apply_plan(plan, job.model, check_copies=False) as run:
            with run.step():
                loss = job.forward()
            loss.backward()
            assert run.stats.swapped_in_bytes > 0
    job.model.load_state_dict(state)
    torch.set_rng_state(random_state)
    planned, _ = train(job, plan)
    assert_same(plain, planned)


@pytest.mark.parametrize("size", [1, 4095, spill_file.CHUNK_BYTES + 5])
def test_one_bit_anywhere_is_found(tmp_path: Path, size: int) -> None:
    engine = CpuEngine(tmp_path)
    arena = engine.open_arena(size)
    storage = torch.randint(0, 256, (size,), dtype=torch.uint8).untyped_storage()
    arena.copy_out(storage, 0).wait()
    descriptor, last = arena._file.descriptor, (size - 1) // 4096 * 4096
    block = spill_file.new_buffer()
    os.preadv(descriptor, [memoryview(block)[:4096]], last)
    block[(size - 1) % 4096] ^= 128
    os.pwrite(descriptor, memoryview(block)[:4096], last)
    ticket = arena.copy_in(torch.UntypedStorage(size), 0)
    ticket.wait()
    assert isinstance(ticket.error, OSError)
    arena.close()
    engine.close()


@pytest.mark.usefixtures("copied_in_python")  # whose waiting can be seen
def test_a_slow_device_costs_time_that_is_counted_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train(make_job("conv"), None, steps=1)
    job, plan = swapping_job()
    calls, somebody_waits = 0, threading.Event()

    def waiting() -> bool:
        """Asked by whoever waits for a copy, after he has looked at the clock."""
        somebody_waits.set()
        return False

    def slow(name: str) -> Callable[..., int]:
        real = getattr(os, name)

        def slowed(*args: Any) -> int:
            nonlocal calls
            calls += 1
            somebody_waits.wait(PATIENCE_S)  # so the first copy is not over before it is waited for
            time.sleep(SLOW_S)
            return int(real(*args))

        return slowed

    monkeypatch.setattr(cpu, "sys", SimpleNamespace(is_finalizing=waiting))
    monkeypatch.setattr(spill_file.os, "pwrite", slow("pwrite"))
    monkeypatch.setattr(spill_file.os, "preadv", slow("preadv"))
    planned, stats = train(job, plan, steps=1)
    assert stats is not None
    assert stats.stall_ms >= SLOW_S * 1000
    assert calls >= 2 * len(plan.schedule.swapped)
    assert somebody_waits.is_set()
    assert stats.kept_after_errors == stats.late_swaps == 0
    assert_same(plain, planned)


class Died(BaseException):
    """Ends the thread in which it is raised."""


@pytest.fixture
def dying_thread(monkeypatch: pytest.MonkeyPatch, copied_in_python: None) -> Iterator[list[int]]:
    """The copy thread dies at the ticket with the number in the list; None are counted while it is empty."""
    deadly: list[int] = []
    real, count = cpu.CpuTicket.run, 0

    def run(ticket: cpu.CpuTicket, buffer: Any) -> None:
        nonlocal count
        count += bool(deadly)
        if deadly and count == deadly[0]:
            raise Died
        real(ticket, buffer)

    monkeypatch.setattr(cpu.CpuTicket, "run", run)
    monkeypatch.setattr(cpu, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    yield deadly
    deadly.clear()


def test_a_copy_thread_that_dies_on_the_way_out_keeps_the_tensor(dying_thread: list[int]) -> None:
    plain, _ = train(make_job("conv"), None)
    job, plan = swapping_job()
    dying_thread.append(3)
    with pytest.warns(UserWarning, match="the thread that copies has died"):
        planned, stats = train(job, plan)
    assert stats is not None
    assert stats.kept_after_errors == 0  # the last step had a new thread
    assert stats.swapped_in_bytes > 0
    assert_same(plain, planned)


def test_a_copy_thread_that_dies_on_the_way_back_is_an_error_and_the_next_step_has_another(
    dying_thread: list[int],
) -> None:
    job, plan = swapping_job()
    with apply_plan(plan, job.model) as run:
        with run.step():
            loss = job.forward()
        dying_thread.append(2)
        with pytest.raises(TierError, match="the thread that copies has died"):
            loss.backward()
        del loss
        with run.step():
            loss = job.forward()
        loss.backward()
        assert run.stats.swapped_in_bytes > 0


def test_host_memory_that_cannot_be_had_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = swapping_job()

    def nothing_left(*_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(spill_file.mmap, "mmap", nothing_left)
    with pytest.raises(TierError, match="host memory for a copy buffer") as caught:
        apply_plan(plan, job.model)
    assert "\n" not in str(caught.value)
    assert "forward" not in vars(job.model)


def test_the_check_can_be_switched_off() -> None:
    assert engines.make_engine(torch.device("cpu"), check_copies=False).check is False  # type: ignore[attr-defined]


CHILD = """
import os, sys, time
import torch
from pooch.executor import Run, apply_plan
from pooch.executor.engines import spill_file
from tests.executor.copiers import copy_through_python
from tests.executor.nets import make_job
from tests.children import child_environment
from tests.executor.support import all_of, profile_job, tight_plan

torch.set_num_threads(1)
copy_through_python()
job = make_job("conv", 2)
profile = profile_job(job)
plan = tight_plan(profile, all_of(profile, "swap"))
real = os.preadv

def slow(*args):
    print("reading", plan.schedule.host_bytes, flush=True)
    time.sleep(1000)
    return real(*args)

run = apply_plan(plan, job.model, spill_directory=sys.argv[1])
with run.step():
    loss = job.forward()
"""
IN_MID_STEP = CHILD + "spill_file.os.preadv = slow\nloss.backward()\n"
AT_THE_END = (
    CHILD
    + """
import gc, threading
from pooch.executor.step import Step

started = threading.Event()

def stuck(*args):
    started.set()
    time.sleep(1000)

spill_file.os.preadv = stuck
step = next(each for each in gc.get_objects() if isinstance(each, Step))
away = [value for value in step.guide.values.planned.values() if value.is_copied]
assert away
for value in away:
    step.evictor.store.start_in(value, step.stats)  # a prefetch; the graph is still held when the interpreter goes
started.wait()

class Late:
    def __init__(self, ticket):
        self.ticket = ticket

    def __del__(self):
        self.ticket.wait()  # whoever lets go of a value waits for its copy, also while the interpreter goes down

late = Late(away[-1].ticket)
print("leaving", flush=True)
"""
)


def child_of(script: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(),
    )  # fmt: skip


def test_a_kill_in_mid_step_leaves_no_file_and_gives_the_disk_back(tmp_path: Path) -> None:
    child = child_of(IN_MID_STEP, tmp_path)
    assert child.stdout is not None
    word, room = child.stdout.readline().split()
    assert word == "reading"
    spilled = [Path(path).stat() for path in _open_files(child.pid, tmp_path)]
    assert len(spilled) == 1
    assert spilled[0].st_blocks * 512 >= int(room) > 0  # there is something to give back,
    assert spilled[0].st_nlink == 0  # and the kernel gives it back with the process, as nothing else names it
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=PATIENCE_S)
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def _open_files(process: int, directory: Path) -> list[str]:
    links = [f"/proc/{process}/fd/{number}" for number in os.listdir(f"/proc/{process}/fd")]  # noqa: PTH208
    return [link for link in links if os.readlink(link).startswith(str(directory))]  # noqa: PTH115


def test_an_exit_with_copies_in_flight_is_prompt_and_silent(tmp_path: Path) -> None:
    child = child_of(AT_THE_END, tmp_path)
    output, errors = child.communicate(timeout=PATIENCE_S)
    assert "leaving" in output
    assert child.returncode == 0
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert list(tmp_path.iterdir()) == []

"""The processes that measure and plan beside training: what they import, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import pooch
from tests.children import ROOT, child_environment, is_gone

pytestmark = pytest.mark.cpu


EVIL = "open({mark!r}, 'a').write(__name__ + '\\n'); raise SystemExit(7)\n"
TRAINED = """
import os, sys
sys.path[:] = [path for path in sys.path if path]
import torch, pooch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)])
rows = torch.randn(512, 256)
told = []
with pooch.auto(model, "75%", tell=told.append) as auto:
    for _ in range(3000):
        model(rows).sum().backward()
        if auto.summary().steps_on_plan or os.path.exists(sys.argv[1]):
            break
print(auto.summary().steps_on_plan, *told)
"""


@pytest.mark.slow
def test_nothing_is_imported_from_the_current_directory(tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    for name in ("json", "numpy", "pooch", "queue", "pickle", "torch", "runpy"):
        (tmp_path / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{TRAINED}", str(mark)],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
    assert not mark.exists(), mark.read_text()


INTERRUPTED = """
import os, sys
import torch, pooch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(48)])
rows = torch.randn(512, 256)
auto = pooch.auto(model, "60%", tell=lambda line: None)
def step():
    model(rows).sum().backward()
while not auto.is_planning:
    step()
if sys.argv[1] != "killed":
    sys.exit(0)
print("planning", flush=True)
while True:
    step()
"""


@pytest.mark.parametrize("signal_number", [0, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_or_said_where_training_ends_while_a_plan_is_made(signal_number: int, tmp_path: Path) -> None:
    """No folder, no process, and nothing on the terminal."""
    command = [sys.executable, "-c", INTERRUPTED, "killed" if signal_number else "ends"]
    environment, pipe = child_environment(TMPDIR=str(tmp_path), OMP_NUM_THREADS="1"), subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as training:
        aside: list[psutil.Process] = []
        assert training.stdout is not None
        assert training.stderr is not None
        if signal_number:
            assert training.stdout.readline() == "planning\n"
            aside = psutil.Process(training.pid).children()
            training.send_signal(signal_number)
        assert training.stderr.read() == ""
    assert training.returncode == (-signal_number if signal_number else 0)
    assert list(tmp_path.glob("*pooch*")) == []
    while not all(map(is_gone, aside)):
        time.sleep(0.02)


BESIDE = """
import sys, threading
import torch, pooch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(16)])
rows = torch.randn(256, 64)
auto = pooch.auto(model, "60%", tell=lambda line: None)
steps = threading.Semaphore(0)
def train():
    while True:
        model(rows).sum().backward()
        steps.release()
threading.Thread(target=train, daemon=True).start()
for _ in range(int(sys.argv[1])):
    steps.acquire()
"""


@pytest.mark.parametrize("steps", [1, 2, 5, 40])
def test_a_program_that_ends_while_a_daemon_thread_trains_ends_without_a_word(steps: int) -> None:
    """Plain PyTorch aborts here: Python takes its thread away in the middle of an operator."""
    command = [sys.executable, "-c", BESIDE, str(steps)]
    environment = child_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_twenty_runs_in_one_process_leave_nothing(tmp_path: Path) -> None:
    """One of its own: what hands out tests to this one gets and keeps objects at any time."""
    command = [sys.executable, "-m", "benchmarks.repeated", "--runs", "20", "--steps", "5", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=child_environment(OMP_NUM_THREADS="1"), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "repeated-cpu.json").read_text())) == 20


def children() -> set[str]:
    """The processes whose parent is this one."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


def descriptors() -> list[str]:
    return [str(each) for each in Path("/proc/self/fd").iterdir()]


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_nothing_is_left_of_what_was_removed_in_the_middle_of_planning(steps: int, tmp_path: Path) -> None:
    def trained() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)])
        auto = pooch.auto(model, "60%", tell=lambda line: None)
        for _ in range(steps):
            model(torch.randn(256, 64)).sum().backward()
        auto.remove()

    trained()  # what the first one leaves is there for good, such as the library that counts
    before = children(), {thread.name for thread in threading.enumerate()}, len(descriptors())
    for _ in range(3):
        trained()
        assert (children(), {thread.name for thread in threading.enumerate()}, len(descriptors())) == before

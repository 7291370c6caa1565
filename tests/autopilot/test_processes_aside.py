"""The processes that measure and plan beside training, and that end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import pooch
from pooch.api.children import child_command
from tests.children import ROOT, child_environment
from tests.toys import blocks

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("module", ["measuring_process", "planning_process"])
def test_they_end_with_the_program_that_trains(module: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    blocks(2).save(path)
    code = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-m', 'pooch.autopilot.{module}', {str(path)!r}]\n"
        "child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(1)\n"  # as if it was killed
    )
    done = subprocess.run([sys.executable, "-c", code], env=child_environment(), stdout=subprocess.PIPE, check=False)
    child = Path("/proc") / done.stdout.decode().strip()
    before = path.read_bytes()
    while child.exists() and (child / "cmdline").read_bytes():
        time.sleep(0.05)
    assert path.read_bytes() == before, "it measured to its end"


@pytest.mark.parametrize("module", ["measuring_process", "planning_process"])
def test_they_end_while_they_work(module: str, tmp_path: Path) -> None:
    """The planning process ends in the middle of a job, too, and says nothing."""
    path = tmp_path / "profile.json"
    blocks(2).save(path)
    command = child_command(f"pooch.autopilot.{module}", str(path))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdin is not None
        if module == "planning_process":
            os.mkfifo(tmp_path / "job.pickle")  # the job comes from here, and never does
            child.stdin.write(f'{{"folder": "{tmp_path}"}}\n')
            child.stdin.flush()
        child.stdin.close()
        assert child.wait() in (0, 1)
        assert child.stderr is not None
        assert child.stderr.read() == ""


EVIL = "open({mark!r}, 'a').write(__name__ + '\\n'); raise SystemExit(7)\n"
TRAINED = """
import os, sys
sys.path[:] = [path for path in sys.path if path]
import torch, pooch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)])
rows = torch.randn(512, 256)
told = []
with pooch.auto(model, "60%", tell=told.append) as auto:
    while not auto.summary().steps_on_plan and not os.path.exists(sys.argv[1]):
        model(rows).sum().backward()
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

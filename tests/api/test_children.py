"""Child processes of every kind: they end with their parent, show nothing by themselves, and no error is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pooch.api.children import Child, child_command, run_child
from pooch.errors import ProcessEnded
from pooch.progress import silent
from tests.children import ROOT, child_environment, is_gone

ENDING = "tests.api.child_that_ends"

PARENT = """
import json, os, sys, time
from pathlib import Path
from pooch.api.children import Child
from pooch.api.options import PlanOptions
from pooch.api.wire import WIRE
from pooch.autopilot import jobs
from pooch.ir import Profile
from pooch.measure import hard_limit
from pooch.workloads.loading import WorkloadFactory

module, folder, forks = sys.argv[1:]
profile = Profile.load(Path(folder) / "profiles" / "resnet50-b16-cpu.json")
budget_bytes, options = int(0.45 * profile.peak_bytes), PlanOptions(time_limit_s=600.0)
endless = WorkloadFactory("endless.py:make")
job = {
    "pooch.api.planning_child": lambda: {"arguments": WIRE.plain((profile, budget_bytes, options, (), None))},
    "pooch.autopilot.planning_process": lambda: {
        "job": jobs.WIRE.plain(jobs.Job((1,), (jobs.Anchor((1,), profile),), 0, budget_bytes, options))
    },
    "pooch.autopilot.measuring_process": dict,
    "pooch.measure.checking_child": lambda: {"workload": {"name": "endless.py:make"}, "plan": None, "steps": 1},
    "pooch.measure.arena_child": lambda: {
        "workload": {"name": "endless.py:make"}, "plan": None, "steps": 1, "verify": "first"
    },
    "pooch.measure.limited_child": lambda: {
        "job": hard_limit.WIRE.plain(hard_limit.LimitedJob(endless, None, 2**30, 1))
    },
}[module]()
child = Child(module, imports_as_here=True)
child.tell(job)
if forks == "True" and os.fork() == 0:  # as a process that loads data: it has all pipes of its parent
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child.pid, flush=True)
for event in child.events():
    pass
"""
KINDS = [
    "pooch.api.planning_child",
    "pooch.autopilot.planning_process",
    "pooch.autopilot.measuring_process",
    "pooch.measure.checking_child",
    "pooch.measure.limited_child",
]


def orphaned(module: str, folder: Path, *, after_s: float, forks: bool = False) -> str:
    """Kill the parent of a child process once that has computed for so long, wait for its end, and return its words."""
    (folder / "endless.py").write_text("def make(batch_size=1, device='cpu'):\n    while True:\n        pass\n")
    command = [sys.executable, "-c", PARENT, module, str(ROOT), str(forks)]
    pipe = subprocess.PIPE
    environment = child_environment(OMP_NUM_THREADS="1")
    parent = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=environment)
    assert parent.stdout is not None
    assert parent.stderr is not None
    with parent:
        line = parent.stdout.readline()
        assert line, parent.stderr.read()
        child, others = psutil.Process(int(line)), psutil.Process(parent.pid).children()
        while sum(child.cpu_times()[:2]) < after_s:
            assert not is_gone(child)
            time.sleep(0.02)
        parent.send_signal(signal.SIGKILL)
        while not is_gone(child):  # the limit of the test is the only clock
            time.sleep(0.02)
        for other in others:
            if other.pid != child.pid:
                other.kill()
        return parent.stderr.read()


@pytest.mark.parametrize("module", KINDS)
def test_a_child_ends_with_its_parent_while_it_works(module: str, tmp_path: Path) -> None:
    assert orphaned(module, tmp_path, after_s=2.5) == ""


@pytest.mark.parametrize("module", KINDS)
def test_a_child_ends_with_its_parent_while_it_starts(module: str, tmp_path: Path) -> None:
    assert orphaned(module, tmp_path, after_s=0.0) == ""


def test_a_child_ends_although_a_forked_process_holds_its_pipe(tmp_path: Path) -> None:
    assert orphaned("pooch.measure.limited_child", tmp_path, after_s=0.5, forks=True) == ""


@pytest.mark.parametrize("module", [ENDING, "tests.api.child_that_waits"])
def test_a_child_that_is_told_nothing_ends_with_its_input(module: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        child_command(module, imports_as_here=True), stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.communicate("") == ("", "")
        assert child.returncode == 1


# What they write ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("an error of its own", "it ended early (KeyError: 'nothing of this name')"),
        ("killed, with last words", "it ended early (exit status 3: the last \\x1b[31mwords)"),
        ("killed", "it ended early (exit status 4)"),
    ],
)
def test_the_error_of_the_parent_says_why_a_child_ended(how: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Child(ENDING, imports_as_here=True) as child:
        child.tell({"how": how})
        with pytest.raises(ProcessEnded) as ended:
            child.answer(silent)
    assert str(ended.value) == told
    assert capfd.readouterr().err == ""


def test_a_child_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ProcessEnded, match="could not be started: No such file"):
        Child(ENDING)


def test_a_child_that_has_ended_is_told_nothing() -> None:
    with Child(ENDING, imports_as_here=True) as child:
        child.tell({"how": "killed"})
        with pytest.raises(ProcessEnded, match="exit status 4"):
            child.tell({"more": "x" * 10_000_000})  # more than a pipe holds


def test_what_the_users_code_says_in_a_child_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_child(ENDING, {"how": "with a warning"}, silent, imports_as_here=True) == {"done": True}
    said = capfd.readouterr().err
    assert "UserWarning: mind this" in said
    assert said.endswith("and that, without an end")


def test_a_child_whose_answer_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    mark, pipe = tmp_path / "mark", subprocess.PIPE
    command = child_command(ENDING, imports_as_here=True)
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        child.stdin.write(f'{{"how": "an answer that nobody reads", "mark": "{mark}"}}\n')
        child.stdin.flush()
        while not mark.exists():
            time.sleep(0.02)
        child.stdout.close()
        assert child.stderr.read() == ""
        assert child.wait() == 1


def of_this_process() -> tuple[int, int, set[str]]:
    children = psutil.Process().children()
    return len(list(Path("/proc/self/fd").iterdir())), len(children), {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("how", ["an error of its own", "killed", "with a warning"])
def test_nothing_is_left_of_a_child(how: str) -> None:
    before = of_this_process()
    with Child(ENDING, imports_as_here=True) as child:
        child.tell({"how": how})
    assert of_this_process() == before
    with Child(ENDING, imports_as_here=True) as child:
        child.tell({"how": how})
        done: list[Any] = list(child.events())
    assert (of_this_process(), bool(done)) == (before, how != "killed")

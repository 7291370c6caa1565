"""Child processes of every kind: they end with their parent, show nothing by themselves, and no error is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from pooch.api import child_main
from pooch.api.children import Child, child_command
from pooch.errors import InfeasibleBudget, ProcessEnded, UsageError
from pooch.ground import errors
from tests.api import child_work
from tests.children import ROOT, child_environment, is_gone

PARENT = """
import os, sys, time
from pathlib import Path
from pooch.analysis.interpolation import KnownStep
from pooch.api.children import Child
from pooch.api.options import PlanOptions
from pooch.autopilot.jobs import Job
from pooch.ir import Profile
from pooch.api.measure import arena_training, checking
from pooch.api.measure.hard_limit import LimitedJob
from pooch.workloads.loading import WorkloadFactory

work, folder, forks = sys.argv[1:]
profile = Profile.load(Path(folder) / "profiles" / "resnet50-b16-cpu.json")
budget_bytes, options = int(0.45 * profile.peak_bytes), PlanOptions(time_limit_s=600.0)
endless = WorkloadFactory("endless.py:make")
request = {
    "make a plan": (profile, budget_bytes, options, (), None),
    "plan beside training": (Job((1,), (KnownStep((1,), profile),), 0, budget_bytes, options),),
    "measure beside training": (),
    "compare deterministically": (endless, None, 1),
    "train on an arena": (endless, None, 1, "first"),
    "train under a limit": (LimitedJob(endless, None, 2**30, 1),),
}[work]
child = Child(work, imports_as_here=True)
number = child.start().pid
if forks == "True" and os.fork() == 0:  # as a process that loads data: it has all pipes of its parent
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(number, flush=True)
child.ask(*request)
"""
KINDS = [
    "make a plan",
    "plan beside training",
    "measure beside training",
    "compare deterministically",
    "train under a limit",
]


@pytest.fixture(autouse=True)
def _work(monkeypatch: pytest.MonkeyPatch) -> None:
    child_work.let_children_do_it(monkeypatch)


def orphaned(work: str, folder: Path, *, after_s: float, forks: bool = False) -> str:
    """Kill the parent of a child process once that has computed for so long, wait for its end, and return its words."""
    (folder / "endless.py").write_text("def make(batch_size=1, device='cpu'):\n    while True:\n        pass\n")
    # from Python 3.12 on, forks warn where there are threads, as PyTorch has them
    command = [
        sys.executable,
        "-W",
        "ignore:This process:DeprecationWarning",
        "-c",
        PARENT,
        work,
        str(ROOT),
        str(forks),
    ]
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


@pytest.mark.parametrize("work", KINDS)
def test_a_child_ends_with_its_parent_while_it_works(work: str, tmp_path: Path) -> None:
    assert orphaned(work, tmp_path, after_s=2.5) == ""


@pytest.mark.parametrize("work", KINDS)
def test_a_child_ends_with_its_parent_while_it_starts(work: str, tmp_path: Path) -> None:
    assert orphaned(work, tmp_path, after_s=0.0) == ""


def test_a_child_ends_although_a_forked_process_holds_its_pipe(tmp_path: Path) -> None:
    assert orphaned("train under a limit", tmp_path, after_s=0.5, forks=True) == ""


@pytest.mark.parametrize("work", [*child_main.WORK, "wait"])
def test_a_child_that_is_told_nothing_ends_with_its_input(work: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        child_command(work, imports_as_here=True), stdin=pipe, stdout=pipe, stderr=pipe, text=True
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
    with Child("end", imports_as_here=True) as child, pytest.raises(ProcessEnded) as ended:
        child.ask(how, "")
    assert str(ended.value) == told
    assert capfd.readouterr().err == ""


def test_a_child_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ProcessEnded, match="could not be started: No such file"):
        Child("end").start()


@pytest.mark.parametrize("work", ["not start", "end"])
def test_a_child_that_has_ended_is_told_nothing(work: str) -> None:
    with Child(work, imports_as_here=True) as child:
        for more in ("x" * 10_000_000, "x" * 10_000_000, ""):  # more than a pipe holds
            with pytest.raises(ProcessEnded, match="exit status 4"):
                child.ask("killed", more)


def test_a_child_is_started_again_once_it_was_let_go_and_never_once_it_was_ended() -> None:
    with Child("end", imports_as_here=True) as child:
        assert child.ask("well", "") == "well"
        assert child.start() is child.start()
        with pytest.raises(ProcessEnded):
            child.ask("killed", "")
        child.let_go()
        assert child.ask("well again", "") == "well again"
        child.end()
        with pytest.raises(ProcessEnded, match="it was ended"):
            child.ask("well", "")


def test_who_waits_for_an_answer_meets_the_end_from_another_thread() -> None:
    with Child("wait", imports_as_here=True) as child:
        begun = threading.Event()
        ends = threading.Thread(target=lambda: begun.wait() and child.end())
        ends.start()
        with pytest.raises(ProcessEnded, match="exit status -9"):
            child.ask(True, progress=lambda process: begun.set())
        ends.join()


def test_nothing_is_done_that_is_not_in_the_table() -> None:
    for work in ("os:system", "tests.api.child_work:end", "..api.planning:plan_here"):
        with Child(work, imports_as_here=True) as child, pytest.raises(ProcessEnded, match="KeyError"):
            child.ask("true")


@pytest.mark.parametrize("work", child_main.WORK)
def test_all_work_of_the_table_is_there(work: str) -> None:
    module, _, name = child_main.WORK[work].partition(":")
    assert callable(getattr(import_module(module, "pooch.api"), name))


def test_errors_arrive_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(child_main, "_send", told.append)
    for error in (InfeasibleBudget(3, 5, "dtr"), UsageError("a\nb"), ProcessEnded()):
        child_main._send_error(error)
        again = getattr(errors, told[-1]["error"])(*told[-1]["arguments"])
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_what_the_users_code_says_in_a_child_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with Child("end", imports_as_here=True, passes_on=True) as child:
        assert child.ask("with a warning", "") == "with a warning"
    said = capfd.readouterr().err
    assert "UserWarning: mind this" in said
    assert said.endswith("and that, without an end")


def test_a_child_whose_answer_nobody_reads_ends_without_a_word(tmp_path: Path) -> None:
    mark, pipe = tmp_path / "mark", subprocess.PIPE
    command = child_command("end", imports_as_here=True)
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        child.stdin.write(f'["an answer that nobody reads", "{mark}"]\n')
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
    with Child("end", imports_as_here=True) as child:
        child.start()
    assert of_this_process() == before
    with Child("end", imports_as_here=True) as child, suppress(ProcessEnded):
        child.ask(how, "")
    assert of_this_process() == before


@pytest.mark.parametrize("work", ["make a plan", "plan beside training"])
def test_a_child_that_plans_is_ready_without_torch(work: str) -> None:
    """Importing torch takes longer than most plans do."""
    module, _, name = child_main.WORK[work].partition(":")
    code = f"""
import sys
from importlib import import_module
print(callable(getattr(import_module({module!r}, "pooch.api"), {name!r})), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=child_environment(), check=True
    )
    assert done.stdout.strip() == "True False"

"""Changed files of every kind are read, or refused in one line that names them; and the fuzzer sees what it says.

Long runs: `python -m benchmarks.fuzz_files --cases N --seed S [--kind K]`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from benchmarks.fuzz_files import __main__ as fuzzer
from benchmarks.fuzz_files import judging
from benchmarks.fuzz_files.judging import Defect, Kind, outcome_of, refusal, warm_up
from benchmarks.fuzz_files.kinds import KINDS, kind_of
from benchmarks.fuzz_files.past import keep, past_failures
from pooch.errors import PoochError, UsageError

pytestmark = pytest.mark.cpu
CASES = {"profile": 160, "plan": 300, "cache": 160, "packing": 300, "devices": 250, "onnx": 250}
PAST = [(kind, seed) for kind, seeds in past_failures().items() for seed in seeds]


@pytest.fixture(autouse=True)
def no_catalogue_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("name", KINDS)
def test_changed_files_are_read_or_refused_in_one_line(name: str) -> None:
    kind, outcomes, failures = kind_of(name), Counter[str](), []
    warm_up(kind)
    for seed in range(CASES[name]):
        try:
            outcomes[outcome_of(kind, seed).partition(",")[0]] += 1
        except Defect as defect:
            failures.append(f"python -m benchmarks.fuzz_files --kind {name} --cases 1 --seed {seed}: {defect}")
    assert not failures, "\n".join(failures)
    # Both happen, so that the checks behind the first are reached, and what works with accepted files too.
    assert min(outcomes["refused"], outcomes["accepted"]) >= 10, outcomes


@pytest.mark.parametrize(("name", "seed"), PAST)
def test_past_failures_stay_mended(name: str, seed: int) -> None:
    warm_up(kind_of(name))
    outcome_of(kind_of(name), seed)


@pytest.mark.parametrize("name", KINDS)
def test_a_seed_writes_the_same_file_each_time(name: str, tmp_path: Path) -> None:
    found = []
    for turn in range(2):
        folder = tmp_path / str(turn)
        folder.mkdir()
        kind_of(name).write(Random("a seed"), folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert found[0] == found[1] != {}


# What the fuzzer itself has to see ------------------------------------------------------------------------------------


def kind_that(does: Callable[[Path], object]) -> Kind:
    def judge(random: Random, folder: Path) -> str:
        does(folder)
        return "accepted"

    return Kind("toy", lambda random, folder: None, judge, lambda folder: None)


def fail(folder: Path) -> None:
    raise KeyError("no such field")


def refuse_on_two_lines(folder: Path) -> None:
    error = PoochError()
    error.args = ("one\ntwo",)
    refusal(error)


def take_memory(folder: Path) -> None:
    bytes(4 * 2**30)


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (fail, "KeyError in test_fuzz_files.py"),
        (refuse_on_two_lines, "a message of 2 lines"),
        (lambda folder: refusal(PoochError("a message"), folder), "does not name the file"),
        (take_memory, "more than"),
        (lambda folder: time.sleep(5), "takes more than"),
        (lambda folder: subprocess.run(["true"], check=True), "subprocess.Popen"),
        (lambda folder: (folder.parent / "canary").read_bytes(), "canary"),
    ],
)
def test_what_no_file_may_do_is_seen(
    does: Callable[[Path], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "MOST_SECONDS", 1)
    with pytest.raises(Defect, match=told):
        outcome_of(kind_that(does), 0)


@pytest.mark.parametrize("way", ["write", "append", "rename", "unlink", "link", "through a link"])
def test_files_of_others_are_not_changed_by_a_case_and_it_is_told(tmp_path: Path, way: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")

    def does(folder: Path) -> None:
        mine = folder / "mine"
        mine.write_text("new")
        if way == "write":
            victim.write_text("new")
        elif way == "append":
            os.close(os.open(victim, os.O_WRONLY | os.O_APPEND))
        elif way == "rename":
            mine.rename(victim)
        elif way == "unlink":
            victim.unlink()
        elif way == "link":
            (tmp_path / "more").symlink_to("x")
        else:
            (folder / "link").symlink_to(victim)
            (folder / "link").write_text("new")

    with pytest.raises(Defect):
        outcome_of(kind_that(does), 0)
    assert victim.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_what_a_case_may_do_is_no_defect() -> None:
    def does(folder: Path) -> None:
        (folder / "file").write_text("text")
        (folder / "file").rename(folder / "other")
        with pytest.raises(UsageError):
            raise UsageError("one line")

    assert outcome_of(kind_that(does), 0) == "accepted"


def test_seeds_of_failures_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "past.json"
    for kind, seed in (("plan", 5), ("plan", 3), ("onnx", 7), ("plan", 5)):
        keep(kind, seed, path)
    assert past_failures(path) == {"onnx": [7], "plan": [3, 5]}


def test_a_row_of_cases_is_judged_in_children_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzzer.run("packing", 0, 6, forget=True)
    assert sum(found.outcomes.values()) == 6
    assert not found.defects
    assert "packing: 6 cases from seed 0" in capsys.readouterr().out


def test_a_case_that_ends_its_process_or_says_nothing_is_found_and_the_next_one_is_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = (
        "import json, os, sys, time\n"
        "for seed in range(int(sys.argv[2]), int(sys.argv[3])):\n"
        "    if seed == 2: os.abort()\n"
        "    if seed == 4: time.sleep(600)\n"
        "    print(json.dumps({'seed': seed, 'outcome': 'refused'}), flush=True)\n"
    )
    real = subprocess.Popen

    def popen(given: list[str], **options: object) -> object:
        return real([given[0], "-c", script, *given[3:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(fuzzer.subprocess, "Popen", popen)
    monkeypatch.setattr(fuzzer, "SILENT_S", 3)
    judged = {seed: text for seed, text, _ in fuzzer.fuzz("plan", 0, 6)}
    assert sorted(judged) == [0, 1, 2, 3, 4, 5]
    assert "ended the process" in judged[2]
    assert "said nothing" in judged[4]
    assert judged[5] == "refused"

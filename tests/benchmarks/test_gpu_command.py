"""The command for a machine with a GPU, rehearsed on the CPU: what runs, what does not, and that both are told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pooch.profiler.assembly
from benchmarks.gpu import marked_tests, race, workload
from benchmarks.gpu.__main__ import PARTS, child_environment, obstacle, run_part, unpack_wheels
from benchmarks.gpu.account import RESERVE_S, Account, Part, Result, exit_code
from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.marked_tests import judge
from benchmarks.gpu.part import find
from benchmarks.gpu.report import report_text
from benchmarks.gpu.surroundings import look_around
from benchmarks.gpu.wheels import PACKAGES, ROOT, download_command, pinned
from pooch.executor.engines import measurement
from pooch.ir import Profile
from tests import device_parts

AROUND = {
    "gpu": True, "device": "a card", "device memory": 2**36, "driver": "580", "cuda": "13.0", "cudnn": 91900,
    "cpu cores": 16, "system": "Linux 6", "python": "3.12.3", "versions": {"torch": "2.11.0"}, "commit": "abc",
    "changed files": 0, "source": "123", "missing": [],
}  # fmt: skip


def test_without_a_gpu_everything_is_not_run(tmp_path: Path) -> None:
    environment = {**child_environment(None), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "no CUDA device" in done.stderr
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert [(p["name"], p["status"]) for p in document["parts"]] == [(part.name, "not run") for part in PARTS]
    assert all(part["why"] for part in document["parts"])
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("| not run | no CUDA device here |") == len(PARTS)
    assert "passed" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]


# Time ------------------------------------------------------------------------------------------------------------


def test_a_part_that_does_not_fit_any_more_is_not_begun() -> None:
    now = [100.0]
    account = Account(60, lambda: now[0])
    part = Part("any", 20, 40)
    assert account.grant_s(part) == 40
    now[0] += 30
    assert account.grant_s(part) == 30 - RESERVE_S
    now[0] += 6
    assert account.grant_s(part) is None


def test_the_whole_run_fits_into_its_time() -> None:
    """The parts that show that it works come first and cannot use up the time of the workloads."""
    workloads = [number for number, part in enumerate(PARTS) if part.name.startswith("workload:")]
    assert sum(part.most_s for part in PARTS[: workloads[0]]) < 0.65 * 1200
    assert PARTS[0].name == "tests:gpu"


def test_all_parts_of_the_tests_that_run_on_a_cuda_device_are_run() -> None:
    names = [part.name for part in PARTS if part.name.startswith(marked_tests.PREFIX)]
    assert sorted(names) == sorted(marked_tests.PREFIX + part.name for part in device_parts.PARTS)


def test_tests_of_either_device_are_told_to_use_it(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GIVEN a part of the tests WHEN it runs on CUDA THEN pytest gets its paths and variables"""
    calls: list[tuple[list[str], str]] = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, env, **_: calls.append((command, env.get("POOCH_TEST_DEVICE", "")))
    )
    for name, device in (("tests:either-device", "cuda"), ("tests:gpu", "cuda"), ("tests:either-device", "cpu")):
        given = replace(job(name), device=device, small=False)
        assert marked_tests.run(given).why == "pytest wrote no report"
    paths, variables = zip(*calls, strict=True)
    assert variables == ("cuda", "", "")
    assert set(device_parts.EITHER_DEVICE) <= set(paths[0])
    assert set(device_parts.NEEDS_A_GPU) <= set(paths[1])


def test_what_takes_the_whole_card_runs_alone(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        report = next(word.partition("=")[2] for word in command if word.startswith("--junitxml="))
        case = f"<testcase classname='c' name='{len(commands)}'/>"
        Path(report).write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")

    monkeypatch.setattr(subprocess, "run", run)
    given = replace(job("tests:gpu"), device="cuda", small=False)
    assert marked_tests.run(given) == Verdict("passed", "2 passed")
    together, alone = ({*command} for command in commands)
    assert {"gpu and not slow and not whole_card", "-n"} <= together
    assert "gpu and not slow and whole_card" in alone
    assert "-n" not in alone


def test_a_part_that_hangs_is_stopped(tmp_path: Path) -> None:
    result = run_part(Part("hooks", 0, 1), 1.0, tmp_path, child_environment(None), ["--device", "cpu", "--small"])
    assert (result.status, result.why) == ("failed", "stopped after 1 s")


def test_a_part_that_dies_is_failed_and_its_log_kept(tmp_path: Path) -> None:
    result = run_part(Part("unknown", 0, 60), 60.0, tmp_path, child_environment(None), [])
    assert result.status == "failed"
    assert "there is no part 'unknown'" in result.data["log"]


@pytest.mark.parametrize(
    ("statuses", "code"), [("passed passed", 0), ("passed not_run", 3), ("failed not_run", 1), ("not_run", 3)]
)
def test_exit_codes(statuses: str, code: int) -> None:
    results = [Result("any", status.replace("_", " ")) for status in statuses.split()]  # type: ignore[arg-type]
    assert exit_code(results) == code


# Packages ---------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_an_obstacle() -> None:
    gpt2 = next(part for part in PARTS if part.name == "workload:gpt2")
    assert obstacle(gpt2, {**AROUND, "missing": []}, "cuda") == ""
    assert "transformers" in obstacle(gpt2, {**AROUND, "missing": ["transformers"]}, "cuda")
    assert "pulp" in obstacle(PARTS[1], {**AROUND, "missing": ["pulp"]}, "cpu")
    assert obstacle(PARTS[1], {**AROUND, "gpu": False, "missing": ["torch"]}, "cuda") == "torch is not installed"


def test_carried_packages_have_the_tested_versions() -> None:
    requirements = pinned((ROOT / "constraints.txt").read_text())
    assert len(requirements) == len(PACKAGES)
    command = download_command(requirements, Path("there"), "3.12")
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    with pytest.raises(SystemExit, match="no version of nothing"):
        pinned("a==1\n", ("a", "nothing"))


def wheel(folder: Path, name: str, tag: str = "py3-none-any") -> None:
    folder.mkdir(exist_ok=True)
    information = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", "answer = 42\n")
        file.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{information}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{information}/RECORD", "")


def test_carried_packages_are_unpacked_and_found(tmp_path: Path) -> None:
    wheel(tmp_path / "whl", "carried_example")
    site, note = unpack_wheels(tmp_path / "whl", tmp_path / "site")
    assert site is not None
    assert note == "1 packages from whl/"
    code = "import carried_example; print(carried_example.answer)"
    environment = {**child_environment(site), "COVERAGE_PROCESS_START": ""}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "42"


def test_wheels_for_another_python_are_left_alone(tmp_path: Path) -> None:
    wheel(tmp_path / "whl", "carried_example", "cp27-cp27m-win32")
    site, note = unpack_wheels(tmp_path / "whl", tmp_path / "site")
    assert site is None
    assert "left alone" in note
    assert unpack_wheels(tmp_path / "empty", tmp_path / "site") == (None, "no wheels in empty/")


# Parts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Job]]:
    """Small parts in this process; its settings are put back."""
    monkeypatch.setattr(pooch.profiler.assembly, "SMALLEST_ACTIVATION_BYTES", 1024)
    monkeypatch.setattr(measurement, "LARGE_BYTES", 2**18)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda name: Job(name, "cpu", True, time.monotonic() + 600, tmp_path, tmp_path / "part.json")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def played(job: Job) -> tuple[Verdict, Job]:
    verdict = find(job.name)(job)
    written = json.loads(job.out.read_text())
    assert written["data"] == json.loads(json.dumps(job.data))  # nothing is only in memory
    return verdict, job


@pytest.mark.parametrize("name", ["links", "hooks", "doctor"])
def test_measuring_parts(name: str, job: Callable[[str], Job]) -> None:
    verdict, done = played(job(name))
    assert verdict.status == "passed"
    assert done.data[name]


def test_the_race_test(job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "RACES", (race.Race("alexnet", "", 8, {}),))
    monkeypatch.setattr(race, "STEPS", 3)
    verdict, done = played(job("race"))
    assert (verdict.status, verdict.why) == ("passed", "2 of 2 races")
    for row in done.data["race"]:
        assert row["same bits"] == "yes"
        assert row["replayed ops"] > 0
        assert row["left the plan"] == 0


def test_a_race_of_a_missing_package_is_not_run(job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "RACES", (race.Race("gpt2", "no_such_package", 8, {}),))
    verdict, done = played(job("race"))
    assert verdict.status == "not run"
    assert done.data["race"][0]["same bits"] == "not run: no_such_package is not installed"


def test_a_workload(job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "BUDGETS", ("80%",))
    verdict, done = played(job("workload:alexnet"))
    (row,) = done.data["rows"]
    assert row["same bits"] == "yes"
    assert row["planned, card of that size"] == "not run: no GPU"
    assert verdict.status == ("passed" if row["within"] == "yes" else "failed")
    assert [path.name for path in done.profiles.glob("alexnet-b*-cpu-small.json")]


def test_a_workload_without_time_left(job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch) -> None:
    given = job("workload:alexnet")
    monkeypatch.setattr(workload, "BUDGETS", ("80%",))
    recorded = Profile.load(ROOT / "profiles" / "lstm-b32-cpu.json")
    monkeypatch.setattr(workload, "_profiled", lambda job, built: recorded)
    monkeypatch.setattr(workload, "_plain", lambda *_: None)
    monkeypatch.setattr(workload, "train_one", None)
    given.deadline_s = time.monotonic()
    verdict, done = played(given)
    assert (verdict.status, verdict.why) == ("not run", "not run: 80%")
    assert done.data["rows"][0]["same bits"] == "not run: no time left"


CASE = '<testcase classname="tests.a" name="{}">{}</testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "told"),
    [
        ([""], "passed", "1 passed"),
        (["", '<skipped message="one CUDA device"/>'], "passed", "1 passed, 1 skipped"),
        (['<skipped message="no CUDA device"/>'], "not run", "1 skipped"),
        (["", '<failure message="assert 1 == 2&#10;more"/>'], "failed", "1 passed, 1 failed"),
        (['<error message="cannot import"/>'], "failed", "1 failed"),
        ([], "not run", "pytest found no marked tests"),
    ],
)
def test_marked_tests_are_judged(
    cases: list[str], status: str, told: str, job: Callable[[str], Job], tmp_path: Path
) -> None:
    report = tmp_path / "tests.xml"
    inner = "".join(CASE.format(f"test_{i}", case) for i, case in enumerate(cases))
    report.write_text(f"<testsuites><testsuite>{inner}</testsuite></testsuites>")
    given = job("tests:gpu")
    assert judge(given, report) == Verdict(status, told)  # type: ignore[arg-type]
    assert all("more" not in note for note in given.data.get("notes", ()))


@pytest.mark.slow
def test_every_part_is_rehearsed_by_one_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--output", str(tmp_path), "--device", "cpu", "--small"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=child_environment(None), cwd=ROOT, check=False, timeout=560
    )
    statuses = {part["name"]: part["status"] for part in json.loads((tmp_path / "gpu.json").read_text())["parts"]}
    assert list(statuses) == [part.name for part in PARTS]
    assert statuses["race"] == statuses["links"] == statuses["hooks"] == "passed", done.stderr
    assert statuses["tests:gpu"] == ("passed" if torch.cuda.is_available() else "not run")
    assert statuses["tests:either-device"] == "passed", done.stderr
    assert "Rehearsal on the CPU" in (tmp_path / "gpu.md").read_text()


# Report -----------------------------------------------------------------------------------------------------------


def test_the_page_tells_the_machine_and_what_was_not_run() -> None:
    results = [
        Result("race", "passed", "6 of 6 races", 31.0, {"race": [{"workload": "lstm", "same bits": "yes"}]}),
        Result(
            "workload:gpt2", "failed", "60%: NO: loss", 80.0, {"rows": [{"workload": "gpt2", "same bits": "NO: loss"}]}
        ),
        Result("workload:lstm", "not run", "4 s were left, it needs 45 s"),
    ]
    page = report_text(AROUND, results, "cuda", small=False)
    assert "a card (64.0 GiB), driver 580, CUDA 13.0, cuDNN 91900" in page
    assert "Commit abc (package source 123)" in page
    assert "| workload:lstm | not run | 4 s were left, it needs 45 s |  |" in page
    assert "| gpt2 | NO: loss |" in page


def test_surroundings_of_this_machine() -> None:
    around = look_around()
    assert around["gpu"] == torch.cuda.is_available()
    assert around["missing"] == []
    assert len(str(around["source"])) == 16

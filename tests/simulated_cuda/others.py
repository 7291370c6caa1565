"""PyTorch's own tests of streams, events, memory and generators on the simulated device.

    python -m tests.simulated_cuda.others FOLDER [--only PATTERN] [--output JSON] [--markdown FILE]

FOLDER is the `test` folder of a checkout of PyTorch, as near as can be to the installed version; none of it is kept
here. `others.toml` says which of its files are run, on how many devices, and which of their tests do not apply, each
with the reason; what is listed there and is not in FOLDER is left aside. Tests run one after the other in a process for
each file, or for each test where the file asks for that; one that takes longer than its limit, or that the process dies
of, is told, and the rest goes on in a process of its own. A test that passes while the device reports a mistake has
failed: the device, or PyTorch, is wrong. Exit code 1 if one that applies fails.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pooch.ir.files import replace_file
from tests.simulated_cuda import others_events
from tests.simulated_cuda.environment import ROOT, TORCH, set_up_or_tell, variables

LISTED = Path(__file__).with_name("others.toml")
TEST_LIMIT_S = 240
START_LIMIT_S = 240  # from the start of a process to its first test: PyTorch's lists of operators are imported


@dataclass(frozen=True)
class Reason:
    """Why some tests are not run: patterns of their names, as in a shell."""

    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class File:
    """A file of PyTorch's tests.

    Attributes:
        name: within the folder.
        devices: how many there are for it.
        memory_mib: of each of them.
        alone: each of its tests needs a process of its own.
        reasons: what is not run.
    """

    name: str
    devices: int = 1
    memory_mib: int = 4096
    alone: bool = False
    reasons: tuple[Reason, ...] = ()

    def why_not(self, test: str) -> str | None:
        """Why a test is not run; None: it is.

        Args:
            test: its name, with its class.
        """
        return next((reason.why for reason in self.reasons if _is_one_of(test, reason.tests)), None)


def _is_one_of(test: str, patterns: Sequence[str]) -> bool:
    name = test.replace("::", ".")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class Result:
    """What became of one test.

    Attributes:
        file, test: its names.
        outcome: "passed", "skipped" (by itself), "failed" or "listed".
        why: of those that did not pass.
        mistakes: what the device reported meanwhile.
    """

    file: str
    test: str
    outcome: str
    why: str = ""
    mistakes: list[str] = field(default_factory=list)


def listed(path: Path = LISTED) -> list[File]:
    """The files, and what of them is not run.

    Args:
        path: a file such as `others.toml`.
    """
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        File(
            each["name"],
            each.get("devices", 1),
            each.get("memory_mib", 4096),
            each.get("alone", False),
            tuple(Reason(tuple(reason["tests"]), reason["why"]) for reason in each.get("not_run", [])),
        )
        for each in read["file"]
    ]


def run_file(folder: Path, file: File, only: Sequence[str]) -> list[Result]:
    """Run what applies of a file.

    Args:
        folder: with PyTorch's tests.
        file: which of them.
        only: patterns of the names that are wanted.
    """
    names = [name for name in _collected(folder, file) if _is_one_of(name, only)]
    reasons = {name: file.why_not(name) for name in names}
    results = [Result(file.name, name, "listed", why) for name, why in reasons.items() if why is not None]
    left = [name for name in names if reasons[name] is None]
    while left:
        done = _process(folder, file, left[:1] if file.alone else left)
        for result in done:
            sys.stdout.write(f"{file.name} {result.test}: {result.outcome} {result.why} {result.mistakes or ''}\n")
            sys.stdout.flush()
        results += done
        ran = {result.test for result in done}
        left = [name for name in left if name not in ran]
    return results


def _collected(folder: Path, file: File) -> list[str]:
    with tempfile.TemporaryDirectory() as made:
        events = Path(made) / "events"
        process = _start(folder, file, events, events, "--collect-only")
        process.communicate(timeout=START_LIMIT_S)
        for event in _events(events):
            if "collected" in event:
                return list(event["collected"])
    return []


def _process(folder: Path, file: File, tests: list[str]) -> list[Result]:
    """Run tests in one process until they are through, one takes too long, or the process is gone."""
    with tempfile.TemporaryDirectory() as made:
        events, chosen = Path(made) / "events", Path(made) / "chosen"
        chosen.write_text(json.dumps(tests))
        process = _start(folder, file, events, chosen)
        late = _watch(process, events)
        results: dict[str, Result] = {}
        running = ""
        for event in _events(events):
            running = event.get("begins", running)
            if "test" in event and results.get(event["test"], Result("", "", "")).outcome != "failed":
                results[event["test"]] = Result(file.name, event["test"], event["outcome"], event["why"])
            elif "ends" in event:
                running = ""
                _blame(results.get(event["ends"]), event["mistakes"])
        ended_in = running or ("" if results else tests[0])
        if ended_in and ended_in not in results:
            why = f"takes longer than {TEST_LIMIT_S} s" if late else f"the process ended with {process.returncode}"
            results[ended_in] = Result(file.name, ended_in, "failed", why)
        return list(results.values())


def _blame(result: Result | None, mistakes: list[str]) -> None:
    if result is None:
        return
    result.mistakes = mistakes
    if mistakes and result.outcome == "passed":
        result.outcome, result.why = "failed", "the device reports a mistake"


def _start(folder: Path, file: File, events: Path, chosen: Path, *more: str) -> subprocess.Popen[bytes]:
    environment = {
        **variables(True, file.memory_mib, file.devices),
        others_events.EVENTS: str(events),
        others_events.CHOSEN: str(chosen),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "",
    }
    command = ["python", "-m", "pytest", "-q", "-p", "tests.simulated_cuda.others_events", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", "-p", "no:timeout", "--noconftest", "-c", os.devnull, "--rootdir", str(folder)]
    return subprocess.Popen(
        [*command, *more, file.name], env=environment, cwd=folder, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _watch(process: subprocess.Popen[bytes], events: Path) -> bool:
    """Wait for a process; whether it was ended because nothing was heard of it for too long."""
    while process.poll() is None:
        heard = events.stat().st_mtime if events.exists() else None
        begun = heard or _started(process)
        if time.time() - begun > (TEST_LIMIT_S if heard else START_LIMIT_S):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.2)
    return False


def _started(process: subprocess.Popen[bytes]) -> float:
    return Path(f"/proc/{process.pid}").stat().st_mtime


def _events(path: Path) -> Iterator[dict[str, object]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def table(results: list[Result]) -> str:
    """How many of each file, and the reasons of what was not run.

    Args:
        results: of all tests.
    """
    lines = ["| file | tests | run | passed | skip by themselves | listed |", "| --- | --- | --- | --- | --- | --- |"]
    for name in dict.fromkeys(result.file for result in results):
        counts = Counter(result.outcome for result in results if result.file == name)
        ran = counts["passed"] + counts["failed"]
        lines.append(
            f"| `{name}` | {counts.total()} | {ran} | {counts['passed']} | {counts['skipped']} | {counts['listed']} |"
        )
    reasons = Counter(result.why for result in results if result.outcome == "listed")
    lines += ["", "| listed | why |", "| --- | --- |"]
    lines += [f"| {count} | {why} |" for why, count in reasons.most_common()]
    failed = [result for result in results if result.outcome == "failed"]
    lines += ["", *(f"- `{each.file}` {each.test} fails: {each.why} {each.mistakes or ''}" for each in failed)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run all files, print the table and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.others", description=__doc__)
    parser.add_argument("folder", type=Path, help="the `test` folder of PyTorch's sources")
    parser.add_argument("--only", action="append", help="a pattern of names such as 'TestCuda.test_stream*'")
    parser.add_argument("--file", action="append", help="default: all that others.toml lists and that are there")
    parser.add_argument("--output", type=Path, help="the results as JSON")
    parser.add_argument("--markdown", type=Path, help="the table")
    arguments = parser.parse_args()
    if not set_up_or_tell():
        return 0
    files = [file for file in listed() if (arguments.folder / file.name).exists()]
    chosen = [file for file in files if not arguments.file or file.name in arguments.file]
    results = [result for file in chosen for result in run_file(arguments.folder, file, arguments.only or ["*"])]
    told = table(results)
    sys.stdout.write(told)
    if arguments.output:
        replace_file(arguments.output, (json.dumps([asdict(result) for result in results], indent=1) + "\n").encode())
    if arguments.markdown:
        head = f"PyTorch's own tests on the simulated device ({TORCH}), `{Path(__file__).relative_to(ROOT)}`.\n\n"
        replace_file(arguments.markdown, (head + told).encode())
    return int(any(result.outcome == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())

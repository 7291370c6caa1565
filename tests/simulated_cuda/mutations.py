"""Break the copy engine in every way that is known, one at a time, and see that tests on the simulated device notice.

python -m tests.simulated_cuda.mutations [--only NAME ...] [--jobs 2] [--markdown FILE]

Each mutation goes into a copy of the sources, never into the sources themselves. Exit codes: 0 all were noticed; 1 one
was not; 2 the tests fail without any mutation; 3 the device cannot be set up here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulated_cuda.engine_mutations import MUTATIONS, Mutation
from tests.simulated_cuda.environment import ROOT, VENV, Unavailable, set_up, variables

COPIED = ("pooch", "tests", "profiles", "pyproject.toml")
LIMIT_S = 280  # of one mutation; what hangs is noticed too
_WORK = r"([\w:', ]+?) on stream \d+"
_RACE = re.compile(rf"""['"]{_WORK} (reads|writes over) what {_WORK} (reads|writes), and has not waited""")
_UNLOCKED = "host memory is unlocked while a copy that uses it has not been waited for"


@dataclass(frozen=True)
class Outcome:
    """What the tests said to a mutation; `test` is empty where all of them passed."""

    test: str = ""
    reason: str = ""


def mutated(text: str, mutation: Mutation) -> str:
    """A file's text with a mutation in it.

    Raises:
        ValueError: the text that it changes is not there, or more than once.
    """
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(
            f"{mutation.name!r}: {mutation.file} has its text {count} times, not once; bring it up to date"
        )
    return text.replace(mutation.old, mutation.new)


def path_of(mutation: Mutation, root: Path) -> Path:
    """The file that it changes, in a copy of the sources."""
    return (root / "pooch" / "executor" / mutation.file).resolve()


@contextmanager
def copied_sources(mutation: Mutation | None) -> Iterator[Path]:
    """A copy of the sources, with a mutation in it."""
    with tempfile.TemporaryDirectory(prefix="pooch-mutation-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        if mutation is not None:
            path = path_of(mutation, root)
            path.write_text(mutated(path.read_text(), mutation))
        yield root


def tried(mutation: Mutation | None, tests: Sequence[str]) -> Outcome:
    """Run tests on a copy of the sources until one of them fails."""
    with copied_sources(mutation) as root:
        report = root / "report.xml"
        options = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [str(VENV / "bin/python"), "-m", "pytest", *options, *tests]
        try:
            ended = subprocess.run(
                command, cwd=root, env=_variables(root), capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return Outcome(tests[0], f"not done after {LIMIT_S} s")
        if ended.returncode == 0:
            return Outcome()
        if not report.exists():
            return Outcome(tests[0], f"the process ended with {ended.returncode}: {_last_line(ended)}")
        return _first_failure(report)


def _variables(root: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = variables(numbers=True, inherited=inherited) | {"POOCH_TEST_DEVICE": "cuda", "PYTHONDONTWRITEBYTECODE": "1"}
    paths = [path for path in found["PYTHONPATH"].split(os.pathsep) if Path(path) != ROOT]
    return found | {"PYTHONPATH": os.pathsep.join([str(root), *paths])}


def _last_line(ended: subprocess.CompletedProcess[str]) -> str:
    lines = (ended.stderr + ended.stdout).strip().splitlines()
    return lines[-1] if lines else ""


def _first_failure(report: Path) -> Outcome:
    """What the one test that failed said; pytest tells of its end as of another one of the same name."""
    failed = [case for case in ElementTree.parse(report).iter("testcase") if _problems(case)]
    if not failed:
        return Outcome("pytest", "failed, and no test of it")
    name = f"{failed[0].get('classname', '').rpartition('.')[2]}::{failed[0].get('name')}"
    return Outcome(name, _reason([text for case in failed for text in _problems(case)]))


def _problems(case: ElementTree.Element) -> list[str]:
    found = [*case.iter("failure"), *case.iter("error")]
    return [f"{problem.get('message', '')}\n{problem.text or ''}" for problem in found]


def _reason(texts: list[str]) -> str:
    """What the device reported, if it did; else the first line of what failed."""
    for text in texts:
        race = _RACE.search(text)
        if race is not None:
            return f"race: {race[1]} {race[2]} what {race[3]} {race[4]}"
        if _UNLOCKED in text:
            return f"reported: {_UNLOCKED}"
    return _shortened(next((line for text in texts for line in text.splitlines() if line.strip()), "no message"))


def _shortened(line: str) -> str:
    return line if len(line) <= 150 else line[:147] + "..."


_ABOUT = """# Mutations of the engine

Made by `python -m tests.simulated_cuda.mutations --markdown docs/engine_mutations.md` on the simulated CUDA device
(`tests/simulated_cuda/README.md` says how it works), numbers mode. Each row is one change of the copy engine, or of what
the executor does with it, that would give wrong numbers, free or hand out memory too early or too late, or hide an
error; and the first test that failed with it. Changes that cost time only are not in the list: the file
`tests/simulated_cuda/engine_mutations.py` names them.
"""

_OTHERS = "\n## The native watch\n"


def report(rows: dict[str, list[tuple[Mutation, Outcome]]]) -> str:
    """The table, as Markdown."""
    noticed = sum(bool(outcome.test) for found in rows.values() for _, outcome in found)
    count = sum(map(len, rows.values()))
    parts = [_ABOUT, f"\n**{noticed} of {count} were noticed.**\n"]
    for title, found in rows.items():
        parts.append(f"\n## {title}\n\n| mutation | what it breaks | noticed by | how |\n|---|---|---|---|\n")
        parts.extend(_row(mutation, outcome) for mutation, outcome in found)
    return "".join(parts)


def kept_of(markdown: Path) -> str:
    """What stays of a file: the table of the mutations that another command tries."""
    text = markdown.read_text() if markdown.exists() else ""
    _, title, rest = text.partition(_OTHERS)
    return title + rest


def _row(mutation: Mutation, outcome: Outcome) -> str:
    test = f"`{outcome.test}`" if outcome.test else "**nothing**"
    reason = outcome.reason.replace("|", "\\|")
    return f"| {mutation.name} (`{Path(mutation.file).name}`) | {mutation.breaks} | {test} | {reason} |\n"


def chosen(names: list[str]) -> dict[str, list[Mutation]]:
    """The mutations of these names, in their groups; all of them where no name is given.

    Raises:
        ValueError: there is none of a name.
    """
    known = {each.name for group in MUTATIONS.values() for each in group}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no mutation {unknown[0]!r}: choose from {', '.join(sorted(known))}")
    wanted = {title: [each for each in group if not names or each.name in names] for title, group in MUTATIONS.items()}
    return {title: group for title, group in wanted.items() if group}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated_cuda.mutations", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="this mutation; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once (2)")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    try:
        groups = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    try:
        set_up()
    except (Unavailable, subprocess.CalledProcessError) as error:
        sys.stderr.write(f"The simulated CUDA device cannot be set up here: {error}\n")
        return 3
    return _try_all(groups, arguments.jobs, arguments.markdown)


def _try_all(groups: dict[str, list[Mutation]], jobs: int, markdown: Path | None) -> int:
    tests = list(dict.fromkeys(test for group in groups.values() for each in group for test in each.tests))
    untouched = tried(None, tests)
    if untouched != Outcome():
        sys.stderr.write(f"Without any mutation {untouched.test} fails: {untouched.reason}\n")
        return 2

    def attempt(mutation: Mutation) -> tuple[Mutation, Outcome]:
        outcome = tried(mutation, mutation.tests)
        sys.stdout.write(f"{'noticed' if outcome.test else 'NOT NOTICED'}: {mutation.name}\n    {outcome.test}\n")
        sys.stdout.write(f"    {outcome.reason}\n" if outcome.test else "")
        sys.stdout.flush()
        return mutation, outcome

    with ThreadPoolExecutor(jobs) as pool:
        rows = {title: list(pool.map(attempt, group)) for title, group in groups.items()}
    if markdown is not None:
        markdown.write_text(report(rows) + kept_of(markdown))
    return int(any(not outcome.test for found in rows.values() for _, outcome in found))


if __name__ == "__main__":
    sys.exit(main())

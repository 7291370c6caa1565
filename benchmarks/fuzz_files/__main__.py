"""Files that were changed by chance, and what reading them comes to: an answer, or one line that names the file.

    python -m benchmarks.fuzz_files --cases 10000 [--seed 0] [--kind profile ...] [--forget]

Kinds: profiles, plans, directories of kept plans, blocks to pack, devices, ONNX models. A case is changed in its
structure (fields, numbers, references, nesting, checksums made anew) or in its bytes, read, and what is accepted is
worked with by the commands, all within limits of time and memory. Cases run in child processes, so one that ends the
process is found too. Seeds of failures are printed and kept in `past_failures.json`, which the tests replay; with
`--forget` they are only printed. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.fuzz_files.judging import MOST_SECONDS
from benchmarks.fuzz_files.kinds import KINDS
from benchmarks.fuzz_files.past import keep
from tests.children import ROOT, child_environment

CASES_PER_WORKER = 1000
SILENT_S = 10 * MOST_SECONDS  # a net for what no signal interrupts; the first case waits for imports


@dataclass
class Found:
    """What a run has found.

    Attributes:
        outcomes: How many cases came to what.
        defects: What failed, by seed.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: dict[int, str] = field(default_factory=dict)


def fuzz(kind: str, first: int, cases: int) -> Iterator[tuple[int, str, bool]]:
    """Judge a row of seeds, and give each with what became of it, and whether that is a defect.

    Args:
        kind: Name of the kind of file.
        first: The first seed.
        cases: How many.
    """
    seed, last = first, first + cases
    while seed < last:
        until = min(last, seed + CASES_PER_WORKER)
        for seed, text, is_defect in _row(kind, seed, until):  # noqa: B020 - goes on after the last one
            yield seed, text, is_defect
        seed += 1


def _row(kind: str, first: int, last: int) -> Iterator[tuple[int, str, bool]]:
    """Cases of one worker; the last one may be what has ended it."""
    given = [sys.executable, "-m", "benchmarks.fuzz_files.worker", kind, str(first), str(last)]
    environment = child_environment(OMP_NUM_THREADS="1")
    with subprocess.Popen(
        given, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        assert worker.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_pass_on, args=(worker.stdout, lines), daemon=True).start()
        expected = first
        while expected < last:
            try:
                line = lines.get(timeout=SILENT_S)
            except queue.Empty:
                worker.kill()
                yield expected, f"it has said nothing for {SILENT_S} s", True
                return
            if not line:
                yield expected, f"it has ended the process with code {worker.wait()}", True
                return
            told = json.loads(line)
            yield told["seed"], told.get("defect") or told["outcome"], "defect" in told
            expected = told["seed"] + 1


def _pass_on(stream: object, lines: queue.Queue[str]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.put(line)
    lines.put("")


def run(kind: str, first: int, cases: int, *, forget: bool) -> Found:
    """Judge a row of seeds and print what fails.

    Args:
        kind: Name of the kind of file.
        first: The first seed.
        cases: How many.
        forget: Whether seeds of failures are not kept.
    """
    found, start = Found(), time.monotonic()
    for seed, text, is_defect in fuzz(kind, first, cases):
        found.outcomes["DEFECT" if is_defect else text] += 1
        if is_defect:
            found.defects[seed] = text
            print(f"{kind} --seed {seed} --cases 1: {text}", flush=True)
            if not forget:
                keep(kind, seed)
    seconds = time.monotonic() - start
    counts = ", ".join(f"{number} {outcome}" for outcome, number in found.outcomes.most_common())
    print(f"{kind}: {cases} cases from seed {first} in {seconds:.0f} s: {counts}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="number of cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=KINDS, action="append", help="this kind alone; may be given several times")
    parser.add_argument("--forget", action="store_true", help="do not keep the seeds of failures")
    arguments = parser.parse_args()
    os.environ["XDG_CONFIG_HOME"] = os.devnull  # no catalogue of this machine's user
    found = [run(kind, arguments.seed, arguments.cases, forget=arguments.forget) for kind in arguments.kind or KINDS]
    return int(any(each.defects for each in found))


if __name__ == "__main__":
    sys.exit(main())

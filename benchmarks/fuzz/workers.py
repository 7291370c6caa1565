"""Judges many seeds in processes that are replaced now and then, and keeps what was found in a file as it comes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.fuzz.recipe import written
from benchmarks.fuzz.verdict import Verdict
from tests.children import ROOT, child_environment
from tests.hostile.harness import Outcome

SEEDS_PER_WORKER = 500
SILENT_S = 120  # a net for a model that hangs


class Journal:
    """What was found so far, one line of JSON per seed, so that a run can be continued.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.verdicts: dict[int, Verdict] = {}
        self.memory: list[dict[str, int]] = []  # of workers: first seed, models judged so far, resident bytes
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                self._take(json.loads(line))
            except json.JSONDecodeError:
                continue  # the last line of a run that was interrupted

    def add(self, told: dict[str, Any]) -> None:
        """Keep a line."""
        with self._lock:
            self._take(told)
            with self._path.open("a") as file:
                file.write(json.dumps(told) + "\n")

    def _take(self, told: dict[str, Any]) -> None:
        if "memory_bytes" in told:
            self.memory.append(told)
        else:
            self.verdicts[told["seed"]] = Verdict.from_json(told)


def judge_all(seeds: Iterable[int], jobs: int, journal: Journal, tell: Callable[[Journal], None]) -> None:
    """Judge all seeds that the journal does not have.

    Args:
        seeds: The seeds.
        jobs: Number of processes at a time.
        journal: Where the verdicts are kept.
        tell: Called now and then.
    """
    left = [seed for seed in seeds if seed not in journal.verdicts]
    rows = [left[start : start + SEEDS_PER_WORKER] for start in range(0, len(left), SEEDS_PER_WORKER)]
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_judge_row, row, journal) for row in rows]
        told = time.monotonic()
        for each in running:
            while not each.done():
                time.sleep(0.2)
                if time.monotonic() - told > 10:
                    tell(journal)
                    told = time.monotonic()
            each.result()
    tell(journal)


def _judge_row(seeds: list[int], journal: Journal) -> None:
    """Judge a row of seeds, with a fresh worker after one that a model has ended."""
    while seeds:
        ended = _run_worker(seeds, journal)
        if ended is None:
            return
        seed, why = ended
        recipe = written(seed)
        crash = Verdict(
            seed,
            outcomes={"process": Outcome("crash", why)},
            hostile=tuple(sorted(recipe.hostile_kinds())),
            parts=tuple(map(str, recipe.parts)),
        )
        journal.add(crash.as_json())
        seeds = seeds[seeds.index(seed) + 1 :]


def _run_worker(seeds: list[int], journal: Journal) -> tuple[int, str] | None:
    """Return the seed at which the worker ended before its time and why, or None."""
    command = [sys.executable, "-m", "benchmarks.fuzz.worker", *map(str, seeds)]
    environment = child_environment(OMP_NUM_THREADS="1")
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(worker.stderr or ()), daemon=True)
        reader.start()
        seed = seeds[0]
        assert worker.stdout is not None
        hanging = _killed_later(worker)
        for line in worker.stdout:
            hanging.cancel()
            hanging = _killed_later(worker)
            told = json.loads(line)
            if "begins" in told:
                seed = told["begins"]
            else:
                journal.add(told)
        hanging.cancel()
        code = worker.wait()
        reader.join()
    if code == 0:
        return None
    return seed, f"exit code {code}: {(errors or [''])[-1].strip()[:200]}"


def _killed_later(worker: subprocess.Popen[str]) -> threading.Timer:
    """End a worker that says nothing for too long."""
    timer = threading.Timer(SILENT_S, worker.kill)
    timer.daemon = True
    timer.start()
    return timer

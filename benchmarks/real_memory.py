"""Resident memory of training: plain, checkpointing, offloading, and Pooch at the live peaks of these two.

    python -m benchmarks.real_memory [--model llama ...] [--peer checkpointing ...] [--rounds 3]

Each training is a process of its own, and the trainings of a model take turns. Live bytes are counted in processes
beside, since an allocator that counts could change what is resident. Pooch gets the live peak of checkpointing and that
of offloading as its budget, and profiles its step within it. The highest resident size comes from the kernel
(`VmHWM`), for each phase of the process.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.ground.units import format_bytes

NAME, TITLE = "real-memory", "Resident memory of training processes at equal live peaks"
MODELS = ("llama", "vit", "swin")
PEERS = ("plain", "checkpointing", "offloading")
STEPS = 12
LAST_STEPS = 2  # an arena records the first steps, packs beside the next ones, and serves from then on
BEFORE = "dfea6c1"  # the last commit before planning moved into a process of its own
_ROOT = Path(__file__).parents[1]
_CHILD = Path(__file__).with_name("real_memory_child.py")
Cell = dict[str, Any]


def job_of(model: str, way: str, budget_bytes: int = 0, **more: Any) -> Cell:
    """What a child process does; Pooch's step is profiled within the budget."""
    profile = {"memory_limit": budget_bytes} if way == "pooch" else {}
    job = {"model": model, "way": way, "budget_bytes": budget_bytes, "profile": profile, "steps": STEPS}
    return {**job, "arena": False, "counted": False, "kept": False, "in_turns": False, **more}


def child_process(job: Cell, source: Path = _ROOT) -> subprocess.Popen[str]:
    """Start the training, with the Pooch of that source tree. `-P`: the folder of benchmarks holds no modules."""
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", str(_CHILD), json.dumps(job)]
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def trained(job: Cell, source: Path = _ROOT) -> Cell:
    """Train in a child process."""
    with child_process(job, source) as child:
        output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"the training {job} failed")
    found: Cell = json.loads(output.splitlines()[-1])
    return found


def source_of(commit: str, folder: Path) -> Path:
    """Write the package of a commit into a folder."""
    command = ["git", "-C", str(_ROOT), "archive", commit, "pooch"]
    packed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def measure(model: str, rounds: int, before: Path, peers: Sequence[str] = PEERS) -> dict[str, Any]:
    """All trainings of a model: live peaks first, then resident sizes in rounds."""
    live_bytes = {}
    for way in peers:
        tell(f"{model}: counting live bytes of {way}")
        live_bytes[way] = trained(job_of(model, way, counted=True))["live_peak_bytes"]
    ways: dict[str, tuple[Cell, Path]] = {way: (job_of(model, way), _ROOT) for way in peers}
    for peer in peers[1:]:
        job = job_of(model, "pooch", live_bytes[peer])
        tell(f"{model}: counting live bytes of Pooch at the peak of {peer}")
        live_bytes[f"pooch at {peer}"] = trained({**job, "counted": True})["live_peak_bytes"]
        ways[f"before at {peer}"], ways[f"pooch at {peer}"] = (job, before), (job, _ROOT)
        ways[f"arena at {peer}"] = ({**job, "arena": True}, _ROOT)
    samples = []
    for number in range(rounds):
        for way in list(ways) if number % 2 == 0 else list(reversed(ways)):
            tell(f"{model}: round {number + 1} of {rounds}, {way}")
            samples.append({"round": number, "training": way, **trained(*ways[way])})
    return {"workload": model, "live_bytes": live_bytes, "samples": samples}


def highest_bytes(sample: Cell, last_steps: int | None = None) -> int:
    """Highest resident size of a training, in all of its phases or in its last steps alone."""
    phases = sample["phases"] if last_steps is None else sample["phases"][-last_steps:]
    return max(phase["VmHWM"] for phase in phases)


def _median_of(result: Mapping[str, Any], training: str, last_steps: int | None = None) -> float:
    found = (each for each in result["samples"] if each["training"] == training)
    return statistics.median(highest_bytes(each, last_steps) for each in found)


_NAMES = {"before": "Pooch, before", "pooch": "Pooch", "arena": "Pooch on an arena"}


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each training: medians over the rounds."""
    return [row for result in results for row in _rows(result)]


def _rows(result: Mapping[str, Any]) -> Iterator[Row]:
    for training in dict.fromkeys(sample["training"] for sample in result["samples"]):
        way, _, peer = training.partition(" at ")
        live_bytes = result["live_bytes"].get(training)
        highest, at_last = (_median_of(result, training, steps) for steps in (None, LAST_STEPS))
        samples = [each for each in result["samples"] if each["training"] == training]
        yield {
            "model": result["workload"],
            "training": _NAMES.get(way, way),
            "budget": f"{format_bytes(samples[0]['budget_bytes'])}, live peak of {peer}" if peer else "",
            "live peak": format_bytes(live_bytes) if live_bytes else "",
            "highest RSS": format_bytes(round(highest)),
            "over the peer's": _over(highest, _median_of(result, peer)) if peer else "",
            "highest RSS in the last steps": format_bytes(round(at_last)),
            "over the peer's in them": _over(at_last, _median_of(result, peer, LAST_STEPS)) if peer else "",
        }


def _over(one: float, other: float) -> str:
    return f"{(one - other) / 2**20:+.0f} MiB"


def phase_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each phase of each training: the highest resident size in it, and what is left at its end (medians)."""
    rows: list[Row] = []
    for result in results:
        for training in dict.fromkeys(sample["training"] for sample in result["samples"]):
            samples = [each for each in result["samples"] if each["training"] == training]
            for phases in zip(*(each["phases"] for each in samples), strict=True):
                cells: dict[str, object] = {
                    "model": result["workload"],
                    "training": training,
                    "phase": phases[0]["phase"],
                    "highest": _mib(phases, lambda phase: phase["VmHWM"]),
                    "at the end": _mib(phases, lambda phase: phase["VmRSS"]),
                }
                for kind in ("heap", "anonymous", "files"):
                    cells[kind] = _mib(phases, lambda phase, kind=kind: phase["kinds"].get(kind, 0))
                rows.append(cells)
    return rows


def _mib(phases: Sequence[Cell], size_of: Any) -> str:
    return f"{statistics.median(map(size_of, phases)) / 2**20:.0f} MiB"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--peer", action="append", choices=PEERS[1:], help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", default=BEFORE, help="commit to compare with")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.model or MODELS
    results = earlier_results(NAME, arguments.output, names)
    with TemporaryDirectory(prefix="pooch-before-") as folder:
        before = source_of(arguments.before, Path(folder))
        for name in names:
            results.append(measure(name, arguments.rounds, before, ("plain", *(arguments.peer or PEERS[1:]))))
            more = {
                "By phase: highest and last resident size, and the last one by kind of mapping": phase_rows(results)
            }
            write_results(NAME, TITLE, rows_of(results), results, arguments.output, more)
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")


if __name__ == "__main__":
    main()

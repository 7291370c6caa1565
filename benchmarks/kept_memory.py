"""What keeping freed memory (`pooch.keep_freed_memory`) does to plain and planned steps on a CPU.

    python -m benchmarks.kept_memory [--model llama ...] [--turns 10] [--share 0.6]

Four processes train the same model: plainly and under a plan, each with the C library as it is and with freed memory
kept. Their steps take turns, so that whatever else the machine does affects all four alike.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.real_memory import MODELS, child_process, highest_bytes, job_of, trained
from benchmarks.samples import FEWEST_TURNS, WARM_UP_TURN, of_kind, ratios, told
from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.ground.units import format_bytes

NAME, TITLE = "kept-memory", "Freed memory kept by the C library, on a CPU"
WARM_UP_STEPS = 3  # of which the first two are measured by the run itself


def measure(model: str, turns: int, share: float) -> dict[str, Any]:
    """All steps of the four trainings of a model."""
    tell(f"{model}: counting live bytes of plain training")
    peak_bytes = trained(job_of(model, "plain", counted=True))["live_peak_bytes"]
    steps = WARM_UP_STEPS + turns
    jobs = {
        f"{name}{', kept' if kept else ''}": job_of(
            model, way, int(share * peak_bytes), steps=steps, kept=kept, in_turns=True
        )
        for name, way in (("plain", "plain"), ("planned", "pooch"))
        for kept in (False, True)
    }
    samples, names = [], list(jobs)
    with ExitStack() as stack:
        children = {name: stack.enter_context(child_process(job)) for name, job in jobs.items()}
        for number in range(steps):
            turn = max(WARM_UP_TURN, number - WARM_UP_STEPS + 1)
            tell(f"{model}: turn {turn} of {turns}" if turn else f"{model}: warming up")
            first = number % len(names)
            for name in names[first:] + names[:first]:
                samples.append({"turn": turn, "kind": name, **_asked(children[name])})
        trainings = {name: json.loads(_line_of(child)) for name, child in children.items()}
    return {"workload": model, "live_peak_bytes": peak_bytes, "samples": samples, "trainings": trainings}


def _asked(child: Any) -> dict[str, Any]:
    child.stdin.write("\n")
    child.stdin.flush()
    found: dict[str, Any] = json.loads(_line_of(child))
    return found


def _line_of(child: Any) -> str:
    line: str = child.stdout.readline()
    if not line:
        raise SystemExit("a training ended early")
    return line


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row for each training; medians, with the middle half of the turns in brackets."""
    return [row for result in results for row in _rows(result)]


def _rows(result: Mapping[str, Any]) -> Iterator[Row]:
    samples = result["samples"]
    for kind, training in result["trainings"].items():
        base = kind.removesuffix(", kept")
        yield {
            "model": result["workload"],
            "training": kind,
            "budget": format_bytes(training["budget_bytes"]) if training["way"] == "pooch" else "",
            "page faults a step": told(of_kind(samples, kind, "minor_faults"), ",.0f"),
            "time over not kept": told(ratios(samples, kind, base), ".3f", half_form=".2f") if kind != base else "1",
            "system time a step": told(of_kind(samples, kind, "system_s"), ".2f", unit=" s"),
            "highest RSS in steps": format_bytes(highest_bytes(training, len(training["steps_run"]))),
            "same losses": "yes" if training["losses"] == result["trainings"]["plain"]["losses"] else "no",
        }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    parser.add_argument("--turns", type=int, default=FEWEST_TURNS)
    parser.add_argument("--share", type=float, default=0.6, help="budget, as a share of plain training's live peak")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    names = arguments.model or MODELS
    results = earlier_results(NAME, arguments.output, names)
    for name in names:
        results.append(measure(name, arguments.turns, arguments.share))
        write_results(NAME, TITLE, rows_of(results), results, arguments.output)
    sys.stdout.write(markdown_table(rows_of(results)) + "\n")


if __name__ == "__main__":
    main()

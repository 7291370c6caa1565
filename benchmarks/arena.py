"""Training on an arena beside other allocators: highest RSS, page faults and time, plain and planned.

    python -m benchmarks.arena [--workload NAME ...] [--turns 10] [--budget 60%] [--jemalloc LIBRARY] [--drift 1000]

For each workload, plainly and under a plan, one process per allocator: glibc as it is; glibc with `mallopt` (nothing
from mmap, no trimming), the baseline that needs no C++; glibc that returns each large block at once, as under
`--hard-limit`; jemalloc, preloaded, where it is installed (`apt install libjemalloc2`) or named; Pooch's arena; and the
arena together with `mallopt`. The processes take turns, a step each, the plain and the planned one of an allocator one
after the other, so ratios of times compare like with like. Then some train under a limit on their private memory at the
arena's size. Losses are compared.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tables import Row, earlier_results, markdown_table, tell, write_results
from pooch.ground.units import format_bytes
from tests.children import child_environment

SLACK_BYTES = 32 * 2**20  # for what is no tensor: stacks, generated code, workspaces of libraries, two copy buffers
SLACK_STEP_BYTES, MOST_SLACK_STEPS = 8 * 2**20, 12  # of the search for the smallest slack that suffices
NAME, TITLE = "arena-cpu", "Training on an arena, beside other allocators"
WORKLOADS: Mapping[str, Mapping[str, int]] = {
    "resnet50": {"batch_size": 8, "image_size": 128},
    "gpt2": {"batch_size": 4, "sequence_length": 128, "layers": 4, "width": 512, "heads": 8, "vocabulary": 4000},
    "unet3d": {"batch_size": 1, "volume_size": 64},
    "lstm": {"batch_size": 32, "sequence_length": 64, "width": 256},
}
ALLOCATORS = ("glibc", "mallopt", "blocks returned", "jemalloc", "arena", "arena, mallopt")
LIMITED = ("glibc", "blocks returned", "arena, blocks returned")
WARM_STEPS = 6
Result = Mapping[str, Any]


class Process:
    """A child process under one allocator."""

    def __init__(self, job: Mapping[str, Any], preload: str | None) -> None:
        environment = child_environment()
        if preload is not None:
            environment["LD_PRELOAD"] = preload
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.arena_child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.tell(job)

    def tell(self, question: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        self.tell(question)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        answer = self._child.stdout.readline()
        if not answer:
            return {"died": self._child.wait()}
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


@contextmanager
def process(job: Mapping[str, Any], preload: str | None) -> Iterator[Process]:
    child = Process(job, preload)
    try:
        yield child
    finally:
        child.close()


def measure(jobs: Sequence[Mapping[str, Any]], turns: int, jemalloc: str | None) -> list[dict[str, Any]]:
    """Train every job under every allocator in turns, the jobs one after the other under each."""
    names = [name for name in ALLOCATORS if name != "jemalloc" or jemalloc]
    found: list[dict[str, Any]] = [{} for _ in jobs]
    with ExitStack() as stack:
        children = {}
        for name in names:
            preload = jemalloc if name == "jemalloc" else None
            for number, job in enumerate(jobs):  # one at a time: those that wait take nothing
                child = stack.enter_context(process({**job, "allocator": name}, preload))
                children[name, number] = child
                found[number][name] = {**child.answer(), "steps": []}
            tell(f"  {name}: warm")
        for turn in range(turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                for number in range(len(jobs)):
                    found[number][name]["steps"].append(children[name, number].ask({"step": turn}))
        for (name, number), child in children.items():
            found[number][name] |= child.ask({"end": True})
    return [{"allocators": each} for each in found]


def measure_limits(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train under limits at the size of the arena that these steps have, and find the slack that suffices."""
    with process({**job, "allocator": "arena"}, None) as child:
        own = child.answer()
        own |= child.ask({"end": True})
    room_bytes = own["arena"]["arena_bytes"] + own["base_live_bytes"] - own["start_live_bytes"]
    found: dict[str, Any] = {"arena_bytes": own["arena"]["arena_bytes"], "room_bytes": room_bytes}
    for name in LIMITED:
        found[name] = limited(job, name, room_bytes + SLACK_BYTES)
        if name != "glibc":
            found[name]["slack_bytes"] = smallest_slack(job, name, room_bytes, found[name]["survived"])
    return found


def smallest_slack(job: Mapping[str, Any], name: str, room_bytes: int, suffices: bool) -> int | None:
    """Bytes beyond the room with which training goes through, by bisection; None: more than were tried.

    `suffices` is known of `SLACK_BYTES`.
    """
    known = SLACK_BYTES // SLACK_STEP_BYTES
    low, high = (0, known) if suffices else (known + 1, MOST_SLACK_STEPS + 1)  # fewer than `low` are too few
    while low < high:
        middle = (low + high) // 2
        if middle <= MOST_SLACK_STEPS and not limited(job, name, room_bytes + middle * SLACK_STEP_BYTES)["survived"]:
            low = middle + 1
        else:
            high = middle
    return low * SLACK_STEP_BYTES if low <= MOST_SLACK_STEPS else None


def limited(job: Mapping[str, Any], name: str, room_bytes: int) -> dict[str, Any]:
    """Train in a process that has so much room from its first step on. An arena has to have served at the end."""
    with process({**job, "allocator": name, "room_bytes": room_bytes}, None) as child:
        outcome = child.answer()
    if "died" in outcome:
        outcome = {"survived": False, "message": f"the process died ({outcome['died']})"}
    elif outcome["survived"] and outcome["arena"] is not None and outcome["arena"]["state"] != "serving":
        outcome = {"survived": False, "message": f"it went on without the arena ({outcome['arena']['reason']})"}
    tell(f"  {name} in {format_bytes(room_bytes)}: {'survived' if outcome['survived'] else outcome['message']}")
    return outcome


def drift(job: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Train many steps on an arena, and keep the RSS of a hundred of them."""
    with process({**job, "allocator": "arena"}, None) as child:
        child.answer()
        rss, faults = [], []
        for _ in range(steps):
            step = child.ask({"step": True})
            rss.append(step["rss_bytes"])
            faults.append(step["minor_faults"])
        end = child.ask({"end": True})
    every = max(1, steps // 100)
    return {"steps": steps, "rss_bytes": rss[::every], "minor_faults": faults[::every], "arena": end["arena"]}


def plan_for(name: str, settings: Mapping[str, int], budget: str, threads: int, path: Path) -> dict[str, Any]:
    """Plan in a process of its own, for the smallest budget if none fits, and return what was predicted."""
    text = (
        "import json, sys\n"
        "from pooch.api.profiling import profile_workload\nfrom pooch.api.planning import plan\n"
        "from pooch.workloads import WorkloadFactory\nimport torch\n"
        "asked = json.load(sys.stdin)\ntorch.set_num_threads(asked['threads'])\n"
        "from pooch.errors import InfeasibleBudget\n"
        "profile = profile_workload(WorkloadFactory(asked['name'], settings=asked['settings'])())\n"
        "try:\n    made = plan(profile, asked['budget'], region='step')\n"
        "except InfeasibleBudget:\n    made = plan(profile, 'min', region='step')\n"
        "made.save(asked['path'])\n"
        "print(json.dumps({'in_core_ms': profile.step_ms, 'planned_ms': made.predicted_step_ms,\n"
        "  'in_core_peak_bytes': profile.peak_bytes, 'planned_peak_bytes': made.predicted_peak_bytes}))\n"
    )
    asked = {"name": name, "settings": settings, "budget": budget, "path": str(path), "threads": threads}
    done = subprocess.run(
        [sys.executable, "-c", text], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True,
        env=child_environment(),
    )  # fmt: skip
    predicted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return predicted


# Tables ---------------------------------------------------------------------------------------------------------------


def median(found: Mapping[str, Any], what: str) -> float:
    return statistics.median(step[what] for step in found["steps"])


def _cells(result: Result, cell: Any) -> dict[str, object]:
    row: dict[str, object] = {"workload": result["workload"], "": result["kind"]}
    return row | {name: cell(found) for name, found in result["allocators"].items()}


def memory_rows(results: Sequence[Result]) -> list[Row]:
    """Highest RSS of the measured steps over the process's own base, beside the arena's bytes."""
    rows: list[Row] = []
    for result in results:
        row = _cells(result, lambda found: format_bytes(found["highest_rss_bytes"] - found["base_rss_bytes"]))
        found = result["allocators"]["arena"]
        arena_bytes = found["arena"]["arena_bytes"]
        above = found["highest_rss_bytes"] - found["base_rss_bytes"]
        rows.append(
            row | {"arena bytes": format_bytes(arena_bytes), "arena's RSS over them": f"{above / arena_bytes:.3f}"}
        )
    return rows


def fault_rows(results: Sequence[Result]) -> list[Row]:
    """Page faults of a step (medians), and those on the arena over glibc's."""
    rows: list[Row] = []
    for result in results:
        row = _cells(result, lambda found: f"{median(found, 'minor_faults'):,.0f}")
        all_of = result["allocators"]
        share = median(all_of["arena"], "minor_faults") / max(1.0, median(all_of["glibc"], "minor_faults"))
        rows.append(row | {"arena over glibc": f"{share:.1%}"})
    return rows


def time_rows(results: Sequence[Result]) -> list[Row]:
    """Wall time of a step over that of glibc in the same turn (medians of the ratios)."""

    def row_of(result: Result) -> Row:
        base = [step["wall_ms"] for step in result["allocators"]["glibc"]["steps"]]

        def cell(found: Mapping[str, Any]) -> str:
            own = [step["wall_ms"] for step in found["steps"]]
            return f"{statistics.median(a / b for a, b in zip(own, base, strict=True)):.3f}"

        return _cells(result, cell)

    return [row_of(result) for result in results]


def served_rows(results: Sequence[Result]) -> list[Row]:
    """The arena: its bytes over the bound, and what became of the requests."""
    rows: list[Row] = []
    for result in results:
        stats, warm = result["allocators"]["arena"]["arena"], result["allocators"]["arena"]
        counters = stats["counters"]
        fallbacks = counters["unrecognised"] + counters["collided"] + counters["beyond"]
        asked = counters["placed"] + fallbacks
        losses = {tuple(step["loss"] for step in found["steps"]) for found in result["allocators"].values()}
        rows.append(
            {
                "workload": result["workload"],
                "": result["kind"],
                "arena": format_bytes(stats["arena_bytes"]),
                "over the bound": f"{stats['arena_bytes'] / stats['bound_bytes']:.4f}",
                "blocks": stats["blocks"],
                "outlive a step": stats["unplaced_blocks"],
                "steps": counters["steps"],
                "at their place": f"{counters['placed'] / asked:.3%}",
                "fallbacks": fallbacks,
                "same losses": "yes" if len(losses) == 1 else "no",
                "highest RSS of the first steps": format_bytes(warm["warm_highest_rss_bytes"] - warm["base_rss_bytes"]),
            }
        )
    return rows


def predicted_rows(results: Sequence[Result]) -> list[Row]:
    """Error of the predicted times of the forward and backward pass, by allocator."""

    def row_of(result: Result) -> Row:
        expected = result["predicted"]["in_core_ms" if result["kind"] == "plain" else "planned_ms"]
        return _cells(result, lambda found: f"{expected / median(found, 'forward_backward_ms') - 1:+.1%}")

    return [row_of(result) for result in results]


def slowdown_rows(results: Sequence[Result]) -> list[Row]:
    """How much longer planned steps took than plain ones of the same turn, as predicted and by allocator.

    Only of results whose plain and planned steps took turns.
    """
    plain = {result["workload"]: result for result in results if result["kind"] == "plain"}
    rows: list[Row] = []
    for result in results:
        base = plain.get(result["workload"])
        if base is None or base is result or not (result.get("in turns") and base.get("in turns")):
            continue
        predicted = result["predicted"]["planned_ms"] / result["predicted"]["in_core_ms"]
        row: dict[str, object] = {"workload": result["workload"], "": result["kind"], "predicted": f"{predicted:.3f}"}
        for name in ("glibc", "mallopt", "arena", "arena, mallopt"):
            ratios = _ratios(result["allocators"][name], base["allocators"][name])
            middle = statistics.median(ratios)
            row |= {
                name: f"{middle:.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"predicted over {name}": f"{predicted / middle - 1:+.1%}",
            }
        rows.append(row)
    return rows


def _ratios(planned: Mapping[str, Any], plain: Mapping[str, Any]) -> list[float]:
    pairs = zip(planned["steps"], plain["steps"], strict=True)
    return [one["forward_backward_ms"] / other["forward_backward_ms"] for one, other in pairs]


def limited_rows(results: Sequence[Result]) -> list[Row]:
    """How training ended under a limit at the arena's size, and the smallest slack with which it goes through."""

    def slack(found: Mapping[str, Any]) -> str:
        if "slack_bytes" not in found:
            return "not measured"
        return "more" if found["slack_bytes"] is None else f"{found['slack_bytes'] // 2**20} MiB"

    return [
        {"workload": result["workload"], "": result["kind"]}
        | {name: "survived" if result["limited"][name]["survived"] else "died" for name in LIMITED}
        | {f"slack that suffices, {name}": slack(result["limited"][name]) for name in LIMITED if name != "glibc"}
        for result in results
        if "limited" in result
    ]


def drift_rows(results: Sequence[Result]) -> list[Row]:
    """RSS over many steps on the arena."""
    rows: list[Row] = []
    for result in results:
        found = result.get("drift")
        if found:
            rss, counters = found["rss_bytes"], found["arena"]["counters"]
            fallbacks = counters["unrecognised"] + counters["collided"] + counters["beyond"]
            rows.append(
                {
                    "workload": result["workload"],
                    "": result["kind"],
                    "steps": found["steps"],
                    "RSS at first": format_bytes(rss[0]),
                    "at the end": format_bytes(rss[-1]),
                    "highest": format_bytes(max(rss)),
                    "requests": f"{counters['placed'] + fallbacks:,}",
                    "fallbacks": fallbacks,
                }
            )
    return rows


def more_of(results: Sequence[Result]) -> dict[str, list[Row]]:
    """All further tables."""
    found = {
        "Page faults of a step": fault_rows(results),
        "Wall time of a step over that under glibc": time_rows(results),
        "What the arena served": served_rows(results),
        "Error of the predicted time": predicted_rows(results),
        "Under a limit at the arena's size": limited_rows(results),
        "Many steps": drift_rows(results),
        "Planned steps over plain ones": slowdown_rows(results),
    }
    return {heading: rows for heading, rows in found.items() if rows}


def limits_alone(chosen: Sequence[str], budget: str, threads: int, folder: Path) -> None:
    """Measure the limits of stored results again, and write them."""
    results = earlier_results(NAME, folder, ())
    for name in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "plan.json"
            plan_for(name, WORKLOADS[name], budget, threads, path)
            for result in results:
                if result["workload"] == name:
                    tell(f"{name}, {result['kind']}")
                    job = {
                        "workload": name, "settings": WORKLOADS[name], "plan": str(path) if result["plan"] else None,
                        "warm_steps": WARM_STEPS, "threads": threads,
                    }  # fmt: skip
                    result["limited"] = measure_limits(job)
    write_results(NAME, TITLE, memory_rows(results), results, folder, more_of(results))


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each process")
    parser.add_argument("--jemalloc", default=ctypes.util.find_library("jemalloc"))
    parser.add_argument("--drift", type=int, default=1000, help="steps of the smallest workload on the arena; 0: none")
    parser.add_argument("--no-limits", action="store_true", help="no limits")
    parser.add_argument("--limits", action="store_true", help="only the limits; all else stays as it was measured")
    parser.add_argument("-o", "--folder", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args()
    chosen = given.workload or list(WORKLOADS)
    if given.limits:
        limits_alone(chosen, given.budget, given.threads, given.folder)
        return
    results = earlier_results(NAME, given.folder, chosen)
    for name in chosen:
        settings = WORKLOADS[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            tell(f"{name}: planning")
            predicted = plan_for(name, settings, given.budget, given.threads, path)
            share = predicted["planned_peak_bytes"] / predicted["in_core_peak_bytes"]
            job = {"workload": name, "settings": settings, "warm_steps": WARM_STEPS, "threads": given.threads}
            kinds = {"plain": None, f"planned at {share:.0%}": str(path)}
            jobs = [{**job, "plan": plan} for plan in kinds.values()]
            tell(name)
            measured = measure(jobs, given.turns, given.jemalloc)
            for (kind, plan), job, found in zip(kinds.items(), jobs, measured, strict=True):
                result = {**job, "kind": kind, "predicted": predicted, "in turns": True, **found}
                if not given.no_limits:
                    tell(f"{name}, {kind}: limits")
                    result["limited"] = measure_limits(job)
                if given.drift and name == "lstm" and plan is None:
                    result["drift"] = drift(
                        {**job, "settings": {"batch_size": 4, "sequence_length": 16, "width": 64}}, given.drift
                    )
                results.append({**result, "plan": plan is not None})
        results.sort(key=lambda result: list(WORKLOADS).index(result["workload"]))
        write_results(NAME, TITLE, memory_rows(results), results, given.folder, more_of(results))
        print(markdown_table(memory_rows([each for each in results if each["workload"] == name])))


if __name__ == "__main__":
    main()

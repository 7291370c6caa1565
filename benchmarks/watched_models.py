"""What training under Pooch costs in time for models of many small ops, beside plain training.

    python -m benchmarks.watched_models [--models rwkv,maxvit] [--share 0.6] [--steps 60] [--turns 12] [--threads 1]
                                        [--output benchmarks/results]

Each model is measured in a process of its own, and trains plainly in another one, in which nothing of Pooch's is in
place; their steps take turns. First `pooch.auto` trains it under a share of its in-core peak: every step is compared
with the plain one on the same batch, in time and bit by bit. Then the step of the largest batch is profiled, planned at
the same share, and trained under the plan. A step of the same process while its plan pauses takes a turn as well: it
shows what a plan costs where it does nothing. A timed step is a forward and a backward pass; the optimizer steps after
it. What plans and measures beside training runs on the same cores, so it counts in wall times, and not in CPU times.
Several threads that compute wait for one another, so where other programs run as well, one thread gives ratios that can
be repeated. A model whose package is missing is listed as such.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pooch
from benchmarks.main_job import CHOICES, plan_or_smallest
from benchmarks.tables import markdown_table, tell, write_results
from benchmarks.watched_nets import LARGEST, NETS, Net
from benchmarks.watched_rows import ENOUGH, auto_rows, on_plan, plan_rows, tables
from pooch.api.measure.training import digest, first_difference, forward_and_backward, train_steps
from pooch.api.profiling import profile_workload
from pooch.errors import PoochError
from pooch.executor import Run, apply_plan
from pooch.ground.messages import LOGGER
from pooch.ir import Plan
from pooch.torchtools.cpu_allocator.tracing import thread_traces
from pooch.torchtools.watch import LIBRARY
from pooch.workloads import Workload

NAME, TITLE = "watched-models-cpu", "Models of many small ops under Pooch, beside plain training"
COMPARED_STEPS = 2  # under a plan, bit by bit
CLOCKS = {"wall_ms": time.perf_counter, "cpu_ms": time.process_time, "thread_ms": time.thread_time}
OF_SUMMARY = (
    "budget_bytes", "peak_bytes", "steps_over_budget", "steps", "steps_on_plan", "steps_in_core", "steps_left_plan",
    "ms_on_plan", "plain_ms_on_plan", "predicted_ms_on_plan", "swapped_bytes", "recomputed_ops", "planning_s",
)  # fmt: skip
LONGEST_FACTOR = 4  # how many times the asked number of steps are trained at most, until enough were on plan


class _Training:
    """A model that trains on the batches of a net."""

    def __init__(self, net: Net) -> None:
        self._trainee = net.build()
        self.model = self._trainee.workload.model

    def step(self, number: int, batch: int, run: Run | None = None, *, is_trained: bool = True) -> dict[str, Any]:
        """Time a forward and a backward pass, and let the optimizer step.

        Args:
            number: random numbers are drawn from it.
            batch: number of the batch.
            run: the plan that is applied. None: the step needs no region.
            is_trained: whether the optimizer steps.

        Returns:
            Times, and digests of the loss and the gradients.
        """
        workload = self._trainee.workload
        if self._trainee.draw is not None:
            self._trainee.draw(batch)
        torch.manual_seed(number)
        begins = [clock() for clock in CLOCKS.values()]
        loss = forward_and_backward(workload, run)
        ends = [clock() for clock in CLOCKS.values()]
        times = {name: (end - begin) * 1000 for name, begin, end in zip(CLOCKS, begins, ends, strict=True)}
        computed = [digest(loss)] + [digest(each.grad) for each in self.model.parameters() if each.grad is not None]
        if is_trained and workload.optimizer is not None:
            workload.optimizer.step()
        workload.model.zero_grad(set_to_none=True)
        return {**times, "computed": computed}


_TWIN: list[_Training] = []  # in the process that trains plainly


def _begin_twin(net: Net, threads: int) -> None:
    torch.set_num_threads(threads)
    _TWIN[:] = [_Training(net)]
    _TWIN[0].step(0, LARGEST)


def _twin_step(number: int, batch: int) -> dict[str, Any]:
    return _TWIN[0].step(number, batch)


class _Pair:
    """A model that trains in this process, and its twin that trains plainly in another one.

    Both train one step before, so that no step that counts sets up kernels or the optimizer's state.
    """

    def __init__(self, net: Net) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, _begin_twin, (net, torch.get_num_threads()))
        self.here = _Training(net)
        self.here.step(0, LARGEST)
        gc.collect()

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    def plain(self, number: int, batch: int) -> dict[str, Any]:
        """A step of the twin."""
        return self._pool.submit(_twin_step, number, batch).result()


def _turn(number: int, ways: Mapping[str, Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """One step in each way, the order of which changes with every turn; the others are compared with plain ones."""
    names = list(ways)
    first = number % len(names)
    found = {kind: ways[kind]() for kind in names[first:] + names[:first]}
    computed = {kind: sample.pop("computed") for kind, sample in found.items()}
    for kind, sample in found.items():
        sample["same_bits"] = kind == "paused" or computed[kind] == computed["plain"]
    return [{"turn": number, "kind": kind, **sample} for kind, sample in found.items()]


def under_auto(net: Net, plain_peak_bytes: int, share: float, steps: int) -> dict[str, Any]:
    """Train under `pooch.auto` and plainly, in turns."""
    samples: list[dict[str, Any]] = []
    with _Pair(net) as pair, pooch.auto(pair.here.model, int(share * plain_peak_bytes)) as auto:
        for number in range(1, LONGEST_FACTOR * steps + 1):
            ways = {
                "plain": partial(pair.plain, number, number),
                "auto": partial(_governed_step, pair.here, number, auto),
            }
            samples += _turn(number, ways)
            has_plans = auto.is_planning or bool(auto.plans)
            if number >= steps and (len(on_plan(samples)) >= ENOUGH or not has_plans):
                break
        summary = auto.summary(verbose=True)
        hooks = [asdict(profile.hooks) for _, profile, _ in auto.planned]
    return {
        **{name: getattr(summary, name) for name in OF_SUMMARY},
        "hooks": hooks[:1],
        "summary": str(summary),
        "samples": samples,
    }


def _governed_step(training: _Training, number: int, auto: pooch.Auto) -> dict[str, Any]:
    found, status = training.step(number, number), auto.status()
    return {**found, "mode": status.mode, "predicted": status.slowdown, "peak_mib": status.peak_mib}


def under_plan(net: Net, share: float, turns: int) -> dict[str, Any]:
    """Profile the largest step, plan it, and train under the plan and plainly, in turns."""

    def built() -> Workload:
        return net.build().workload

    profile = profile_workload(built(), progress=tell)
    called, chosen = plan_or_smallest(profile, f"{100 * share:g}%")
    gc.collect()
    plain, planned = (train_steps(built(), each, COMPARED_STEPS, tell) for each in (None, chosen))
    gc.collect()
    decided = list(chosen.decisions.values())
    assert planned.stats is not None
    return {
        "budget": called,
        "budget_bytes": chosen.budget_bytes,
        "predicted_slowdown": chosen.predicted_step_ms / chosen.in_core_step_ms,
        "predicted_peak_bytes": chosen.predicted_peak_bytes,
        "peak_bytes": planned.peak_bytes,
        "first_difference": first_difference(plain, planned),
        "steps_off_plan": sum(step.left_plan for step in planned.steps),
        "ops": profile.forward_ops,
        "profiled_step_ms": profile.step_ms,
        "hooks": asdict(profile.hooks),
        "status": chosen.status,
        "gap": chosen.gap,
        "decisions": {choice: decided.count(choice) for choice in CHOICES},
        "swapped_bytes": planned.stats.swapped_out_bytes,
        "recomputed_ops": planned.stats.recomputed_ops,
        "samples": _planned_samples(net, chosen, turns),
    }


def _planned_samples(net: Net, chosen: Plan, turns: int) -> list[dict[str, Any]]:
    """Plain steps, steps while the plan pauses, and planned ones, after a turn that warms up."""
    samples: list[dict[str, Any]] = []
    with _Pair(net) as pair, apply_plan(chosen, pair.here.model, measure_every=None) as run:

        def paused(number: int) -> dict[str, Any]:
            with run.paused():
                return pair.here.step(number, LARGEST, is_trained=False)

        for number in range(turns + 1):
            ways = {
                "plain": partial(pair.plain, number, LARGEST),
                "planned": partial(pair.here.step, number, LARGEST, run),
                "paused": partial(paused, number),
            }
            samples += _turn(number, ways)
    return samples


def measure(net: Net, share: float, steps: int, turns: int) -> dict[str, Any]:
    """Measure one model in this process; what is refused is told in its place.

    What Pooch compiles at its first use on a machine is compiled before anything is timed.
    """
    LIBRARY.get()
    thread_traces()
    found: dict[str, Any] = {"model": net.name, "shows": net.shows}
    with _messages() as lines:
        found["plain_peak_bytes"] = peak_bytes = train_steps(
            net.build().workload, None, COMPARED_STEPS, tell
        ).peak_bytes
        gc.collect()
        found["auto"] = _or_error(lambda: under_auto(net, peak_bytes, share, steps))
        gc.collect()
        found["plan"] = _or_error(lambda: under_plan(net, share, turns))
    return {**found, "messages": list(dict.fromkeys(lines))}


def _or_error(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return part()
    except (PoochError, RuntimeError) as error:
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


class _Lines(logging.Handler):
    """Collects the lines that Pooch tells, and shows them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        self.lines.append(f"{record.levelname.lower()}: {record.getMessage()}")
        tell(self.lines[-1])


@contextmanager
def _messages() -> Iterator[list[str]]:
    handler = _Lines()
    LOGGER.addHandler(handler)
    try:
        yield handler.lines
    finally:
        LOGGER.removeHandler(handler)


def in_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one model in a process of its own."""
    net = NETS[name]
    if net.needs and importlib.util.find_spec(net.needs) is None:
        return {"model": name, "failed": f"not installed: {net.needs}"}
    tell(name)
    command = [sys.executable, "-m", "benchmarks.watched_models", "--child", name]
    command += [f"--{what}={getattr(arguments, what)}" for what in ("share", "steps", "turns", "threads")]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"model": name, "failed": f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure what was asked for, print the tables, and write the results after each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NETS), help="names, with commas between them")
    parser.add_argument("--share", type=float, default=0.6, help="of the in-core peak")
    parser.add_argument("--steps", type=int, default=60, help="under `pooch.auto`, and more until enough are on plan")
    parser.add_argument("--turns", type=int, default=12, help="timed pairs of a plain and a planned step")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--child", choices=NETS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        found = measure(NETS[arguments.child], arguments.share, arguments.steps, arguments.turns)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    names = arguments.models.split(",")
    if unknown := [name for name in names if name not in NETS]:
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(NETS)}")
    results = []
    for name in names:
        results.append(in_child(name, arguments))
        write_results(NAME, TITLE, auto_rows(results), results, arguments.output, tables(results))
    for rows in (auto_rows(results), plan_rows(results)):
        sys.stdout.write(markdown_table(rows) + "\n\n")


if __name__ == "__main__":
    main()

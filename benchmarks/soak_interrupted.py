"""Five thousand steps of random lengths that are interrupted, that fail, and that are resumed, under `pooch.auto`.

    python -m benchmarks.soak --interrupted [--steps 5000] [--output FOLDER] [--picture docs/soak_interrupted.png]

Every twentieth step is followed by an evaluation, every fiftieth by a checkpoint in a file. Some steps raise an error
of their own, in the forward or in the backward pass, and are left out. Ctrl-C comes at random times, wherever the
program or Pooch is, and training goes on from the last checkpoint. The same steps run without Pooch and without
interrupts, in a process of its own: losses, evaluations, parameters, optimizer state and random state of both have to
be the same. Live bytes are counted below PyTorch. Exit code 1 if a bit differs, if the budget is passed and nothing
says so, or if something grows over the last half of the steps.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import pooch
from benchmarks.setups.counting import LiveBytes, preloading
from benchmarks.soak_ragged import SETTINGS, trend
from benchmarks.tables import Row, markdown_table, write_results
from pooch.autopilot import shapes
from pooch.autopilot.autopilot import Auto
from pooch.ir.files import replace_file

NAME = "soak-interrupted-cpu"
SAMPLES = 100
SHARE = 0.5  # of the peak of plain training
_WIDTH, _LAYERS, _LONGEST, _MOST, _OFTEN = 16, 2, 64, 8, 24
_MOST_SHAPES = 64  # that are remembered, rather than 1024: the limit is to be reached long before the last half
_EVALUATED_EVERY, _KEPT_EVERY, _FAILS_FORWARD_EVERY, _FAILS_BACKWARD_EVERY = 20, 50, 37, 41
_STEPS_TO_AN_INTERRUPT = 150  # at the most, at the time that a step took so far
# By how much a figure may grow over the last half of the steps, if it does not go up and down by more.
_ALLOWED = {"process_bytes": 4 * 2**20, "live_bytes": 2**16, "blocks": 5000, "threads": 1, "descriptors": 2, "files": 2}


@dataclass(frozen=True, slots=True)
class InterruptedSample:
    """What the process holds after some steps.

    Attributes:
        steps: Number of steps that are done for good.
        process_bytes: Resident memory.
        live_bytes: Of tensors, counted below PyTorch.
        peak_bytes: The highest of them since the last sample.
        blocks: Of the interpreter's memory, as a count of its objects.
        threads: Of the process, those of C++ included.
        descriptors: Number of open file descriptors.
        files: In the folder for temporary files.
        children: Number of child processes.
        shapes: Kinds of steps that are remembered.
        plans: Those of them that have a plan.
        step_ms: Median time of a step since the last sample.
    """

    steps: int
    process_bytes: int
    live_bytes: int
    peak_bytes: int
    blocks: int
    threads: int
    descriptors: int
    files: int
    children: int
    shapes: int
    plans: int
    step_ms: float


@dataclass
class Soaked:
    """What came of a training.

    Attributes:
        samples: Of the process.
        losses: Of the steps, and then of the evaluations after them. NaN: the step raised.
        digest: Of parameters, optimizer state and random state in the end.
        interrupts: How often Ctrl-C came.
        repeated: Number of steps that were done again after that.
        over: Steps in which the budget was passed, with the bytes by which.
        counted_over: How many steps Pooch says have passed the budget, between the passes included.
        told: What Pooch said, apart from plans.
        summary: What it says in the end.
    """

    samples: list[InterruptedSample] = field(default_factory=list)
    losses: array[float] = field(default_factory=lambda: array("d"))
    digest: str = ""
    interrupts: int = 0
    repeated: int = 0
    over: dict[int, int] = field(default_factory=dict)
    counted_over: int = 0
    told: list[str] = field(default_factory=list)
    summary: str = ""


class _OfItsOwn(Exception):
    """Raised by a step that fails."""


class _Net(nn.Module):
    """A small encoder; `fails` makes its next forward or backward pass raise."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 2, 4 * _WIDTH, 0.1, batch_first=True) for _ in range(_LAYERS)
        )
        self.out = nn.Linear(_WIDTH, 1)
        self.fails = ""

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.into(inputs)
        for number, block in enumerate(self.blocks):
            values = block(values)
            if number == 1 and self.fails == "forward":
                raise _OfItsOwn
            if number == 1 and self.fails == "backward":
                values.register_hook(_fail)
        result: Tensor = self.out(values).square().mean()
        return result


def _fail(gradient: Tensor) -> None:
    raise _OfItsOwn


class _Training:
    """The program that is trained, which knows nothing of Pooch."""

    def __init__(self, folder: Path, steps: int) -> None:
        torch.manual_seed(0)
        self.model = _Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.done, self._steps = 0, steps
        self.losses = array("d", bytes(16 * (steps + 1)))  # all of it now: what is added later would be growth
        draws = random.Random(0)
        self._often = [(draws.randrange(1, _MOST), draws.randrange(8, _LONGEST)) for _ in range(_OFTEN)]
        self._checkpoint = folder / "checkpoint.pt"
        self.keep()

    def _inputs(self, number: int) -> Tensor:
        draws = random.Random(number)
        rare = (draws.randrange(1, _MOST), draws.randrange(8, _LONGEST))
        return torch.randn(*(draws.choice(self._often) if draws.random() < 0.5 else rare), 8)

    def step(self) -> None:
        number = self.done + 1
        is_failing = {"forward": number % _FAILS_FORWARD_EVERY == 0, "backward": number % _FAILS_BACKWARD_EVERY == 0}
        self.model.fails = next((kind for kind, is_it in is_failing.items() if is_it), "")
        try:
            loss = self.model(self._inputs(number))
            loss.backward()
            self.optimizer.step()
            self.losses[number] = loss.item()
        except _OfItsOwn:
            self.losses[number] = float("nan")
        self.optimizer.zero_grad()
        if number % _EVALUATED_EVERY == 0:
            self._evaluate(number)
        self.done = number
        if number % _KEPT_EVERY == 0:
            self.keep()

    def _evaluate(self, number: int) -> None:
        self.model.fails = ""
        self.model.eval()
        with torch.no_grad():
            self.losses[self._steps + 1 + number] = self.model(self._inputs(-number)).item()
        self.model.train()

    def keep(self) -> None:
        """Write a checkpoint."""
        kept = io.BytesIO()
        torch.save(self._state(), kept)
        replace_file(self._checkpoint, kept.getvalue())

    def _state(self) -> dict[str, Any]:
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"done": self.done, "model": model, "optimizer": optimizer, "random": torch.get_rng_state()}

    def resume(self) -> None:
        """Go on from the last checkpoint."""
        state = torch.load(self._checkpoint)
        self.optimizer.zero_grad()
        self.model.train()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.done = state["done"]

    def digest(self) -> str:
        """Of the state in the end."""
        kept = io.BytesIO()
        torch.save([value.clone() for value in _tensors_of(self._state())], kept)
        return hashlib.sha256(kept.getvalue()).hexdigest()


def _tensors_of(state: object) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, list) else ()
    return [tensor for each in inner for tensor in _tensors_of(each)]


def soak(steps: int, every: int, budget_bytes: int | None, interrupted: bool) -> Soaked:
    """Train, and look at the process every so many steps. The process has to be started with `preloading`.

    Args:
        steps: How many.
        every: How many of them there are between two samples.
        budget_bytes: None for plain training.
        interrupted: Whether Ctrl-C comes.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as checkpoints, tempfile.TemporaryDirectory() as temporary:
        tempfile.tempdir = temporary
        os.environ["TMPDIR"] = temporary
        try:
            return _Soak(steps, every, budget_bytes, interrupted, Path(checkpoints), Path(temporary)).run()
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]


class _Soak:
    """One training and what is seen of it; arguments as of `soak`."""

    def __init__(
        self, steps: int, every: int, budget_bytes: int | None, interrupted: bool, checkpoints: Path, temporary: Path
    ) -> None:
        self._steps, self._every, self._budget_bytes, self._temporary = steps, every, budget_bytes, temporary
        self._counter, self._soaked, self._draws = LiveBytes(), Soaked(), random.Random(1)
        self._times_ms: list[float] = []
        self._peak_bytes, self._mean_s, self._interrupted = 0, 0.01, interrupted
        self._training = _Training(checkpoints, steps)
        self._told: list[str] = []
        self._auto: Auto | None = None
        shapes.MOST_SHAPES = _MOST_SHAPES
        if budget_bytes is not None:
            self._auto = pooch.auto(
                self._training.model, budget_bytes, self._training.optimizer, tell=self._told.append
            )

    def run(self) -> Soaked:
        training, found = self._training, self._soaked
        handlers = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGALRM, signal.SIGINT)}
        self._counter.begin_peak()
        try:
            while training.done < self._steps:
                done = training.done
                with suppress(KeyboardInterrupt):
                    self._some_steps()
                    continue
                found.interrupts += 1
                reached = training.done
                training.resume()
                found.repeated += max(reached - training.done, 0) + (reached == done)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._auto is not None:
            self._auto.remove()
            summary = self._auto.summary()
            found.summary, found.counted_over = str(summary), summary.steps_over_budget
            found.told = [line for line in self._told if not line.startswith("planned for")]
        found.losses, found.digest = training.losses, training.digest()
        return found

    def _some_steps(self) -> None:
        """Train until the next sample, or Ctrl-C. Looking at the process is not interrupted."""
        training, end = self._training, self._training.done - self._training.done % self._every + self._every
        try:
            while training.done < min(end, self._steps):
                if self._interrupted and not any(signal.getitimer(signal.ITIMER_REAL)):
                    delay_s = self._draws.uniform(0, _STEPS_TO_AN_INTERRUPT * self._mean_s)
                    signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-4))
                begin_s = time.perf_counter()
                training.step()
                self._ended(time.perf_counter() - begin_s)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if training.done > max((sample.steps for sample in self._soaked.samples), default=0):
            self._look()

    def _ended(self, step_s: float) -> None:
        self._times_ms.append(1000 * step_s)
        self._mean_s += 0.05 * (step_s - self._mean_s)
        peak_bytes = self._counter.peak_bytes
        self._counter.begin_peak()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if self._budget_bytes is not None and peak_bytes > self._budget_bytes:
            self._soaked.over[self._training.done] = peak_bytes - self._budget_bytes

    def _look(self) -> None:
        gc.collect()
        process, times_ms = psutil.Process(), sorted(self._times_ms) or [0.0]
        kinds = [] if self._auto is None else self._auto._driver.library.shapes()
        sample = InterruptedSample(
            self._training.done,
            process.memory_info().rss,
            self._counter.live_bytes,
            self._peak_bytes,
            sys.getallocatedblocks(),
            process.num_threads(),
            len(list(Path("/proc/self/fd").iterdir())),
            sum(1 for _ in self._temporary.rglob("*")),
            len(process.children()),
            len(kinds),
            sum(kind.predicted_peak_bytes is not None for kind in kinds),
            times_ms[len(times_ms) // 2],
        )
        self._soaked.samples.append(sample)
        self._times_ms, self._peak_bytes = [], 0


def grown(samples: Sequence[InterruptedSample]) -> list[str]:
    """What grew over the last half of the steps, by more than it goes up and down."""
    trends = {name: trend(samples, name) for name in _ALLOWED}
    return [
        f"{name} grew by {seen.growth:.0f}, where it goes up and down by {seen.spread:.0f}"
        for name, seen in trends.items()
        if seen.growth > max(_ALLOWED[name], seen.spread)
    ]


def wrong(plain: Soaked, governed: Soaked) -> list[str]:
    """What is not as it has to be, growth apart."""
    found = [] if plain.losses.tobytes() == governed.losses.tobytes() else ["losses differ"]
    if plain.digest != governed.digest:
        found.append("the state in the end differs")
    if governed.over and not governed.counted_over:
        found.append(f"the budget was passed in {len(governed.over)} steps, and nothing said so")
    return found


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table: every tenth of a hundred samples."""
    chosen = results[max(1, len(results) // 10) - 1 :: max(1, len(results) // 10)]
    return [
        {
            "steps": result["steps"],
            "kinds remembered": result["shapes"],
            "plans": result["plans"],
            "process": f"{result['process_bytes'] / 2**20:.1f} MiB",
            "plain process": f"{result['plain_process_bytes'] / 2**20:.1f} MiB",
            "peak of tensors": f"{result['peak_bytes'] / 2**20:.2f} MiB",
            "plain peak": f"{result['plain_peak_bytes'] / 2**20:.2f} MiB",
            "Python's blocks": result["blocks"],
            "threads": result["threads"],
            "file descriptors": result["descriptors"],
            "temporary files": result["files"],
            "step": f"{result['step_ms']:.1f} ms",
        }
        for result in chosen
    ]


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the stored samples, one curve above the other."""
    from matplotlib.figure import Figure

    steps = [result["steps"] for result in results]
    curves: dict[str, dict[str, list[float]]] = {
        "process (MiB)": {
            "under pooch.auto": [result["process_bytes"] / 2**20 for result in results],
            "plain training": [result["plain_process_bytes"] / 2**20 for result in results],
        },
        "tensors (MiB)": {
            "peak": [result["peak_bytes"] / 2**20 for result in results],
            "peak of plain training": [result["plain_peak_bytes"] / 2**20 for result in results],
            "budget": [result["budget_bytes"] / 2**20 for result in results],
        },
        "count": {
            "threads": [result["threads"] for result in results],
            "file descriptors": [result["descriptors"] for result in results],
            "temporary files": [result["files"] for result in results],
        },
        "thousands": {"Python's blocks": [result["blocks"] / 1000 for result in results]},
        "kinds": {
            "kinds remembered": [result["shapes"] for result in results],
            "plans": [result["plans"] for result in results],
        },
        "ms": {
            "a step": [result["step_ms"] for result in results],
            "a plain step": [result["plain_step_ms"] for result in results],
        },
    }
    figure = Figure(figsize=(7, 10), layout="constrained")
    axes = figure.subplots(len(curves), 1, sharex=True)
    for axis, (unit, lines) in zip(axes, curves.items(), strict=True):
        for name, values in lines.items():
            axis.plot(steps, values, label=name)
        axis.set_ylabel(unit)
        axis.set_ylim(0, None)
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("training steps, with evaluations, checkpoints, failures and interrupts")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100)
    replace_file(path, drawn.getvalue())


def both(steps: int, every: int, share: float = SHARE) -> tuple[Soaked, Soaked, int]:
    """Train plainly, and under a budget with interrupts, in processes of their own; returns the budget as well."""
    os.environ.update(preloading({**os.environ, **SETTINGS}))  # of the processes that are started from here on
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        plain = pool.submit(soak, steps, every, None, False).result()
        budget_bytes = int(share * max(sample.peak_bytes for sample in plain.samples))
        governed = pool.submit(soak, steps, every, budget_bytes, True).result()
    return plain, governed, budget_bytes


def run(steps: int, output: Path, picture: Path | None) -> int:
    """Train, print, write; returns 1 if something is not as it has to be.

    Args:
        steps: How many.
        output: Folder of the results.
        picture: Where the stored samples are drawn, or None.
    """
    begin_s = time.monotonic()
    plain, governed, budget_bytes = both(steps, max(1, steps // SAMPLES))
    results = [
        {
            **asdict(sample),
            "budget_bytes": budget_bytes,
            **{f"plain_{name}": getattr(other, name) for name in ("process_bytes", "peak_bytes", "step_ms")},
        }
        for sample, other in zip(governed.samples, plain.samples, strict=True)
    ]
    failed = sum(map(math.isnan, governed.losses))
    bad = [*wrong(plain, governed), *grown(governed.samples)]
    told = f"{len(governed.over)} of its steps passed the budget, as told" if governed.over else "the budget was held"
    text = "; ".join(bad) or f"the bits of plain training, {told}, and nothing grew over the last half"
    title = (
        f"{steps} steps of random lengths under pooch.auto, {failed} that failed, {governed.interrupts} interrupts and "
        f"{governed.repeated} steps repeated after them: {text}"
    )
    rows = rows_of(results)
    write_results(NAME, title, rows, results, output)
    if picture is not None:
        draw(json.loads((output / f"{NAME}.json").read_text())["results"], picture)
    said = "\n".join(governed.told)
    sys.stdout.write(f"{governed.summary}\n{said}\n\n{markdown_table(rows)}\n\n{title}\n")
    sys.stdout.write(
        f"passed by {governed.over}\n{threading.active_count()} threads; {time.monotonic() - begin_s:.0f} s\n"
    )
    return int(bool(bad))

"""A thousand training steps of random lengths under `pooch.auto`, beside the same steps without it.

    python -m benchmarks.random_lengths [--steps 1000] [--share 0.7]

The plain run comes first; its peak, as the counting allocator sees it, gives the budget. The second run trains the same
model on the same data under that budget. The last step is of a smaller batch. Times are the process's CPU time (the
planning process is not in it) and the wall clock's. Both runs are split into parts, so that warming up can be told from
what comes after. A change of shape costs what the training thread spends on deciding how to run the first step of a
length, and what this step takes beyond later ones of its length that run in the same way. At the end, the most frequent
lengths that have a plan are trained under plans made for them alone, by the full search.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import pooch
from benchmarks.samples import told
from benchmarks.tables import Row, tell, write_results
from pooch.ground.units import format_bytes
from pooch.ir import Plan
from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator
from pooch.torchtools.memory_trace import live_bytes

NAME, TITLE = "random-lengths", "Random lengths under one budget"
PARTS = 10
TURNS = 11
_STEPS_A_TURN = 4  # in the first three of a new budget, `auto` walks over all objects
COMPARED_LENGTHS = 4
_WIDTH, _HEADS, _LAYERS, _WORDS, _BATCH = 192, 4, 4, 1000, 4
_SHORTEST, _LONGEST = 32, 256
_CPU = torch.device("cpu")


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mixed, self.joined = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.mixed(self.before(x)).view(batch, length, 3, _HEADS, width // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2)) * (width // _HEADS) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -1e9).softmax(-1) @ value
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(_WORDS, _WIDTH), nn.LayerNorm(_WIDTH)
        self.blocks = nn.Sequential(*[_Block() for _ in range(_LAYERS)])
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.words(tokens))))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step as it was trained."""

    length: int
    wall_ms: float
    cpu_ms: float
    thread_ms: float
    loss: float

    def raw(self) -> list[float]:
        """What is stored of it."""
        return [self.length, self.wall_ms, self.cpu_ms, self.thread_ms]


class _Decisions:
    """How each step under a budget is run, and the time that deciding it takes in the training thread."""

    def __init__(self, auto: pooch.Auto) -> None:
        self.taken: list[tuple[str, float, float]] = []
        self._driver = driver = auto._driver
        self._begin = driver._begin
        driver._begin = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: Any) -> None:
        begin_s, thread_s = time.perf_counter(), time.thread_time()
        self._begin(*arguments)
        spans_s = (time.perf_counter() - begin_s, time.thread_time() - thread_s)
        assert self._driver._running is not None
        self.taken.append((self._driver._running.decision, *(span_s * 1000 for span_s in spans_s)))


class _Training:
    """The model, its optimizer and its steps."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.model = _Language()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        draw = random.Random(0)
        self.sizes = [(_BATCH, draw.randint(_SHORTEST, _LONGEST)) for _ in range(steps - 1)] + [(_BATCH // 2, 100)]

    def run(self) -> list[_Step]:
        """Train all steps."""
        return [self.step(batch, length) for batch, length in self.sizes]

    def step(
        self, batch: int, length: int, region: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> _Step:
        """Train one step on new data, model and loss inside of `region`."""
        tokens = torch.randint(0, _WORDS, (batch, length))
        wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        with region():
            loss = functional.cross_entropy(self.model(tokens)[:, :-1].reshape(-1, _WORDS), tokens[:, 1:].reshape(-1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        spans_s = (time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - thread)
        ms = (span_s * 1000 for span_s in spans_s)
        return _Step(length, *ms, loss.item())

    def parameters(self) -> list[torch.Tensor]:
        """Copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@contextmanager
def _counting() -> Iterator[CountingAllocator]:
    allocator = counting_allocator()
    if isinstance(allocator, str) or not allocator.install():
        raise SystemExit(f"the counting allocator is needed here: {allocator}")
    try:
        yield allocator
    finally:
        allocator.remove()


def measure(steps: int, share: float) -> dict[str, Any]:
    """Train plainly, then under `share` of the peak, and compare."""
    with ExitStack() as stack:
        allocator = stack.enter_context(_counting())
        before_bytes = live_bytes(_CPU) - allocator.live_bytes()
        allocator.reset_peak()
        training = _Training(steps)
        plain = training.run()
        peak_bytes = before_bytes + allocator.peak_bytes()
        plain_parameters = training.parameters()
        del training
        tell(f"plain: {sum(step.wall_ms for step in plain) / 1000:.0f} s, peak {peak_bytes} bytes")
        budget_bytes = int(share * peak_bytes) + sum(tensor.nbytes for tensor in plain_parameters)
        training = _Training(steps)
        cache = stack.enter_context(TemporaryDirectory(prefix="random-lengths-"))
        with pooch.auto(training.model, budget_bytes, cache=cache, tell=lambda _: None) as auto:
            decisions = _Decisions(auto)
            held = training.run()
            summary = auto.summary()
            same = all(map(torch.equal, plain_parameters, training.parameters()))
            lengths = _frequent(summary)
        in_turns = _in_turns(training, lengths, budget_bytes, cache)
    return {
        "steps": steps,
        "budget_bytes": budget_bytes,
        "plain_peak_bytes": peak_bytes,
        "peak_bytes": summary.peak_bytes,
        "steps_over_budget": summary.steps_over_budget,
        "steps_recorded": summary.steps_recorded,
        "steps_on_plan": summary.steps_on_plan,
        "steps_online": summary.steps_online,
        "steps_in_core": summary.steps_in_core,
        "same_losses": [step.loss for step in plain] == [step.loss for step in held],
        "same_parameters": same,
        "plain": [step.raw() for step in plain],
        "held": [[*step.raw(), *decision] for step, decision in zip(held, decisions.taken, strict=False)],
        "turns_cpu_ms": in_turns,
    }


def _frequent(summary: pooch.AutoSummary) -> list[int]:
    planned = Counter(
        {int(each.shapes.split("x")[1]): each.steps for each in summary.shapes if each.decision == "plan"}
    )
    return [length for length, _ in planned.most_common(COMPARED_LENGTHS)]


def _own_plan(training: _Training, length: int, budget_bytes: int) -> Plan:
    """Return a plan made for one length alone, by the full search."""
    tokens = torch.randint(0, _WORDS, (_BATCH, length))

    def forward() -> torch.Tensor:
        return functional.cross_entropy(training.model(tokens)[:, :-1].reshape(-1, _WORDS), tokens[:, 1:].reshape(-1))

    profile = pooch.profile(forward, training.model, training.optimizer)
    return pooch.plan(profile, budget_bytes, region="step", time_limit_s=20)


def _in_turns(training: _Training, lengths: list[int], budget_bytes: int, cache: str) -> dict[int, list[list[float]]]:
    """Train steps of some lengths under the plans of `auto`, out of its cache, and under plans of their own, in turns.

    Returns:
        CPU time in ms under `auto` and under the own plan, for each turn. Only the last step of a turn counts.
    """
    own = {length: _own_plan(training, length, budget_bytes) for length in lengths}
    found: dict[int, list[list[float]]] = {length: [] for length in lengths}
    for turn in range(TURNS):
        tell(f"turn {turn + 1} of {TURNS}")
        for length in lengths:
            with pooch.auto(training.model, budget_bytes, cache=cache, tell=lambda _: None) as auto:
                mine = [training.step(_BATCH, length) for _ in range(_STEPS_A_TURN)]
                assert auto.summary().steps_on_plan == _STEPS_A_TURN
            with pooch.apply(own[length], training.model, measure_every=None) as run:
                alone = [training.step(_BATCH, length, run.step) for _ in range(_STEPS_A_TURN)]
            found[length].append([mine[-1].cpu_ms, alone[-1].cpu_ms])
    return found


def rows(found: dict[str, Any]) -> list[Row]:
    """One row for each part of the run."""
    plain, held = found["plain"], found["held"]
    size = max(1, len(plain) // PARTS)
    return [
        {
            "steps": f"{begin + 1}-{min(begin + size, len(plain))}",
            "CPU time over plain": f"{_ratio(plain, held, begin, size, 2):.3f}",
            "wall time over plain": f"{_ratio(plain, held, begin, size, 1):.3f}",
        }
        for begin in range(0, len(plain), size)
    ]


def _ratio(plain: list[list[float]], held: list[list[float]], begin: int, size: int, column: int) -> float:
    part = slice(begin, begin + size)
    return sum(step[column] for step in held[part]) / sum(step[column] for step in plain[part])


def whole(found: dict[str, Any]) -> list[Row]:
    """One row for the whole run."""
    return [
        {
            "steps": found["steps"],
            "recorded": found["steps_recorded"],
            "on plan": found["steps_on_plan"],
            "online": found["steps_online"],
            "in-core": found["steps_in_core"],
            "plain peak": format_bytes(found["plain_peak_bytes"]),
            "budget": format_bytes(found["budget_bytes"]),
            "highest peak": format_bytes(found["peak_bytes"]),
            "steps over it": found["steps_over_budget"],
            "same bits": "yes" if found["same_losses"] and found["same_parameters"] else "no",
        }
    ]


def changes(found: dict[str, Any]) -> list[Row]:
    """One row for each way in which steps of a new length run."""
    firsts: dict[str, list[list[Any]]] = {}
    later: dict[tuple[int, str], list[list[Any]]] = {}
    met: set[int] = set()
    for step in found["held"]:
        length, decision = step[0], step[4]
        (later.setdefault((length, decision), []) if length in met else firsts.setdefault(decision, [])).append(step)
        met.add(length)
    made = []
    for decision, steps in firsts.items():
        wall_ms, thread_ms = ([step[column] for step in steps] for column in (5, 6))
        known_ms = {step[0]: [other[3] for other in later.get((step[0], decision), ())] for step in steps}
        more_ms = [step[3] - statistics.median(known_ms[step[0]]) for step in steps if known_ms[step[0]]]
        more = f"{statistics.median(more_ms):.1f} ms ({len(more_ms)} lengths)" if more_ms else ""
        made.append(
            {
                "first step of a length": {"record": "recorded"}.get(decision, decision),
                "lengths": len(steps),
                "deciding": f"{statistics.median(wall_ms):.2f} ms",
                "highest": f"{max(wall_ms):.2f} ms",
                "highest, CPU time": f"{max(thread_ms):.2f} ms",
                "more than later steps alike": more,
            }
        )
    return made


def compared(found: dict[str, Any]) -> list[Row]:
    """One row for each length that was trained under a plan of its own."""
    return [
        {
            "length": length,
            "under auto": f"{statistics.median(mine for mine, _ in turns):.1f} ms",
            "own plan": f"{statistics.median(alone for _, alone in turns):.1f} ms",
            "ratio": told([mine / alone for mine, alone in turns], ".3f"),
        }
        for length, turns in found["turns_cpu_ms"].items()
    ]


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("-o", "--folder", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    found = measure(arguments.steps, arguments.share)
    more = {
        "Parts of the run": rows(found),
        "CPU time of a step beside that under a plan made for its length alone": compared(found),
        "What a change of shape costs the training thread": changes(found),
    }
    write_results(NAME, TITLE, whole(found), found, arguments.folder, {k: v for k, v in more.items() if v})


if __name__ == "__main__":
    main()

"""What attaching a plan costs: the watch per op, the hooks per saved tensor, and a plan that does nothing.

    python -m benchmarks.hook_cost [--turns 15] [--ops 400] [--output benchmarks/results]

A chain of tiny ops, each of which saves one tensor, is trained plainly and in several ways that take turns. What a way
takes above the plain steps of its turn, divided by the number of ops, is its cost; the median of the turns counts.
Planned steps are watched natively, and in one row by the dispatch mode that does the same work elsewhere.
Times are those that the training thread computes (it does all the work here), so that other programs on the machine,
and waiting for a disk, count for little. Two rows are floors that no plan can get under: a mode and hooks of PyTorch's
that do nothing at all. The second table trains a small network under a plan for 100% of its memory: nothing is
installed. The third trains ten tiny layers under `pooch.auto` with a budget that is far away. Its plain steps run with
nothing of Pooch's in place; other plain ones run with the allocator that counts, which the whole process then has.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import pooch
from benchmarks.handmade import tight_plan, tiny_profile
from benchmarks.samples import spread
from benchmarks.tables import Row, markdown_table, write_results
from pooch.analysis.dataflow import Dataflow
from pooch.autopilot import Auto
from pooch.executor import Run, apply_plan
from pooch.executor.floor import Floor
from pooch.executor.native_watch import NativeWatch
from pooch.executor.statistics import WarnOnce
from pooch.executor.step import Step
from pooch.executor.table import Advice
from pooch.executor.verification import Verification
from pooch.ir import Choice, Plan
from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator

WATCH_TARGET_US, MODE_TARGET_US, HOOKS_TARGET_US = 0.6, 15.0, 2.0
IN_CORE_TARGET, FAR_AWAY_TARGET = 0.01, 0.03
STEPS_A_TURN = 5
PLAIN = "plain"
TARGETS_US = {
    "native watch without hooks": WATCH_TARGET_US,
    "hooks in Python without the mode": HOOKS_TARGET_US,
    "dispatch mode and hooks, all but one tensor kept": MODE_TARGET_US,
}
IN_CORE_TURNS_FACTOR = 4  # a difference of less than a percent wants more turns
FAR_AWAY_STEPS, SETTLING_STEPS = 25, 5  # of a block: timed, and before them

Way = Callable[[], AbstractContextManager[object]]


class Chain(nn.Module):
    """Many tiny ops in a row, each of which saves its input."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.start = nn.Parameter(torch.linspace(0.1, 1.0, 16))

    def forward(self) -> Tensor:
        hidden = self.start * 1
        for _ in range(self.ops):
            hidden = hidden.sin()
        return hidden.sum()


class _EmptyMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def chain_plan(chain: Chain, choice: Choice, most: int) -> Plan:
    """A plan that treats the first `most` activations in one way, and keeps the rest."""
    profile = tiny_profile(chain, chain)
    ids = [value.id for value in Dataflow(profile, "step").activations][:most]
    made = tight_plan(profile, dict.fromkeys(ids, choice))
    assert made.schedule.actions, "the plan does nothing, so its cost says nothing"
    return made


def _step_of(run: Run) -> Step:
    table, engine = run._table, run._engine
    arena = engine.open_arena(run.plan.schedule.host_bytes)
    return Step(
        Floor(0, 0, 0, engine, torch.device("cpu"), Verification("off", WarnOnce()), WarnOnce()),
        Advice(table, arena, "warn"),
    )


def _watch_alone(run: Run) -> AbstractContextManager[object]:
    """The native watch of a planned step without its hooks."""
    return NativeWatch(_step_of(run))


def _hooks_alone(run: Run) -> AbstractContextManager[object]:
    """The hooks of a planned step, in Python, without anything that watches ops."""
    step = _step_of(run)
    assert step.guide is not None
    step.guide.cursor.on_path = False  # nobody counts ops, so no action of the plan may fire
    return saved_tensors_hooks(step.pack, step.unpack)


def _timed_us(chain: Chain, way: Way) -> float:
    start = time.thread_time()
    for _ in range(STEPS_A_TURN):
        with way():
            loss = chain()
        loss.backward()
        chain.start.grad = None
    return (time.thread_time() - start) * 1e6 / STEPS_A_TURN


def per_op_costs(ops: int, turns: int) -> list[dict[str, Any]]:
    """What each way to train the chain takes, per op, in turns.

    Returns:
        {"what", "us_an_op"} for each way; the samples in the order of the turns, plain training in them too.
    """
    chain = Chain(ops)
    plans = {
        name: chain_plan(chain, choice, most)
        for name, choice, most in (
            ("kept", "swap", 1), ("mode", "swap", 1), ("swapped", "swap", ops), ("replayed", "recompute", ops)
        )
    }  # fmt: skip
    twins = {name: Chain(ops) for name in plans}  # a model has one plan at a time, and these regions take any step
    with ExitStack() as attached:
        runs = {
            name: attached.enter_context(apply_plan(plan, twins[name], on_mismatch="error"))
            for name, plan in plans.items()
        }
        runs["mode"]._table.native_use.is_refused = True
        ways: dict[str, Way] = {
            PLAIN: nullcontext,
            "floor: PyTorch's hooks, doing nothing": lambda: saved_tensors_hooks(_same, _same),
            "floor: PyTorch's mode, doing nothing": _EmptyMode,
            "native watch without hooks": lambda: _watch_alone(runs["kept"]),
            "hooks in Python without the mode": lambda: _hooks_alone(runs["kept"]),
            "native watch and hooks, all but one tensor kept": runs["kept"].step,
            "dispatch mode and hooks, all but one tensor kept": runs["mode"].step,
            "native watch and hooks, all tensors swapped": runs["swapped"].step,
            "native watch and hooks, all tensors replayed": runs["replayed"].step,
        }
        for way in ways.values():
            _timed_us(chain, way)
        taken = [{name: _timed_us(chain, way) / ops for name, way in ways.items()} for _ in range(turns)]
        assert runs["swapped"].stats.swapped_in_bytes > 0
        assert runs["replayed"].stats.recomputed_ops > ops / 2
        assert all(run.stats.late_swaps == run.stats.mismatches == 0 for run in runs.values())
    return [{"what": name, "us_an_op": [one[name] for one in taken]} for name in ways]


def per_op_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Cost per op of each way, above plain training in the same turn."""
    plain_us = next(result["us_an_op"] for result in results if result["what"] == PLAIN)
    rows = []
    for result in results:
        above = [0.0] * len(plain_us) if result["what"] == PLAIN else plain_us
        costs_us = [us - base_us for us, base_us in zip(result["us_an_op"], above, strict=True)]
        rows.append(_row(result["what"], costs_us, TARGETS_US.get(result["what"])))
    return rows


def _row(name: str, costs_us: list[float], target_us: float | None) -> Row:
    found = spread(costs_us)
    assert found is not None
    return {
        "what": name,
        "us an op": f"{found.median:.2f}",
        "middle half of the turns": f"{found.lower:.2f} to {found.upper:.2f}",
        "least to most": found.extremes(".2f"),
        "target": "" if target_us is None else f"at most {target_us:g}",
        "kept": "" if target_us is None else "yes" if found.median <= target_us else "NO",
    }


def in_core_times(turns: int) -> list[dict[str, Any]]:
    """A network under a plan for all of its memory, and plainly, in turns: both times of every turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(12)])
    data = torch.rand(256, 128)

    def forward() -> Tensor:
        result: Tensor = model(data).square().mean()
        return result

    chosen = pooch.plan(tiny_profile(forward, model), "100%", region="model")
    assert not chosen.schedule.actions
    with apply_plan(chosen, model, measure_every=None) as run:

        def timed_ms(planned: bool) -> float:
            with nullcontext() if planned else run.paused():
                start = time.thread_time()
                for _ in range(STEPS_A_TURN):
                    forward().backward()
                return (time.thread_time() - start) * 1000 / STEPS_A_TURN

        timed_ms(True), timed_ms(False)
        # Each turn goes plain, planned, planned, plain, so that a machine that drifts favours neither.
        taken = []
        for _ in range(turns * IN_CORE_TURNS_FACTOR):
            first, second, third, fourth = timed_ms(False), timed_ms(True), timed_ms(True), timed_ms(False)
            taken.append({"plain_ms": [first, fourth], "planned_ms": [second, third]})
    return taken


def in_core_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The ratio of both times."""
    found = spread(sum(turn["planned_ms"]) / sum(turn["plain_ms"]) - 1 for turn in results)
    assert found is not None
    plain_ms = statistics.median(statistics.mean(turn["plain_ms"]) for turn in results)
    return [
        {
            "what": f"plan for 100%, step of {plain_ms:.2f} ms",
            "overhead": f"{found.median:+.2%}",
            "middle half of the turns": f"{found.lower:+.2%} to {found.upper:+.2%}",
            "least to most": found.extremes("+.2%"),
            "target": f"at most {IN_CORE_TARGET:.0%}",
            "kept": "yes" if found.median <= IN_CORE_TARGET else "NO",
        }
    ]


@contextmanager
def _put_aside(auto: Auto, *, counts: bool) -> Iterator[None]:
    """Take a budget off its models, and then put it back. `counts`: leave the allocator that counts in place."""
    driver, allocator, persistence = auto._driver, counting_allocator(), auto._persistence
    assert isinstance(allocator, CountingAllocator)
    driver.governed.remove()
    driver._backward.stop()
    driver._compiled.end()
    persistence._hook.remove()
    if not counts:
        allocator._functions["remove"]()
    try:
        yield
    finally:
        allocator._functions["install"]()
        persistence.listen(driver._native.steps)
        driver._compiled.begin()
        driver._backward.start()
        driver.governed.place(driver._surround, driver.here, driver.compiled_comes)


def far_away_times(turns: int) -> list[dict[str, Any]]:
    """Ten tiny layers under a budget that is far away, and plainly, in turns: the times of every turn in us a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.rand(8, 16)

    def train(steps: int) -> float:
        start = time.thread_time()
        for _ in range(steps):
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.thread_time() - start) * 1e6 / steps

    def timed_us(around: AbstractContextManager[object]) -> float:
        with around:
            train(SETTLING_STEPS)
            return train(FAR_AWAY_STEPS)

    with pooch.auto(model, "8GiB", optimizer, quiet=True) as auto:
        ways: dict[str, Way] = {
            "plain_us": lambda: _put_aside(auto, counts=False),
            "counted_us": lambda: _put_aside(auto, counts=True),
            "auto_us": nullcontext,
        }
        train(4 * FAR_AWAY_STEPS)
        order = [*ways, *reversed(ways)]
        taken = []
        for _ in range(turns * IN_CORE_TURNS_FACTOR):
            turn: dict[str, Any] = {name: [] for name in ways}
            for name in order:
                turn[name].append(timed_us(ways[name]()))
            taken.append(turn)
        train(SETTLING_STEPS)
        assert auto.status().mode == "in-core"
        in_python = auto._driver._tally.steps
        train(FAR_AWAY_STEPS)
        assert auto._driver._tally.steps == in_python or auto._driver._native.steps is None, "Python runs its steps"
    return taken


def far_away_rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What comes on top of a plain step."""
    plain_us = statistics.median(statistics.mean(turn["plain_us"]) for turn in results)
    rows = []
    for what, name, target in (
        ("allocations are counted, for all that the process does", "counted_us", None),
        ("auto, budget far away", "auto_us", FAR_AWAY_TARGET),
    ):
        found = spread(sum(turn[name]) / sum(turn["plain_us"]) - 1 for turn in results)
        above_us = statistics.median(
            statistics.mean(turn[name]) - statistics.mean(turn["plain_us"]) for turn in results
        )
        assert found is not None
        rows.append(
            {
                "what": f"{what}; plain step of {plain_us:.0f} us",
                "overhead": f"{found.median:+.1%}",
                "us a step": f"{above_us:+.0f}",
                "middle half of the turns": f"{found.lower:+.1%} to {found.upper:+.1%}",
                "least to most": found.extremes("+.1%"),
                "target": "" if target is None else f"at most {target:.0%}",
                "kept": "" if target is None else "yes" if found.median <= target else "NO",
            }
        )
    return rows


def main() -> int:
    """Measure, print, write; exit code 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--ops", type=int, default=400)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    costs, times = per_op_costs(arguments.ops, arguments.turns), in_core_times(arguments.turns)
    far_times = far_away_times(arguments.turns)
    per_op, in_core, far_away = per_op_rows(costs), in_core_rows(times), far_away_rows(far_times)
    write_results("hook-cost-cpu", "What attaching a plan costs per op", per_op, costs, arguments.output)
    write_results("in-core-overhead-cpu", "A plan that moves nothing", in_core, times, arguments.output)
    write_results("far-away-cpu", "A budget that is far away", far_away, far_times, arguments.output)
    sys.stdout.write("\n\n".join(map(markdown_table, (per_op, in_core, far_away))) + "\n")
    return int(any(row["kept"] == "NO" for row in (*per_op, *in_core, *far_away)))


if __name__ == "__main__":
    sys.exit(main())

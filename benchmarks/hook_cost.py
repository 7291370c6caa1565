"""What attaching a plan costs: the dispatch mode per op, the hooks per saved tensor, and a plan that does nothing.

    python -m benchmarks.hook_cost [--turns 15] [--ops 400] [--output benchmarks/results]

A chain of tiny ops, each of which saves one tensor, is trained plainly and in several ways that take turns. What a way
takes above the plain steps of its turn, divided by the number of ops, is its cost; the median of the turns counts.
Times are those that the training thread computes (it does all the work here), so that other programs on the machine,
and waiting for a disk, count for little. Two rows are floors that no plan can get under: a mode and hooks of PyTorch's
that do nothing at all. The last table trains a small network under a plan for 100% of its memory: nothing is installed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.handmade import tight_plan, tiny_profile
from benchmarks.tables import Row, markdown_table, write_results
from pooch.executor import Run, apply_plan
from pooch.executor.actions import StepActions
from pooch.executor.step import PlannedStep
from pooch.executor.warn_once import WarnOnce
from pooch.ir import Choice, Plan
from pooch.ir.dataflow import Dataflow
from pooch.session import plan as make_plan

MODE_TARGET_US, HOOKS_TARGET_US, IN_CORE_TARGET = 15.0, 2.0, 0.01
STEPS_A_TURN = 5
IN_CORE_TURNS_FACTOR = 4  # a difference of less than a percent wants more turns

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


def _hooks_alone(run: Run) -> AbstractContextManager[object]:
    """The hooks of a planned step without its mode."""
    table, engine = run._table, run._engine
    arena = engine.open_arena(table.host_bytes)
    step = PlannedStep(StepActions(table, arena, torch.device("cpu"), run.stats, WarnOnce()), "warn")
    step.on_path = False  # nobody counts ops, so no action of the plan may fire
    return saved_tensors_hooks(step.pack, step.unpack)


def _timed_us(chain: Chain, way: Way) -> float:
    start = time.thread_time()
    for _ in range(STEPS_A_TURN):
        with way():
            loss = chain()
        loss.backward()
        chain.start.grad = None
    return (time.thread_time() - start) * 1e6 / STEPS_A_TURN


def per_op_rows(ops: int, turns: int) -> list[Row]:
    """Cost per op of each way to train the chain, above plain training in the same turn."""
    chain = Chain(ops)
    with ExitStack() as attached, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the chain runs outside of the plans in between is meant
        runs = {
            name: attached.enter_context(apply_plan(chain_plan(chain, choice, most), chain, on_mismatch="error"))
            for name, choice, most in (("kept", "swap", 1), ("swapped", "swap", ops), ("replayed", "recompute", ops))
        }
        ways: dict[str, Way] = {
            "plain": nullcontext,
            "floor: PyTorch's hooks, doing nothing": lambda: saved_tensors_hooks(_same, _same),
            "floor: PyTorch's mode, doing nothing": _EmptyMode,
            "hooks without the mode": lambda: _hooks_alone(runs["kept"]),
            "mode and hooks, all but one tensor kept": runs["kept"].step,
            "mode and hooks, all tensors swapped": runs["swapped"].step,
            "mode and hooks, all tensors replayed": runs["replayed"].step,
        }
        for way in ways.values():
            _timed_us(chain, way)
        taken = [{name: _timed_us(chain, way) for name, way in ways.items()} for _ in range(turns)]
        assert runs["swapped"].stats.swapped_in_bytes > 0
        assert runs["replayed"].stats.recomputed_ops > ops / 2
        assert all(run.stats.late_swaps == run.stats.mismatches == 0 for run in runs.values())
    targets = {
        "hooks without the mode": HOOKS_TARGET_US,
        "mode and hooks, all but one tensor kept": MODE_TARGET_US,
    }
    rows: list[Row] = []
    for name in ways:
        costs = [(one[name] - (one["plain"] if name != "plain" else 0.0)) / ops for one in taken]
        rows.append(_row(name, statistics.median(costs), costs, targets.get(name)))
    return rows


def _row(name: str, cost_us: float, costs: list[float], target_us: float | None) -> Row:
    return {
        "what": name,
        "us an op": f"{cost_us:.2f}",
        "spread": f"{min(costs):.2f} to {max(costs):.2f}",
        "target": "" if target_us is None else f"at most {target_us:g}",
        "kept": "" if target_us is None else "yes" if cost_us <= target_us else "NO",
    }


def in_core_rows(turns: int) -> list[Row]:
    """A network under a plan for all of its memory, and plainly, in turns: the ratio of their times."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(12)])
    data = torch.rand(256, 128)

    def forward() -> Tensor:
        result: Tensor = model(data).square().mean()
        return result

    chosen = make_plan(tiny_profile(forward, model), "100%", region="model")
    assert not chosen.schedule.actions
    with apply_plan(chosen, model) as run:

        def timed_ms(planned: bool) -> float:
            with nullcontext() if planned else run.paused():
                start = time.thread_time()
                for _ in range(STEPS_A_TURN):
                    forward().backward()
                return (time.thread_time() - start) * 1000 / STEPS_A_TURN

        timed_ms(True), timed_ms(False)
        # Each turn goes plain, planned, planned, plain, so that a machine that drifts favours neither.
        pairs = []
        for _ in range(turns * IN_CORE_TURNS_FACTOR):
            first, second, third, fourth = timed_ms(False), timed_ms(True), timed_ms(True), timed_ms(False)
            pairs.append((first + fourth, second + third))
    ratios = [planned / plain for plain, planned in pairs]
    overhead = statistics.median(ratios) - 1
    quartiles = statistics.quantiles(ratios, n=4)
    return [
        {
            "what": f"plan for 100%, step of {statistics.median(plain for plain, _ in pairs) / 2:.2f} ms",
            "overhead": f"{overhead:+.2%}",
            "middle half of the turns": f"{quartiles[0] - 1:+.2%} to {quartiles[2] - 1:+.2%}",
            "target": f"at most {IN_CORE_TARGET:.0%}",
            "kept": "yes" if overhead <= IN_CORE_TARGET else "NO",
        }
    ]


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
    per_op, in_core = per_op_rows(arguments.ops, arguments.turns), in_core_rows(arguments.turns)
    write_results("hook-cost-cpu", "What attaching a plan costs per op", per_op, [], arguments.output)
    write_results("in-core-overhead-cpu", "A plan that moves nothing", in_core, [], arguments.output)
    sys.stdout.write(f"{markdown_table(per_op)}\n\n{markdown_table(in_core)}\n")
    return int(any(row["kept"] == "NO" for row in (*per_op, *in_core)))


if __name__ == "__main__":
    sys.exit(main())

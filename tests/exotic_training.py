"""Trains a `Sandwich` around an exotic part: plainly, under `pooch.auto` and under plans. A program does it for one."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

import pooch
from tests.children import child_environment
from tests.executor.support import all_of, quick_profile
from tests.exotic_kinds import KINDS, ROWS, WIDTH, Sandwich

Way = Literal["auto", "recompute", "swap"]
WAYS: tuple[Way, ...] = ("auto", "recompute", "swap")
BUDGET = "1MiB"
STEPS = 3
MAY_ABORT = frozenset({"nested_strided", "nested_jagged", "masked", "wrapped", "wrapped_flattened", "backed"})
# Compiled code looks at memory that this process shares with the tests before it.
APART = MAY_ABORT | {"branch", "loop", "scanned", "flexible", "compiled", "exported", "scripted"}


@dataclass(frozen=True)
class Outcome:
    """What training under Pooch gave.

    Attributes:
        differs: Names of what has other bits than plain training gave.
        recomputed_ops: Ops replayed: in all steps of `auto`, or in the last one under a plan.
        swapped_bytes: Bytes swapped, likewise.
        ungoverned: What was counted as not governed, likewise.
        lines: What the user was told of it.
    """

    differs: tuple[str, ...]
    recomputed_ops: int
    swapped_bytes: int
    ungoverned: int
    lines: tuple[str, ...]


def _steps(model: torch.nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Train, and return all that has to be the same."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, torch.Tensor] = {}
    for number in range(STEPS):
        loss = model(rows)
        loss.backward()
        found[f"loss {number}"] = loss.detach().clone()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found |= {f"gradient {number} {name}": each.clone() for name, each in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {name: each.detach().clone() for name, each in model.state_dict().items()}
    return found | {"random state": torch.get_rng_state()}


def _made(name: str) -> tuple[Sandwich, torch.Tensor]:
    torch.manual_seed(0)
    return Sandwich(KINDS[name]), torch.randn(ROWS, WIDTH)


def trained_plainly(name: str) -> dict[str, torch.Tensor]:
    """Train without Pooch."""
    model, rows = _made(name)
    torch.manual_seed(1)
    return _steps(model, rows)


def outcome_of(name: str, way: Way) -> Outcome:
    """Train a kind plainly and under Pooch, and compare."""
    plain = trained_plainly(name)
    model, rows = _made(name)
    lines: list[str] = []
    if way == "auto":
        auto = pooch.auto(model, BUDGET, tell=lines.append)
        with auto:
            torch.manual_seed(1)
            found = _steps(model, rows)
            summary = auto.summary()
        counted = (summary.recomputed_ops, summary.swapped_bytes, summary.ungoverned)
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            profile = quick_profile(lambda: model(rows), model)
            plan = pooch.plan_from_decisions(profile, all_of(profile, way, "model"))
            with pooch.apply(plan, model) as run:
                torch.manual_seed(1)
                found = _steps(model, rows)
                counted = (run.stats.recomputed_ops, run.stats.swapped_out_bytes, run.stats.ungoverned)
        lines += [str(each.message) for each in caught if "pooch" in each.filename or "governed" in str(each.message)]
    differs = tuple(
        key for key, each in plain.items() if key not in found or not torch.equal(each, found[key])
    ) + tuple(found.keys() - plain.keys())
    return Outcome(differs, *counted, tuple(line for line in lines if "over the budget" not in line))


def outcomes_apart(name: str) -> dict[Way, Outcome]:
    """The same in all ways in a process of their own, which may abort.

    Raises:
        AssertionError: If it did, or raised.
    """
    command = [sys.executable, "-m", "tests.exotic_training", name]
    child = subprocess.run(
        command, env=child_environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False
    )
    found = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    last = WAYS[len(found)] if len(found) < len(WAYS) else "at its end"
    assert child.returncode == 0, f"{name} {last}: exit code {child.returncode}\n{child.stderr[-3000:]}"
    told = tuple(line for line in child.stderr.splitlines() if "pooch" in line and "Warning" not in line)
    assert not told, "what is told goes where `tell` says"
    outcomes = [{key: tuple(it) if isinstance(it, list) else it for key, it in each.items()} for each in found]
    return {way: Outcome(**each) for way, each in zip(WAYS, outcomes, strict=True)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in WAYS:
        sys.stdout.write(json.dumps(dataclasses.asdict(outcome_of(sys.argv[1], each))) + "\n")
        sys.stdout.flush()

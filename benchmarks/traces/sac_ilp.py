"""PyTorch's program for selective checkpointing (`torch.distributed._tools.sac_ilp`), beside plans for the same model.

    python -m benchmarks.traces.sac_ilp [--output DIR]

PyTorch's own test (test/distributed/_tools/test_sac_ilp.py) gives the figures: a transformer of four layers on an A100,
modelled with fake tensors, under three budgets. Its program chooses for each layer what share of its activations is
discarded; the optimizer's state does not count, and each of four ranks holds a quarter of parameters and gradients.
Here the same model is modelled by `pooch.profile(mode="fake")`, and planned by single activations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.devices import find_device
from pooch.errors import InfeasibleBudget
from pooch.ground.units import format_bytes
from pooch.ir import Profile

NAME, TITLE = "traces-sac-ilp", "PyTorch's program for selective checkpointing: time lost, by budget"
BATCH_SIZE, LENGTH, TOKENS, RANKS = 8, 1024, 8192, 4
THEIR_PEAK_BYTES = 2_583_888_896
POLICIES = {"replays alone": "ilp_recompute", "with swaps": "ilp"}


@dataclass(frozen=True)
class Case:
    """A budget of PyTorch's test.

    Attributes:
        gib: the budget.
        theirs: what the test expects of the program.
    """

    gib: float
    theirs: str


CASES = (
    Case(2.4, "nothing is checkpointed"),
    Case(1.6, f"all four layers are, +{6.97 / 97.97:.1%}"),
    Case(0.8, "no solution"),
)


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    """The model of the test, and its tokens.

    Attention drops nothing: with dropout, a CPU computes its matrices, which the kernels of a GPU do not.
    """
    with torch.device("meta"):
        model = Transformer(
            ModelArgs(n_layers=4, n_heads=12, vocab_size=TOKENS, max_seq_len=LENGTH, dim=768, dropout_p=0.1)
        )
    model.to_empty(device="cpu")
    for layer in model.layers:
        layer.attention.dropout_p = 0.0
    return model, torch.randint(TOKENS, (BATCH_SIZE, LENGTH))


def modelled() -> tuple[Profile, int]:
    """The profile of a step on an A100, and the bytes of the parameters."""
    model, tokens = transformer()
    held: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        held[:] = [model(tokens)]  # as in the test, where a variable holds it during the backward pass
        return held[0].sum()

    profile = pooch.profile(forward, model, mode="fake", device_model=find_device("A100-80"), workload="sac_ilp")
    return profile, sum(parameter.nbytes for parameter in model.parameters())


def planned(profile: Profile, budget_bytes: int, policy: str) -> dict[str, Any]:
    """What a plan takes, or the smallest budget for which there is one."""
    try:
        plan = pooch.plan(profile, budget_bytes, policy=policy)
    except InfeasibleBudget as error:
        return {"minimum_bytes": error.minimum_bytes}
    return {"peak_bytes": plan.predicted_peak_bytes, "lost": plan.predicted_step_ms / profile.step_ms - 1}


def measure() -> list[dict[str, Any]]:
    """One result for each budget."""
    profile, parameters_bytes = modelled()
    tell(f"in-core peak {profile.peak_bytes:,} bytes, {profile.peak_bytes / THEIR_PEAK_BYTES:.3f} of PyTorch's")
    results = []
    for case in CASES:
        # What other ranks hold of parameters and gradients there, this one holds here.
        budget_bytes = int(case.gib * 2**30) + 2 * parameters_bytes * (RANKS - 1) // RANKS
        plans = {name: planned(profile, budget_bytes, policy) for name, policy in POLICIES.items()}
        tell(f"{case.gib} GiB: {plans}")
        results.append({
            "budget_gib": case.gib, "budget_bytes": budget_bytes, "theirs": case.theirs, "plans": plans,
            "in_core_peak_bytes": profile.peak_bytes,
        })  # fmt: skip
    return results


def rows_of(results: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each budget."""

    def told(plan: dict[str, Any]) -> str:
        if "minimum_bytes" in plan:
            return f"needs {format_bytes(plan['minimum_bytes'])}"
        return f"+{plan['lost']:.1%}, peak {format_bytes(plan['peak_bytes'])}"

    return [
        {
            "budget of a rank": f"{result['budget_gib']} GiB",
            "the same on one": format_bytes(result["budget_bytes"]),
            "PyTorch's program": result["theirs"],
            **{f"plan, {name}": told(plan) for name, plan in result["plans"].items()},
        }
        for result in results
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Model, plan, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    given = parser.parse_args(arguments)
    results = measure()
    write_results(NAME, TITLE, rows_of(results), results, given.output)
    print(markdown_table(rows_of(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

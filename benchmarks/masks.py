"""Bytes that a GPT-2 with dropout moves to the swap tier and back, with masks packed and without.

    python -m benchmarks.masks [--layers 6] [--width 256] [--length 256] [--batch 8] [--turns 2]
                               [--output benchmarks/results]

Each budget is planned twice: from a profile that was recorded where copies move every byte (`POOCH_PACKED_COPIES=0`),
and from one where they pack masks. Where everything is swapped, both plans do the same. Steps under both plans take
turns with plain steps, from the same state each. Their losses, gradients and random state are compared bit by bit, and
their times are stored.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pooch
from benchmarks.tables import Row, markdown_table, tell, write_results
from pooch.executor import Run
from pooch.ground.units import format_bytes
from pooch.ir import Plan, Profile
from pooch.torchtools.copier import PACKING

NAME, TITLE = "masks-cpu", "Bytes moved in a step of GPT-2 with dropout, without and with masks packed"
EVERYTHING = "all is swapped"
BUDGETS = (EVERYTHING, "75%", "60%", "45%")
WAYS = {"whole": "0", "packed": "1"}


def job(options: argparse.Namespace) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A small GPT-2 whose attention is computed step by step, and its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.width // 64,
        n_positions=options.length,
        vocab_size=4096,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(4096, (options.batch, options.length))
    return model, lambda: model(tokens, labels=tokens).loss


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Profile both ways, plan each budget, and take turns."""
    model, forward = job(options)
    profiles = {}
    for way in WAYS:
        tell(f"profiling with copies {way}")
        profiles[way] = _as(way, lambda: pooch.profile(forward, model))
    return [_at(budget, profiles, model, forward, options.turns) for budget in BUDGETS]


def _as(way: str, run: Callable[[], Any]) -> Any:
    os.environ[PACKING] = WAYS[way]
    try:
        return run()
    finally:
        del os.environ[PACKING]


def _at(
    budget: str,
    profiles: Mapping[str, Profile],
    model: torch.nn.Module,
    forward: Callable[[], torch.Tensor],
    turns: int,
) -> dict[str, Any]:
    in_core_bytes = profiles["whole"].peak_bytes
    if budget == EVERYTHING:
        plans = {way: _swapping_all(profile) for way, profile in profiles.items()}
        budget_bytes = plans["whole"].predicted_peak_bytes
    else:
        budget_bytes = int(in_core_bytes * float(budget.rstrip("%")) / 100)
        plans = {way: pooch.plan(profile, budget_bytes) for way, profile in profiles.items()}
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in ("plain", *plans)}
    for turn in range(turns):
        tell(f"{budget}: turn {turn + 1} of {turns}")
        for way in samples:
            plan = plans.get(way)
            step = partial(_step, plan, model, forward, turn)
            samples[way].append(_as(way if plan else "whole", step))
    packs = [value for value in profiles["packed"].activations if value.packs]
    return {
        "budget": budget,
        "in_core_bytes": in_core_bytes,
        "budget_bytes": budget_bytes,
        "masks_bytes": sum(value.size_bytes for value in packs),
        "swapped_masks": {
            way: sum(plan.decisions.get(value.id) == "swap" for value in packs) for way, plan in plans.items()
        },
        "masks": len(packs),
        "predicted": {way: plan.predicted_step_ms / plan.in_core_step_ms for way, plan in plans.items()},
        "samples": samples,
    }


def _swapping_all(profile: Profile) -> Plan:
    inside = [value.id for value in profile.activations if not value.saved_outside_model]
    return pooch.plan_from_decisions(profile, dict.fromkeys(inside, "swap"))


def _step(plan: Plan | None, model: torch.nn.Module, forward: Callable[[], torch.Tensor], turn: int) -> dict[str, Any]:
    """Two steps, of which the second one is measured: the first one opens files."""
    with pooch.apply(plan, model) if plan is not None else nullcontext() as run:
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(turn)
            begin_s = time.perf_counter()
            loss = forward()
            loss.backward()
            elapsed_ms = 1000 * (time.perf_counter() - begin_s)
    digest = hashlib.sha256(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return {"step_ms": elapsed_ms, "digest": digest.hexdigest(), **_counted(run)}


def _counted(run: Run | None) -> dict[str, int]:
    if run is None:
        return {}
    stats = run.stats
    return {"swapped_bytes": stats.swapped_out_bytes + stats.swapped_in_bytes, "spared_bytes": stats.spared_bytes}


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The table."""
    return [_row(result) for result in results]


def _row(result: Mapping[str, Any]) -> Row:
    samples = result["samples"]
    moved = {way: samples[way][-1]["swapped_bytes"] - samples[way][-1]["spared_bytes"] for way in WAYS}
    digests = [[sample["digest"] for sample in samples[way]] for way in samples]
    return {
        "budget": f"{result['budget']}, {format_bytes(result['budget_bytes'])}",
        "masks": f"{result['masks']}, {format_bytes(result['masks_bytes'])}",
        "of them swapped, before": result["swapped_masks"]["whole"],
        "now": result["swapped_masks"]["packed"],
        "moved a step, before": format_bytes(moved["whole"]),
        "moved now": format_bytes(moved["packed"]),
        "swapped now": format_bytes(samples["packed"][-1]["swapped_bytes"]),
        "predicted slowdown, before": f"{result['predicted']['whole']:.2f}",
        "predicted now": f"{result['predicted']['packed']:.2f}",
        "same bits": "yes" if all(each == digests[0] for each in digests) else "NO",
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, default in (("layers", 6), ("width", 256), ("length", 256), ("batch", 8), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    results = measured(options)
    rows = rows_of(results)
    write_results(NAME, TITLE, rows, results, options.output)
    print(markdown_table(rows))


if __name__ == "__main__":
    main()

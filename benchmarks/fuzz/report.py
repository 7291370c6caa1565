"""Counts over many verdicts, as JSON and as a page."""

from __future__ import annotations

import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz.verdict import WAYS, Verdict

_SHOWN_SEEDS = 5


def counts(verdicts: Iterable[Verdict], memory: Iterable[dict[str, int]] = ()) -> dict[str, Any]:
    """Return all figures, ready for JSON.

    Args:
        verdicts: What became of each seed.
        memory: Resident memory of each worker, now and then.
    """
    verdicts = sorted(verdicts, key=lambda each: each.seed)
    judged = [each for each in verdicts if not each.discarded]
    failures = [each for each in judged if each.failures]
    blamed = _by_hostile_piece(judged)
    return {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "models": len(verdicts),
        "first_seed": verdicts[0].seed if verdicts else None,
        "last_seed": verdicts[-1].seed if verdicts else None,
        "discarded": dict(Counter(_kind(each.discarded) for each in verdicts if each.discarded).most_common()),
        "with_hostile_pieces": sum(bool(each.hostile) for each in judged),
        "ways": {way: _way(judged, way) for way in (*WAYS, "process")},
        "refused": dict(_details(judged, "refused").most_common()),
        "failing_models": len(failures),
        "failing_without_hostile_pieces": [each.seed for each in failures if not each.hostile],
        "failing_by_hostile_piece": blamed,
        "failures": [
            {
                "seed": each.seed,
                "hostile": each.hostile,
                "ways": {way: f"{o.kind}: {o.detail}" for way, o in each.failures.items()},
            }
            for each in failures
        ],
        "memory_of_workers": list(memory),
    }


def _way(judged: list[Verdict], way: str) -> dict[str, int]:
    outcomes = [each.outcomes[way] for each in judged if way in each.outcomes]
    found: dict[str, int] = dict(Counter(outcome.kind for outcome in outcomes).most_common())
    found["models with ops replayed"] = sum(outcome.replayed_ops > 0 for outcome in outcomes)
    found["models with bytes swapped"] = sum(outcome.moved_bytes > 0 for outcome in outcomes)
    found["ops replayed"] = sum(outcome.replayed_ops for outcome in outcomes)
    found["bytes swapped"] = sum(outcome.moved_bytes for outcome in outcomes)
    return found


def _details(judged: list[Verdict], kind: str) -> Counter[str]:
    every = (outcome for each in judged for outcome in each.outcomes.values())
    return Counter(_kind(outcome.detail) for outcome in every if outcome.kind == kind)


def _kind(detail: str) -> str:
    """Return a message without what is particular to one model."""
    return re.sub(r"(pieces|seed)[\w.\[\]]*|\d+", "_", detail)[:120]


def _by_hostile_piece(judged: list[Verdict]) -> dict[str, Any]:
    """Return, for each piece that was the only hostile one of failing models: how often it failed, and seeds."""
    alone = [each for each in judged if len(each.hostile) == 1]
    total = Counter(each.hostile[0] for each in alone)
    seeds: dict[str, list[int]] = defaultdict(list)
    for each in alone:
        if each.failures:
            seeds[each.hostile[0]].append(each.seed)
    ordered = sorted(seeds, key=lambda name: -len(seeds[name]))
    return {
        name: {"failing": len(seeds[name]), "of": total[name], "seeds": seeds[name][:_SHOWN_SEEDS]} for name in ordered
    }


def page(found: dict[str, Any]) -> str:
    """Return the page for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    discarded = sum(found["discarded"].values())
    lines = [
        "# Random models, bit by bit",
        "",
        f"{found['models']} random models (seeds {found['first_seed']} to {found['last_seed']}; {versions}), each "
        "trained plainly, under a plan with random decisions, and under `pooch.auto` with a small budget "
        "(`python -m benchmarks.fuzz_replays`). Losses, gradients, parameters, buffers, random states and settings are "
        f"compared bitwise. {discarded} models were discarded, since plain training raises or does not repeat itself; "
        f"{found['with_hostile_pieces']} of the others have hostile pieces (`tests/hostile`).",
        "",
        "| way | " + " | ".join(_columns(found)) + " |",
        "|---" * (len(_columns(found)) + 1) + "|",
    ]
    for way, told in found["ways"].items():
        if any(told.values()):
            lines.append("| " + " | ".join([way, *(str(told.get(name, 0)) for name in _columns(found))]) + " |")
    lines += [
        "",
        f"Failing models: {found['failing_models']}, of which without any hostile piece: "
        f"{len(found['failing_without_hostile_pieces'])} {found['failing_without_hostile_pieces'][:20]}.",
    ]
    if found["failing_by_hostile_piece"]:
        lines += ["", "| the only hostile piece of the model | failing | of | seeds |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {told['failing']} | {told['of']} | {', '.join(map(str, told['seeds']))} |"
            for name, told in found["failing_by_hostile_piece"].items()
        ]
    if found["refused"]:
        lines += ["", "| refused before training, because | models |", "|---|---|"]
        lines += [f"| {reason} | {number} |" for reason, number in found["refused"].items()]
    return "\n".join(lines) + "\n"


def _columns(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(name for told in found["ways"].values() for name in told))

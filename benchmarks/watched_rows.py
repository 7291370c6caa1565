"""The tables of `benchmarks.watched_models`, from its samples alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.main_job import CHOICES
from benchmarks.samples import RawSample, of_kind, ratios, told
from benchmarks.tables import Row
from pooch.ground.units import format_bytes

FIRST, ENOUGH = 10, 10  # steps that are told of: the first ones, and the last ones on plan
Result = Mapping[str, Any]


def _pairs(samples: Sequence[RawSample]) -> list[tuple[RawSample, RawSample]]:
    """The plain step and the step under `pooch.auto` of each turn."""
    kinds = [[sample for sample in samples if sample["kind"] == kind] for kind in ("plain", "auto")]
    return list(zip(*kinds, strict=True))


def on_plan(samples: Sequence[RawSample]) -> list[tuple[RawSample, RawSample]]:
    """Those of the pairs whose step followed a plan."""
    return [(plain, held) for plain, held in _pairs(samples) if held["mode"] == "plan"]


def _ratios(pairs: Sequence[tuple[RawSample, RawSample]], what: str) -> list[float]:
    return [held[what] / plain[what] for plain, held in pairs]


def _filled(rows: list[Row]) -> list[Row]:
    """Give all rows the columns of the longest one: that of a model that is missing has two."""
    columns = max(rows, key=len, default={})
    return [{column: row.get(column, "") for column in columns} for row in rows]


def auto_rows(results: Sequence[Result]) -> list[Row]:
    """The table of `pooch.auto`."""
    return _filled([_auto_row(result) for result in results])


def _auto_row(result: Result) -> Row:
    found = result.get("auto", result)
    if "failed" in found:
        return {"model": result["model"], "plain step": found["failed"]}
    samples = found["samples"]
    pairs, planned = _pairs(samples), on_plan(samples)
    others = [(plain, held) for plain, held in pairs if held["mode"] != "plan"]
    last = planned[-ENOUGH:]
    predicted = last[-1][1]["predicted"] if last else None
    own = found["ms_on_plan"] / found["plain_ms_on_plan"] if found["plain_ms_on_plan"] else None
    planned_ms = [held["wall_ms"] for _, held in planned]
    recorded_ms = None if own is None or not planned_ms else sum(planned_ms) / len(planned_ms) / own
    return {
        "model": result["model"],
        "plain step": told([plain["wall_ms"] for plain, _ in pairs], ".0f", unit=" ms"),
        "as recorded": "" if recorded_ms is None else f"{recorded_ms:.0f} ms",
        "first steps over plain": " ".join(f"{ratio:.1f}" for ratio in _ratios(pairs[:FIRST], "wall_ms")),
        "on plan": f"{len(planned)} of {len(pairs)}" + (f", from {planned[0][1]['turn']} on" if planned else ""),
        "in-core": found["steps_in_core"],
        "left plan": found["steps_left_plan"],
        "on plan, over plain": told(_ratios(last, "wall_ms"), ".2f"),
        "CPU time": told(_ratios(last, "cpu_ms"), ".2f"),
        "of the thread": told(_ratios(last, "thread_ms"), ".2f"),
        "predicted": "" if predicted is None else f"{predicted:.2f}",
        "as auto tells": "" if own is None else f"{own:.2f}",
        "other steps, over plain": told(_ratios(others, "wall_ms"), ".2f"),
        "in-core peak": format_bytes(result["plain_peak_bytes"]),
        "peak of budget": f"{found['peak_bytes'] / found['budget_bytes']:.1%}",
        "steps over it": found["steps_over_budget"],
        "same bits": "yes" if all(sample["same_bits"] for sample in samples) else "NO",
    }


def plan_rows(results: Sequence[Result]) -> list[Row]:
    """The table of plans made beforehand."""
    return _filled([_plan_row(result) for result in results])


def _plan_row(result: Result) -> Row:
    found = result.get("plan", result)
    if "failed" in found:
        return {"model": result["model"], "budget": found["failed"]}
    samples, choices = found["samples"], found["decisions"]
    plain_ms, planned_ms = of_kind(samples, "plain", "thread_ms"), of_kind(samples, "planned", "thread_ms")
    above_us = [1000 * (held - plain) / found["ops"] for plain, held in zip(plain_ms, planned_ms, strict=True)]
    same = found["first_difference"] is None and all(sample["same_bits"] for sample in samples)
    return {
        "model": result["model"],
        "budget": f"{found['budget']} = {format_bytes(found['budget_bytes'])}",
        "forward ops": found["ops"],
        "plain step": told(of_kind(samples, "plain"), ".0f", unit=" ms"),
        "as profiled": f"{found['profiled_step_ms']:.0f} ms",
        "planned, over plain": told(ratios(samples, "planned"), ".2f"),
        "CPU time": told(ratios(samples, "planned", what="cpu_ms"), ".2f"),
        "of the thread": told(ratios(samples, "planned", what="thread_ms"), ".2f"),
        "predicted": f"{found['predicted_slowdown']:.2f}",
        "paused, of the thread": told(ratios(samples, "paused", what="thread_ms"), ".2f"),
        "thread above plain, an op": told(above_us, ".0f", unit=" us"),
        "keep/swap/recompute": "/".join(str(choices[choice]) for choice in CHOICES),
        "swapped": format_bytes(found["swapped_bytes"]),
        "replayed ops": found["recomputed_ops"],
        "plan": found["status"],
        "off plan": found["steps_off_plan"],
        "peak of budget": f"{found['peak_bytes'] / found['budget_bytes']:.1%}",
        "same bits": "yes" if same else f"NO: {found['first_difference'] or 'in a timed step'}",
    }


def message_rows(results: Sequence[Result]) -> list[Row]:
    """What Pooch told while each model was trained, but for plans that were made."""
    return [
        {"model": result["model"], "told": line}
        for result in results
        for line in result.get("messages", ())
        if not line.startswith("info: planned")
    ]


def tables(results: Sequence[Result]) -> dict[str, list[Row]]:
    """The further tables, by heading."""
    made = {
        "Under a plan made beforehand": plan_rows(results),
        "What Pooch told": message_rows(results),
    }
    return {heading: rows for heading, rows in made.items() if rows}

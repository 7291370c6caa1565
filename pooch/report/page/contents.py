"""What the page shows, as JSON: the step once, and each plan's curve, bars and decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy

from ...api.simulation import simulate, simulate_in_core
from ...ground import colours
from ...ground.units import format_bytes, format_ms
from ...ir import Interval, Plan, Profile, Timeline
from ..curves import memory_curve, profile_title
from ..layers import CHOICES, OUTSIDE
from ..summaries import Record, is_modelled, moves_text
from .budgets import BudgetPlans

# A step of 10,000 ops would make the page slow. What is left out is told on the page.
MOST_POINTS = 4000  # of one memory curve
MOST_BARS = 1500  # of one kind on one stream
MOST_ROWS = 2000  # of the table


def page_contents(profile: Profile, budget_plans: BudgetPlans) -> Record:
    """Everything that the page's script reads.

    Raises:
        PlanMismatch: a plan was made for another profile.
    """
    given = budget_plans.plans[budget_plans.given]
    in_core = simulate_in_core(profile)
    listed = _listed(profile, given)
    layers = {value: profile.ops[profile.values[value].producer].module or OUTSIDE for value in listed}
    plans = [_plan_contents(profile, plan, in_core, listed) for plan in budget_plans.plans]
    return {
        "title": f"Plan of {profile_title(profile)}",
        "facts": _facts(profile, given),
        "notes": [*budget_plans.notes, *_notes(profile, given, plans[budget_plans.given], len(listed))],
        "colours": {"kinds": colours.KINDS},
        "ops": [[op.name, op.module] for op in profile.ops],
        "values": {value.id: [value.label, value.size_bytes] for value in profile.activations},
        "persistent": [[f"{each.kind} {each.name}", each.size_bytes] for each in profile.persistent],
        "rows": [[value, layers[value]] for value in listed],
        "in_core": {
            "peak_bytes": in_core.peak_bytes,
            "step_ms": in_core.step_ms,
            "curve": _sampled_curve(in_core),
        },
        "plans": plans,
        "given": budget_plans.given,
    }


def _listed(profile: Profile, plan: Plan) -> list[int]:
    """The largest activations that the plan decides on, in forward order."""
    return sorted(sorted(plan.decisions, key=lambda value: -profile.values[value].size_bytes)[:MOST_ROWS])


def _facts(profile: Profile, plan: Plan) -> dict[str, str]:
    covers = {"model": "calls of the model", "step": "the whole step"}
    modelled = is_modelled(profile) or profile.device.modelled
    in_flight = f"{plan.microbatches_in_flight} in flight; the times are those of one"
    return {
        "Policy": plan.policy,
        "Covers": covers[plan.region],
        **({"Budgets bound": "the arena in which all blocks lie"} if plan.bound == "arena" else {}),
        **({"Microbatches": in_flight} if plan.microbatches_in_flight > 1 else {}),
        "Swap tier": profile.link.tier,
        "All figures": f"predicted from {'modelled' if modelled else 'measured'} times of ops",
    }


def _notes(profile: Profile, plan: Plan, contents: Record, listed: int) -> Iterable[str]:
    predicted_ms = contents["step_ms"]
    assert isinstance(predicted_ms, float)
    if not math.isclose(predicted_ms, plan.predicted_step_ms, rel_tol=1e-3):
        yield (
            f"The plan was made for a step of {format_ms(plan.predicted_step_ms)}; with the times of this profile it "
            f"takes {format_ms(predicted_ms)}. The profile was recorded again, or the plan was made with other --ranks."
        )
    if listed < len(plan.choices):
        smallest = sorted(each.size_bytes for each in plan.choices)[: len(plan.choices) - listed]
        yield (
            f"The table lists the {listed:,} largest of {len(plan.choices):,} activations; the others have "
            f"{format_bytes(sum(smallest))} in all."
        )
    if 2 * len(profile.ops) > MOST_POINTS:
        yield (
            f"The step has {len(profile.ops):,} ops, so curves are drawn with {MOST_POINTS:,} points (peaks are exact) "
            "and short neighbours share a bar."
        )
    yield from profile.notes


def _plan_contents(profile: Profile, plan: Plan, in_core: Timeline, listed: Sequence[int]) -> Record:
    timeline = simulate(profile, plan)
    sums = {choice: [0, 0] for choice in CHOICES}
    for each in plan.choices:
        sums[each.choice][0] += 1
        sums[each.choice][1] += each.size_bytes
    decisions = {each.value: each for each in plan.choices}
    return {
        "budget_bytes": plan.budget_bytes,
        "summary": _summary(plan, timeline, in_core, {choice: count for choice, (count, _) in sums.items()}),
        "peak_bytes": timeline.peak_bytes,
        "step_ms": timeline.step_ms,
        "stall_ms": timeline.stall_ms,
        "replay_ms": timeline.replay_ms,
        "host_bytes": timeline.host_bytes,
        "lower_bound_ms": _number(plan.lower_bound_ms),
        "gap": _number(plan.gap),
        "status": plan.status,
        "notes": list(plan.notes),
        "choices": sums,
        "backward_ms": float(timeline.slot_start_ms[profile.forward_ops]),
        "curve": _sampled_curve(timeline),
        "bars": _bars(timeline),
        "rows": [
            [
                each.choice,
                _number(each.copy_ms),
                _number(each.replay_ms),
                _change(each.keep_change_ms),
                _change(each.swap_change_ms),
                _change(each.recompute_change_ms),
                each.reason,
            ]
            for each in (decisions[value] for value in listed)
        ],
    }


def _summary(plan: Plan, timeline: Timeline, in_core: Timeline, counts: dict[str, int]) -> str:
    """The plan in two sentences, for those who cannot see the charts."""
    lost = timeline.step_ms / in_core.step_ms - 1 if in_core.step_ms else 0.0
    under = f"Under a budget of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else "Without a budget"
    return (
        f"{under} the step is predicted to peak at {format_bytes(timeline.peak_bytes)} instead of "
        f"{format_bytes(in_core.peak_bytes)}, and to take {format_ms(timeline.step_ms)} instead of "
        f"{format_ms(in_core.step_ms)} ({lost:+.1%}). Of {sum(counts.values()):,} activations {counts['keep']:,} are "
        f"kept, {counts['swap']:,} swapped and {counts['recompute']:,} recomputed.{_moved(plan)}"
    )


def _moved(plan: Plan) -> str:
    moved = plan.persistent
    return f" Of what outlives the step, {moves_text(moved)}." if moved is not None else ""


def _sampled_curve(timeline: Timeline) -> Record:
    """The points of the memory curve: all of them, or of many the lowest and the highest of each stretch."""
    time_ms, live_bytes = memory_curve(timeline)
    kept = numpy.arange(len(time_ms))
    if len(kept) > MOST_POINTS:
        stretches = numpy.array_split(kept, MOST_POINTS // 2)
        extremes = (s[[live_bytes[s].argmin(), live_bytes[s].argmax()]] for s in stretches)
        kept = numpy.unique(numpy.concatenate([[0, len(kept) - 1], *extremes]))
    slots = numpy.minimum(kept // 2, len(time_ms) // 2 - 1)  # a slot has two points; the last one ends the step
    return {
        "time_ms": [_number(each) for each in time_ms[kept].tolist()],
        "live_bytes": live_bytes[kept].tolist(),
        "slot": slots.tolist(),
    }


def _bars(timeline: Timeline) -> list[Record]:
    grouped: dict[tuple[str, str], list[Interval]] = {}
    for interval in sorted(timeline.intervals, key=lambda each: each.start_ms):
        grouped.setdefault((interval.stream, interval.kind), []).append(interval)
    return [
        {"stream": stream, "kind": kind, **_bar_columns(_gathered(intervals, timeline.step_ms))}
        for (stream, kind), intervals in grouped.items()
    ]


def _gathered(intervals: list[Interval], step_ms: float) -> list[list[Interval]]:
    """One interval to a bar; of many, those that begin in the same short stretch of the step."""
    if len(intervals) <= MOST_BARS:
        return [[interval] for interval in intervals]
    stretches: dict[int, list[Interval]] = {}
    for interval in intervals:
        stretches.setdefault(int(interval.start_ms / step_ms * MOST_BARS), []).append(interval)
    return list(stretches.values())


def _bar_columns(bars: list[list[Interval]]) -> Record:
    return {
        "start_ms": [_number(bar[0].start_ms) for bar in bars],
        "duration_ms": [_number(max(each.end_ms for each in bar) - bar[0].start_ms) for bar in bars],
        "target": [bar[0].target for bar in bars],
        "count": [len(bar) for bar in bars],
    }


def _change(change_ms: float | None) -> float | str | None:
    return "inf" if change_ms == math.inf else _number(change_ms)


def _number(value: float | None) -> float | None:
    """Short enough for thousands of them; JSON knows no nan and no infinity."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")

"""Profiles, plans and timelines as pandas tables. pandas is imported when a table is made."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy

from .plan import Plan
from .profile import Profile, Value
from .timeline import Timeline

if TYPE_CHECKING:
    import pandas

_PROFILE_COLUMNS = (
    "layer",
    "op",
    "label",
    "dtype",
    "shape",
    "size_bytes",
    "allocated_bytes",
    "producer",
    "first_unpack",
    "death",
    "saved_outside_model",
    "copy_out_ms",
    "copy_in_ms",
)
_PLAN_COLUMNS = (
    "choice",
    "label",
    "size_bytes",
    "copy_ms",
    "replay_ms",
    "keep_change_ms",
    "swap_change_ms",
    "recompute_change_ms",
    "reason",
)
_TIMELINE_COLUMNS = ("stream", "kind", "slot", "target", "start_ms", "end_ms")


def profile_frame(profile: Profile) -> pandas.DataFrame:
    """One row per activation in forward order, indexed by `activation` (its id).

    `layer` is the module that made the activation and `op` the operator. `pooch.activation_costs` has recompute costs.
    """
    rows = [_profile_row(profile, value) for value in profile.activations]
    index = [value.id for value in profile.activations]
    return _indexed_frame(rows, index, _PROFILE_COLUMNS)


def _profile_row(profile: Profile, value: Value) -> dict[str, object]:
    op = profile.ops[value.producer]
    known = {name: getattr(value, name) for name in _PROFILE_COLUMNS if name in Value.__slots__}
    return known | {
        "layer": op.module,
        "op": op.name,
        "copy_out_ms": profile.link.out_ms(value.size_bytes),
        "copy_in_ms": profile.link.in_ms(value.size_bytes),
    }


def plan_frame(plan: Plan) -> pandas.DataFrame:
    """One row per activation in forward order, indexed by `activation` (its id)."""
    rows = [{name: getattr(decision, name) for name in _PLAN_COLUMNS} for decision in plan.choices]
    frame = _indexed_frame(rows, [decision.value for decision in plan.choices], _PLAN_COLUMNS)
    changes = ["keep_change_ms", "swap_change_ms", "recompute_change_ms"]
    frame[changes] = frame[changes].astype(float)  # nan if it was not simulated
    return frame


def timeline_frame(timeline: Timeline) -> pandas.DataFrame:
    """One row per interval, with its `duration_ms`."""
    import pandas

    frame = pandas.DataFrame([asdict(interval) for interval in timeline.intervals], columns=list(_TIMELINE_COLUMNS))
    frame["duration_ms"] = frame["end_ms"] - frame["start_ms"]
    return frame


def memory_curve_frame(timeline: Timeline) -> pandas.DataFrame:
    """Columns `time_ms` and `live_bytes`, with two rows per slot: its entry, and its body in the middle of the slot."""
    import pandas

    starts = numpy.asarray(timeline.slot_start_ms, dtype=float)
    times = numpy.empty(2 * (len(starts) - 1))
    times[0::2] = starts[:-1]
    times[1::2] = (starts[:-1] + starts[1:]) / 2
    return pandas.DataFrame({"time_ms": times, "live_bytes": timeline.point_bytes})


def _indexed_frame(rows: list[dict[str, object]], index: list[int], columns: tuple[str, ...]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(rows, index=pandas.Index(index, name="activation"), columns=list(columns))

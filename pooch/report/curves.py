"""What a figure shows, collected from profile, plan and timelines before anything is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy

from ..api.simulation import simulate, simulate_in_core
from ..ir import Interval, Plan, Profile, Timeline
from .layers import layer_frame

# Bars closer together than this share of the step become one: a thousand hairlines show nothing.
_MERGED_SHARE = 1 / 2000


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Live bytes over time.

    Attributes:
        name: for the legend.
        time_ms: ascending.
        live_bytes: at these times; each value lasts until the next.
    """

    name: str
    time_ms: numpy.ndarray
    live_bytes: numpy.ndarray


@dataclass(frozen=True, slots=True)
class Bars:
    """What one stream does of one kind: the start and duration of each bar, in ms."""

    stream: str
    kind: str
    spans_ms: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class StepPicture:
    """A planned step beside the in-core one.

    Attributes:
        in_core: memory over time without a plan.
        planned: memory over time under the plan.
        bars: of the planned step's three streams.
        budget_bytes: 0 without a budget.
        backward_ms: when the planned step's backward pass begins.
        step_ms: predicted duration under the plan.
        title: workload, batch and device, for people.
    """

    in_core: MemoryCurve
    planned: MemoryCurve
    bars: tuple[Bars, ...]
    budget_bytes: int
    backward_ms: float
    step_ms: float
    title: str


@dataclass(frozen=True, slots=True)
class ProfilePicture:
    """A profile alone: its in-core curve, and the bytes of its largest layers in forward order."""

    in_core: MemoryCurve
    persistent_bytes: int
    backward_ms: float
    layers: tuple[tuple[str, int], ...]
    layers_title: str
    title: str


def plan_picture(profile: Profile, plan: Plan) -> StepPicture:
    """Collect what the figure of a plan shows."""
    timeline = simulate(profile, plan)
    return StepPicture(
        in_core=memory_curve("in-core", simulate_in_core(profile)),
        planned=memory_curve(f"planned ({plan.policy})", timeline),
        bars=stream_bars(timeline),
        budget_bytes=plan.budget_bytes,
        backward_ms=float(timeline.slot_start_ms[profile.forward_ops]),
        step_ms=timeline.step_ms,
        title=profile_title(profile),
    )


def profile_picture(profile: Profile, *, depth: int | None = 2, longest: int = 24) -> ProfilePicture:
    """Collect what the figure of a profile shows, with the largest layers of so many names of the module path."""
    timeline = simulate_in_core(profile)
    frame = layer_frame(profile, depth=depth)
    sizes = frame.loc[frame["size_bytes"] > 0, "size_bytes"]
    shown = sizes[sizes.index.isin(sizes.nlargest(longest).index)]
    which = f"the {len(shown)} largest of {len(sizes)} layers" if len(shown) < len(sizes) else "layers"
    return ProfilePicture(
        in_core=memory_curve("in-core", timeline),
        persistent_bytes=profile.persistent_bytes,
        backward_ms=float(timeline.slot_start_ms[profile.forward_ops]),
        layers=tuple((str(layer), int(size)) for layer, size in shown.items()),
        layers_title=f"activations by layer: {which}, in forward order",
        title=profile_title(profile),
    )


def memory_curve(name: str, timeline: Timeline) -> MemoryCurve:
    """The curve of one simulated step, drawn out to the step's end."""
    frame = timeline.memory_curve()
    time_ms = numpy.append(frame["time_ms"].to_numpy(), timeline.step_ms)
    live_bytes = frame["live_bytes"].to_numpy()
    return MemoryCurve(name, time_ms, numpy.append(live_bytes, live_bytes[-1:]))


def stream_bars(timeline: Timeline) -> tuple[Bars, ...]:
    """The intervals by stream and kind; neighbours too close to tell apart are merged."""
    grouped: dict[tuple[str, str], list[Interval]] = {}
    for interval in timeline.intervals:
        grouped.setdefault((interval.stream, interval.kind), []).append(interval)
    nearest_ms = timeline.step_ms * _MERGED_SHARE
    return tuple(Bars(stream, kind, _merged(intervals, nearest_ms)) for (stream, kind), intervals in grouped.items())


def _merged(intervals: list[Interval], nearest_ms: float) -> tuple[tuple[float, float], ...]:
    spans: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda each: each.start_ms):
        if spans and interval.start_ms - spans[-1][1] <= nearest_ms:
            spans[-1] = (spans[-1][0], max(spans[-1][1], interval.end_ms))
        else:
            spans.append((interval.start_ms, interval.end_ms))
    return tuple((start, end - start) for start, end in spans)


def profile_title(profile: Profile) -> str:
    """Workload, batch and device, for people."""
    batch = f", batch {profile.batch_size}" if profile.batch_size else ""
    modelled = " (modelled)" if profile.device.modelled else ""
    return f"{profile.workload}{batch} on {profile.device.name}{modelled}"

"""A simulated step as a Chrome trace, for Perfetto or chrome://tracing: three streams, and live bytes as a counter."""

from __future__ import annotations

import json

from ..ir import Interval, Profile, Timeline

_STREAMS = ("compute", "copy_out", "copy_in")
_PROCESS = 1
_MICROSECONDS_PER_MS = 1000.0

Event = dict[str, object]


def trace_text(profile: Profile, timeline: Timeline) -> str:
    """The trace as JSON text."""
    events = [*_names(profile), *(_slice(profile, interval) for interval in timeline.intervals), *_counters(timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(profile: Profile) -> list[Event]:
    how = "simulated, times modelled" if profile.device.modelled else "simulated"
    process = {"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": f"{profile.workload} ({how})"}}
    threads = [
        {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": stream.replace("_", "-")}}
        for number, stream in enumerate(_STREAMS)
    ]
    return [process, *threads]


def _slice(profile: Profile, interval: Interval) -> Event:
    return {
        "name": _slice_name(profile, interval),
        "cat": interval.kind,
        "ph": "X",
        "ts": interval.start_ms * _MICROSECONDS_PER_MS,
        "dur": (interval.end_ms - interval.start_ms) * _MICROSECONDS_PER_MS,
        "pid": _PROCESS,
        "tid": _STREAMS.index(interval.stream),
        "args": _slice_facts(profile, interval),
    }


def _slice_name(profile: Profile, interval: Interval) -> str:
    if interval.kind in ("op", "replay"):
        name = profile.ops[interval.target].name
        return name if interval.kind == "op" else f"replay {name}"
    if interval.kind == "move":
        each = profile.persistent[interval.target]
        return f"{each.kind} {each.name}"
    label = profile.values[interval.target].label if interval.target >= 0 else "what outlives the step"
    return f"wait for {label}" if interval.kind == "stall" else label


def _slice_facts(profile: Profile, interval: Interval) -> Event:
    facts: Event = {"slot": interval.slot}
    if interval.kind in ("op", "replay"):
        op = profile.ops[interval.target]
        return facts | {"module": op.module, "phase": op.phase}
    if interval.kind == "move":
        return facts | {"size_bytes": profile.persistent[interval.target].size_bytes}
    if interval.target < 0:
        return facts
    return facts | {"value": interval.target, "size_bytes": profile.values[interval.target].size_bytes}


def _counters(timeline: Timeline) -> list[Event]:
    curve = timeline.memory_curve()
    return [
        {"name": "live bytes", "ph": "C", "ts": time_ms * _MICROSECONDS_PER_MS, "pid": _PROCESS, "args": {"live": live}}
        for time_ms, live in zip(curve["time_ms"].tolist(), curve["live_bytes"].tolist(), strict=True)
    ]

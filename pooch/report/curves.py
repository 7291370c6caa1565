"""What figures and the page show of a simulated step: its memory curve, its streams as bars, and its title."""

from __future__ import annotations

import numpy
from matplotlib.axes import Axes

from ..ir import Device, Interval, Profile, Timeline

# Bars closer together than this share of the step become one: a thousand hairlines show nothing.
_MERGED_SHARE = 1 / 2000


def memory_curve(timeline: Timeline) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Times in ms, ascending up to the step's end, and the live bytes from each of them until the next."""
    frame = timeline.memory_curve()
    time_ms = numpy.append(frame["time_ms"].to_numpy(), timeline.step_ms)
    live_bytes = frame["live_bytes"].to_numpy()
    return time_ms, numpy.append(live_bytes, live_bytes[-1:])


def stream_bars(timeline: Timeline) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By stream and kind, the start and duration of each bar in ms; neighbours too close to tell apart are merged."""
    grouped: dict[tuple[str, str], list[Interval]] = {}
    for interval in timeline.intervals:
        grouped.setdefault((interval.stream, interval.kind), []).append(interval)
    nearest_ms = timeline.step_ms * _MERGED_SHARE
    return {stream_and_kind: _merged(intervals, nearest_ms) for stream_and_kind, intervals in grouped.items()}


def _merged(intervals: list[Interval], nearest_ms: float) -> list[tuple[float, float]]:
    spans: list[tuple[float, float]] = []
    for interval in sorted(intervals, key=lambda each: each.start_ms):
        if spans and interval.start_ms - spans[-1][1] <= nearest_ms:
            spans[-1] = (spans[-1][0], max(spans[-1][1], interval.end_ms))
        else:
            spans.append((interval.start_ms, interval.end_ms))
    return [(start, end - start) for start, end in spans]


def device_title(device: Device) -> str:
    """The device, and whether it was there."""
    return f"{device.name}{' (modelled)' if device.modelled else ''}"


def profile_title(profile: Profile) -> str:
    """Workload, batch and device, for people."""
    batch = f", batch {profile.batch_size}" if profile.batch_size else ""
    return f"{profile.workload}{batch} on {device_title(profile.device)}"


def byte_unit(most_bytes: float) -> tuple[int, str]:
    """The unit of an axis of memory: its bytes, and its name."""
    return (2**30, "GiB") if most_bytes >= 2 * 2**30 else (2**20, "MiB")


def time_unit(longest_ms: float) -> tuple[float, str]:
    """The unit of an axis of time: its milliseconds, and its name."""
    return (1000.0, "s") if longest_ms >= 2000 else (1.0, "ms")


def mark_passes(axes: Axes, boundary: float) -> None:
    """Write the names of the passes beside the time at which the second one begins."""
    place = axes.get_xaxis_transform()
    axes.text(boundary, 0.99, "forward  ", ha="right", va="top", fontsize=9, transform=place)
    axes.text(boundary, 0.99, "  backward", ha="left", va="top", fontsize=9, transform=place)

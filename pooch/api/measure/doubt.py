"""Times that contradict one another, which happens on a machine that does something else meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...ground.units import format_ms
from .training_report import TrainingReport

SPREAD = 1.5  # between the slowest and the fastest of some equal steps, from which on the machine is taken to be busy
THIRD = 4 / 3  # by which a plain step may differ from the profile
BUSY = "the machine is busy"
REMEDY = f"{BUSY}; repeat with --repeats 5"


def doubt_of_training(report: TrainingReport) -> str | None:
    """Returns why the times of a training are not to be trusted, in one line, or None."""
    spread = max(map(spread_of, (report.plain_step_samples_ms, report.measured_step_samples_ms)))
    if spread >= SPREAD:
        return f"times vary by {spread:.1f}x: {REMEDY}"
    plain_ms, profiled_ms = report.plain_step_ms, report.in_core_step_ms
    if plain_ms and profiled_ms and max(plain_ms / profiled_ms, profiled_ms / plain_ms) >= THIRD:
        beside = f"{format_ms(plain_ms)} now and {format_ms(profiled_ms)} in the profile"
        return f"a plain step takes {beside}: {REMEDY}"
    return None


def doubt_of_sizes(sizes: Sequence[int], steps_ms: Sequence[float]) -> str | None:
    """Returns why the times of a workload at ascending sizes are not to be trusted, without a remedy, or None.

    Args:
        sizes: the sizes.
        steps_ms: the time of a plain step at each of them.
    """
    pairs = list(zip(sizes, steps_ms, strict=True))
    for (smaller, first_ms), (larger, second_ms) in pairwise(pairs):
        if second_ms < first_ms:
            beside = f"{format_ms(second_ms)} at {larger}, and {format_ms(first_ms)} at {smaller}"
            return f"times contradict one another: a plain step takes {beside}: {BUSY}"
    return None


def spread_of(samples_ms: Sequence[float]) -> float:
    """Returns how many times as long as the fastest of some equal steps the slowest took; 1 for a single one."""
    return max(samples_ms) / min(samples_ms) if samples_ms and min(samples_ms) > 0 else 1.0

"""Measures steps that take turns, and summarizes the samples for tables.

A result keeps every sample in the order of measurement, so that other statistics can be computed later.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Row, tell
from pooch.api.measure.timing import Timing
from pooch.api.measure.training import forward_and_backward
from pooch.torchtools.accelerators import synchronize
from pooch.torchtools.training_state import model_device

if TYPE_CHECKING:
    import torch

    from pooch.executor import Run
    from pooch.workloads import Workload

RawSample = Mapping[str, Any]
WARM_UP_TURN = 0
FEWEST_TURNS = 10  # a median of fewer says little on a machine that is shared


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of one step for the whole process, including its threads.

    Attributes:
        wall_ms: elapsed time.
        user_s: processor time outside the kernel.
        system_s: processor time inside the kernel.
        minor_faults: pages that the kernel mapped without reading a disk.
    """

    wall_ms: float
    user_s: float
    system_s: float
    minor_faults: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of numbers: median, quartiles and extremes."""

    median: float
    lower: float
    upper: float
    least: float
    most: float

    def middle(self, form: str, scale: float = 1.0) -> str:
        """Format the middle half, such as "0.80-0.93"."""
        return f"{self.lower * scale:{form}}-{self.upper * scale:{form}}"

    def extremes(self, form: str, scale: float = 1.0) -> str:
        """Format the extremes, such as "0.78 to 1.00"."""
        return f"{self.least * scale:{form}} to {self.most * scale:{form}}"

    def between_extremes(self, form: str) -> str:
        """Format the median with the extremes, such as "0.93 (0.78-1.00)"."""
        return f"{self.median:{form}} ({self.least:{form}}-{self.most:{form}})"


def spread(numbers: Iterable[float]) -> Spread | None:
    """Summarize numbers, or return None if there are none."""
    found = sorted(numbers)
    if not found:
        return None
    if len(found) == 1:
        return Spread(*found * 5)
    lower, median, upper = statistics.quantiles(found, n=4, method="inclusive")
    return Spread(median, lower, upper, found[0], found[-1])


def step_cost(workload: Workload, run: Run | None) -> StepCost:
    """Time a forward and a backward pass, under a run if there is one; gradients are dropped before it."""
    workload.model.zero_grad(set_to_none=True)
    return cost_of(lambda: forward_and_backward(workload, run), model_device(workload.model))


def cost_of(step: Callable[[], object], device: torch.device) -> StepCost:
    """Time a step on a device, from when nothing is pending there until all of it is done."""
    synchronize(device)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step()
    synchronize(device)
    wall_ms, after = (time.perf_counter() - start) * 1000, resource.getrusage(resource.RUSAGE_SELF)
    return StepCost(
        wall_ms,
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


def take_turns(ways: Mapping[str, Callable[[], StepCost]], turns: int) -> list[dict[str, Any]]:
    """Measure each way once per turn, after a warm-up turn (number 0, which does not count in any median).

    The order changes with every turn, so that drift of the machine, and what one step leaves in the allocator for the
    next, affect all ways equally.

    Returns:
        {"turn", "kind", "wall_ms", "user_s", "system_s", "minor_faults"} for each step, in the order in which they ran.
    """
    samples = []
    names = list(ways)
    for turn in range(turns + 1):
        tell(f"turn {turn} of {turns}" if turn else "warming up")
        first = turn % len(names)
        for kind in names[first:] + names[:first]:
            samples.append({"turn": turn, "kind": kind, **asdict(ways[kind]())})
    return samples


def of_kind(samples: Sequence[RawSample], kind: str, what: str = "wall_ms") -> tuple[float, ...]:
    """Return one figure of all samples of a kind, in order, without the warm-up turn."""
    return tuple(sample[what] for sample in samples if sample["kind"] == kind and sample["turn"] != WARM_UP_TURN)


def ratios(samples: Sequence[RawSample], kind: str, base: str = "plain", what: str = "wall_ms") -> tuple[float, ...]:
    """Return the times of a kind relative to those of another in the same turn; empty if either is missing."""
    pairs = zip(of_kind(samples, kind, what), of_kind(samples, base, what), strict=False)
    return tuple(one / other for one, other in pairs)


def timing_of(samples: Sequence[RawSample]) -> Timing:
    """Return the samples in the form that a training report takes."""
    return Timing(of_kind(samples, "plain"), of_kind(samples, "planned"))


def told(numbers: Iterable[float], form: str, scale: float = 1.0, unit: str = "", half_form: str = "") -> str:
    """Format median and middle half, such as "8.13 s (7.90-8.60)"; "" if there are no numbers.

    Args:
        numbers: the numbers to summarize.
        form: format of the median, and of the middle half unless `half_form` is given.
        scale: factor for every number.
        unit: text after the median.
        half_form: format of the middle half.
    """
    found = spread(numbers)
    return "" if found is None else f"{found.median * scale:{form}}{unit} ({found.middle(half_form or form, scale)})"


def told_extremes(numbers: Iterable[float], form: str, scale: float = 1.0, unit: str = "") -> str:
    """Format the extremes, such as "7.50 to 9.10 s"; "" if there are no numbers."""
    found = spread(numbers)
    return "" if found is None else f"{found.extremes(form, scale)}{unit}"


def step_rows(label: Row, samples: Sequence[RawSample]) -> list[Row]:
    """Return a row for each kind of step, with medians, middle halves and extremes.

    Args:
        label: the first columns.
    """
    rows: list[Row] = []
    for kind in dict.fromkeys(sample["kind"] for sample in samples):
        walls_ms = of_kind(samples, kind)
        rows.append(
            {
                **label,
                "steps": kind,
                "turns": len(walls_ms),
                "wall time": told(walls_ms, ".2f", 1e-3, " s"),
                "least to most": told_extremes(walls_ms, ".2f", 1e-3, " s"),
                "user time": told(of_kind(samples, kind, "user_s"), ".2f", unit=" s"),
                "system time": told(of_kind(samples, kind, "system_s"), ".2f", unit=" s"),
                "minor page faults": told(of_kind(samples, kind, "minor_faults"), ",.0f"),
            }
        )
    return rows

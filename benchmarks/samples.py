"""Steps that take turns, measured one by one, and what a table says of such samples.

A result keeps every sample, in the order in which they ran, so that whoever doubts a median can compute another one.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.tables import Row, tell
from pooch.measure.timing import Timing
from pooch.measure.training import forward_and_backward
from pooch.torchtools.accelerators import synchronize
from pooch.torchtools.training_state import model_device

if TYPE_CHECKING:
    from pooch.executor import Run
    from pooch.workloads import Workload

RawSample = Mapping[str, Any]
WARM_UP_TURN = 0
FEWEST_TURNS = 10  # a median of fewer says little on a machine that is shared


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step took of the whole process, its threads included.

    Attributes:
        user_s, system_s: processor time, outside and inside of the kernel.
        minor_faults: pages that the kernel mapped without reading a disk.
    """

    wall_ms: float
    user_s: float
    system_s: float
    minor_faults: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Some numbers in short: their median, their quartiles, and the extremes."""

    median: float
    lower: float
    upper: float
    least: float
    most: float

    def middle(self, form: str, scale: float = 1.0) -> str:
        """The middle half, "0.80-0.93"."""
        return f"{self.lower * scale:{form}}-{self.upper * scale:{form}}"

    def extremes(self, form: str, scale: float = 1.0) -> str:
        """Both ends, "0.78 to 1.00"."""
        return f"{self.least * scale:{form}} to {self.most * scale:{form}}"


def spread(numbers: Iterable[float]) -> Spread | None:
    """None where there are no numbers."""
    found = sorted(numbers)
    if not found:
        return None
    if len(found) == 1:
        return Spread(*found * 5)
    lower, median, upper = statistics.quantiles(found, n=4, method="inclusive")
    return Spread(median, lower, upper, found[0], found[-1])


def step_cost(workload: Workload, run: Run | None) -> StepCost:
    """One step, forward and backward, plainly where there is no run; gradients are dropped before it."""
    device = model_device(workload.model)
    workload.model.zero_grad(set_to_none=True)
    synchronize(device)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    forward_and_backward(workload, run)
    synchronize(device)
    wall_ms, after = (time.perf_counter() - start) * 1000, resource.getrusage(resource.RUSAGE_SELF)
    return StepCost(
        wall_ms,
        after.ru_utime - before.ru_utime,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


def take_turns(ways: Mapping[str, Callable[[], StepCost]], turns: int) -> list[dict[str, Any]]:
    """Measure each way once a turn, after a turn for warming up (number 0, which counts in no median).

    Who goes first changes with every turn: a machine that gets slower or faster while this lasts, and what one step
    leaves behind in the allocator for the next, then touch all alike.

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
    """One figure of all samples of a kind, in order, without the turn for warming up."""
    return tuple(sample[what] for sample in samples if sample["kind"] == kind and sample["turn"] != WARM_UP_TURN)


def ratios(samples: Sequence[RawSample], kind: str, base: str = "plain") -> tuple[float, ...]:
    """Wall time of a kind over that of another one in the same turn; nothing where either was not measured."""
    pairs = zip(of_kind(samples, kind), of_kind(samples, base), strict=False)
    return tuple(one / other for one, other in pairs)


def timing_of(samples: Sequence[RawSample]) -> Timing:
    """The samples as a training report wants them."""
    return Timing(of_kind(samples, "plain"), of_kind(samples, "planned"))


def told(numbers: Iterable[float], form: str, scale: float = 1.0, unit: str = "", half_form: str = "") -> str:
    """The median, and the middle half in brackets: "8.13 s (7.90-8.60)"; nothing of no numbers.

    Args:
        form: of the median, and of the half where `half_form` names no other. scale: every number is multiplied by it.
    """
    found = spread(numbers)
    return "" if found is None else f"{found.median * scale:{form}}{unit} ({found.middle(half_form or form, scale)})"


def told_extremes(numbers: Iterable[float], form: str, scale: float = 1.0, unit: str = "") -> str:
    """The least and the largest: "7.50 to 9.10 s"; nothing of no numbers."""
    found = spread(numbers)
    return "" if found is None else f"{found.extremes(form, scale)}{unit}"


def step_rows(label: Row, samples: Sequence[RawSample]) -> list[Row]:
    """One line for each kind of step: medians, middle halves and extremes of all that was measured.

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

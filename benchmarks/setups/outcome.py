"""What is concluded from the runs of a setup, and its line of the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.setups.setup import USUAL_SHARE, Setup
from benchmarks.tables import Row
from pooch.ground.units import format_bytes

Trained = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one setup.

    Attributes:
        lines: of the script that are Pooch's.
        share: where the budget lies between what stays and the plain peak.
        plain_peak_bytes, measured_peak_bytes: counted in the C library, of the rank with the highest.
        same_bits: compared with plain training; plain training after Pooch was removed included.
        differences: what was not equal.
        plain_steps_ms, steps_ms: of rank 0, both from the process with Pooch, in order.
        pooch: its own summaries, one for each line of the script and rank.
        warnings: that Pooch gave.
        failure: why there is no run with Pooch, "" if there is one.
    """

    setup: str
    shows: str
    lines: int
    share: float
    budget_bytes: int
    plain_peak_bytes: int
    measured_peak_bytes: int
    same_bits: bool
    differences: tuple[str, ...]
    plain_steps_ms: tuple[float, ...]
    steps_ms: tuple[float, ...]
    pooch: tuple[Mapping[str, Any], ...]
    warnings: tuple[str, ...] = ()
    failure: str = ""

    @property
    def is_within(self) -> bool:
        return not self.failure and self.measured_peak_bytes <= self.budget_bytes

    def as_data(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "is_within": self.is_within}


def _peak_bytes(runs: Sequence[Trained]) -> int:
    return max(step["peak_bytes"] for run in runs for step in run["steps"])


def budget_of(setup: Setup, plain: Sequence[Mapping[str, Trained]]) -> int:
    """A budget that plain training passes."""
    runs = [rank["trained"] for rank in plain]
    stays_bytes = max(step["live_bytes"] for run in runs for step in run["steps"])
    return int(stays_bytes + setup.share * (_peak_bytes(runs) - stays_bytes))


def outcome_of(
    setup: Setup,
    budget_bytes: int,
    plain: Sequence[Mapping[str, Trained]],
    governed: Sequence[Mapping[str, Trained]] | None,
    failure: str = "",
) -> Outcome:
    """Compare the runs, rank by rank.

    Args:
        governed: None where there is no run with Pooch, for the reason in `failure`.
    """
    references = [rank["trained"] for rank in plain]
    runs = [rank["trained"] for rank in governed or ()]
    again = [rank["plain again"] for rank in governed or ()]
    differences = [
        f"{which}, {name}"
        for which, others in (("with Pooch", runs), ("plainly after Pooch", again))
        for one, other in zip(references, others, strict=bool(others))
        for name in one["values"]
        if one["values"][name] != other["values"].get(name)
    ]
    return Outcome(
        setup.name,
        setup.shows,
        0 if setup.by_exec else references[0]["lines"],
        setup.share,
        budget_bytes,
        _peak_bytes(references),
        _peak_bytes(runs) if runs else 0,
        bool(runs) and not differences,
        tuple(dict.fromkeys(differences)),
        tuple(step["ms"] for step in again[0]["steps"]) if again else (),
        tuple(step["ms"] for step in runs[0]["steps"]) if runs else (),
        tuple(summary for run in runs for summary in run["pooch"]),
        tuple(dict.fromkeys(text for run in runs for text in run["warnings"])),
        failure,
    )


def _later_half(times_ms: Sequence[float]) -> float:
    return statistics.median(times_ms[len(times_ms) // 2 :])


def row_of(outcome: Mapping[str, Any]) -> Row:
    """The line of a setup, from its stored outcome alone."""
    share = "" if outcome["share"] == USUAL_SHARE else f" ({outcome['share']:.0%})"
    row = {
        "setup": outcome["setup"],
        "what is special": outcome["shows"],
        "lines": outcome["lines"],
        "plain peak": format_bytes(outcome["plain_peak_bytes"]),
        "budget": format_bytes(outcome["budget_bytes"]) + share,
    }
    if outcome["failure"]:
        return {**row, "measured peak": "", "within": "no", "same bits": "no", "plan/online/in-core": "", "time": ""}
    counts = [sum(each[f"steps_{kind}"] for each in outcome["pooch"]) for kind in ("on_plan", "online", "in_core")]
    return {
        **row,
        "measured peak": format_bytes(outcome["measured_peak_bytes"]),
        "within": "yes" if outcome["is_within"] else "no",
        "same bits": "yes" if outcome["same_bits"] else f"no: {'; '.join(outcome['differences'])}",
        "plan/online/in-core": "/".join(map(str, counts)),
        "time": f"{_later_half(outcome['steps_ms']) / _later_half(outcome['plain_steps_ms']):.2f}",
    }

"""The last step in figures, for progress bars and the logs of other frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..ir import Plan

Mode = Literal["plan", "online", "recorded", "in-core", "off-path", "none"]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Status:
    """How the last step ran. `str()` gives a few words for a progress bar.

    Attributes:
        steps: Number of steps so far.
        mode: How the last one ran: under a "plan", "online", "recorded" (online, and recorded for a plan), "in-core"
            (without Pooch), or "off-path" (it left the plan of `pooch.apply`). "none" before the first.
        peak_mib: Its measured peak in MiB, or that of the last measured step. None: not measured yet.
        budget_mib: The budget in MiB. None: not known yet, or there is none.
        slowdown: Its predicted time over that of a step without Pooch. None: not known.
    """

    steps: int
    mode: Mode
    peak_mib: float | None
    budget_mib: float | None
    slowdown: float | None

    @classmethod
    def of(
        cls, steps: int, mode: Mode, peak_bytes: int | None, budget_bytes: int | None, slowdown: float | None
    ) -> Status:
        """The status with sizes that are given in bytes."""
        peak_mib, budget_mib = (None if size is None else round(size / _MIB, 2) for size in (peak_bytes, budget_bytes))
        return cls(steps, mode, peak_mib, budget_mib, None if slowdown is None else round(slowdown, 4))

    def as_dict(self) -> dict[str, float | str]:
        """What is known, by the names under which it is logged, such as "pooch/peak_mib"."""
        names = ("steps", "mode", "peak_mib", "budget_mib", "slowdown")
        found = {f"pooch/{name}": getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def as_numbers(self) -> dict[str, float]:
        """`as_dict` for loggers that take numbers alone: "pooch/on_plan" (1 or 0) stands for the mode."""
        numbers = {name: float(value) for name, value in self.as_dict().items() if not isinstance(value, str)}
        return {**numbers, "pooch/on_plan": float(self.mode == "plan")}

    def __str__(self) -> str:
        if self.mode == "none":
            return "no step yet"
        budget = "" if self.budget_mib is None else f" of {self.budget_mib:.1f}"
        peak = "" if self.peak_mib is None else f", {self.peak_mib:.1f}{budget} MiB"
        slowdown = "" if self.slowdown is None else f", {self.slowdown:.2f}x predicted"
        return f"{self.mode}{peak}{slowdown}"


def predicted_slowdown(plan: Plan) -> float | None:
    """The predicted time of a step under a plan over that of a step without one."""
    return plan.predicted_step_ms / plan.in_core_step_ms if plan.in_core_step_ms else None

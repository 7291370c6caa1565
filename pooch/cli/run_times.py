"""Where the time of a process went that ran a script under a budget: what `time` would count."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..autopilot.summary import AutoSummary


def process_age_s() -> float:
    """Time since the operating system has started this process."""
    import psutil

    created_s: float = psutil.Process().create_time()
    return max(0.0, time.time() - created_s)


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Where the time went.

    Attributes:
        starting_s: Until the script began: Python, PyTorch and Pooch.
        preparing_s: Until the first model was under the budget.
        ending_s: After the script.
        whole_s: Of the process.
    """

    starting_s: float
    preparing_s: float
    ending_s: float
    whole_s: float

    def line(self, summary: AutoSummary) -> str:
        """Where the time went, in one line."""
        steps = f"{summary.steps_ms / 1000:.1f} s in steps"
        if summary.compared_ms:
            steps += f", {summary.lost_ms / 1000:.1f} s of it longer than plain ones"
        own = f"{self.starting_s:.1f} s to start Python, PyTorch and Pooch, {self.preparing_s:.1f} s to prepare"
        planning = f"; planning ran for {summary.planning_s:.1f} s beside it" if summary.planning_s else ""
        return f"{self.whole_s:.1f} s in all: {own}, {steps}, {self.ending_s:.1f} s to end{planning}"

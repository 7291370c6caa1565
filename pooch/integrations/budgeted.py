"""What the callbacks of all frameworks share: a budget that is held while a training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..autopilot import auto as hold_budget
from ..ground.errors import UsageError
from ..ground.visible import one_line

if TYPE_CHECKING:
    from torch import nn

    from ..autopilot import Auto, AutoSummary


class BudgetedTraining:
    """Holds a budget from `hold` to `remove`, one training after the other.

    Args:
        budget: as `pooch.auto` takes it.
        host_budget: as `pooch.auto` takes it.
        cache: as `pooch.auto` takes it.
        quiet: as `pooch.auto` takes it.

    Attributes:
        auto: what holds the budget while a training runs, else None.
    """

    def __init__(
        self,
        budget: float | str,
        *,
        host_budget: float | str | None = None,
        cache: str | Path | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        self._budget = budget
        self._options: dict[str, Any] = {"host_budget": host_budget, "cache": cache, "quiet": quiet}
        self.auto: Auto | None = None
        self._summary: AutoSummary | None = None

    def __repr__(self) -> str:
        held = "no training is running" if self.auto is None else repr(self.auto)
        return f"{type(self).__name__}({one_line(str(self._budget))}, {held})"

    def logged(self) -> dict[str, float]:
        """Returns how the last step ran, in numbers by the names under which they are logged; none before the first."""
        if self.auto is None:
            return {}
        status = self.auto.status()
        return status.as_numbers() if status.steps else {}

    def hold(self, models: nn.Module | Sequence[nn.Module]) -> None:
        """Attaches to the models. A training that ended with an error may still be attached, and is detached."""
        self.remove()
        self.auto = hold_budget(models, self._budget, **self._options)

    def summary(self) -> AutoSummary:
        """Returns what happened so far, or in the training that ended last.

        Raises:
            UsageError: if no training has begun.
        """
        if self.auto is not None:
            return self.auto.summary()
        if self._summary is None:
            raise UsageError("no training has begun: begin one before asking for a summary")
        return self._summary

    def remove(self) -> None:
        """Detaches from the models; only needed after a training that ended with an error."""
        if self.auto is not None:
            self._summary = self.auto.summary()
            self.auto.remove()
            self.auto = None

"""A budget over a training that tests have prepared for one."""

from __future__ import annotations

from typing import Any

from pooch.autopilot import auto


class Under:
    """Holds a budget over a training, and keeps what happened.

    Args:
        budget: As `pooch.auto` takes it.
        options: Further ones, likewise.
    """

    def __init__(self, budget: str | int = "70%", **options: Any) -> None:
        self.budget, self._options, self.told = budget, options, list[str]()
        self.summary: Any = None  # an `AutoSummary`, from the end on

    def __call__(self, model: Any) -> Any:
        self._auto = auto(model, self.budget, tell=self.told.append, **self._options)
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        self.summary = self._auto.summary()
        self._auto.remove()

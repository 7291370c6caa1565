"""The ways in which a setup trains: plainly, with the lines that Pooch takes, or as it is under `pooch exec`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from benchmarks.setups.record import Record

if TYPE_CHECKING:
    from pooch.autopilot.finding import ModelFinder

WAIT_EVERY = 4  # steps
LONGEST_WAIT_S = 15.0


class Way:
    """Handed to a setup. Each call of `auto` or of a `..._callbacks` stands for one line that Pooch adds to a script.

    Args:
        record: of the training.
        budget_bytes: None for plain training, in which these lines do nothing.
        finder: what holds the budget under `pooch exec`, in which these lines do nothing either.

    Attributes:
        lines: how many of them there were.
    """

    def __init__(self, record: Record, budget_bytes: int | None, finder: ModelFinder | None = None) -> None:
        self.record, self.budget_bytes, self.lines = record, budget_bytes, 0
        self._finder = finder
        self._governing: list[Any] = [] if finder is None else [finder]
        self._open = ExitStack()
        if budget_bytes is not None or finder is not None:
            record.pause = self._wait_for_plans

    def auto(self, models: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
        """`pooch.auto(models, budget, optimizer)`."""
        self.lines += 1
        if self.budget_bytes is not None:
            import pooch

            auto = pooch.auto(models, self.budget_bytes, optimizer)  # type: ignore[attr-defined]
            self._open.callback(auto.remove)
            self._governing.append(auto)
        self.record.begin()

    def transformers_callbacks(self) -> list[Any]:
        """`callbacks=[PoochCallback(budget)]` of a Trainer."""
        self.lines += 1
        if self.budget_bytes is None:
            return []
        from pooch.integrations.transformers import PoochCallback

        return self._watched(PoochCallback(self.budget_bytes))

    def lightning_callbacks(self) -> list[Any]:
        """`callbacks=[PoochCallback(budget)]` of a Lightning Trainer."""
        self.lines += 1
        if self.budget_bytes is None:
            return []
        from pooch.integrations.lightning import PoochCallback

        return self._watched(PoochCallback(self.budget_bytes))

    def _watched(self, callback: Any) -> list[Any]:
        self._governing.append(callback)
        return [callback]

    def _wait_for_plans(self, steps: int) -> None:
        """Now and then, wait for what is planned beside training, which would be over before otherwise."""
        if steps % WAIT_EVERY:
            return
        autos = [each if hasattr(each, "is_planning") else each.auto for each in self._governing]
        end_s = time.monotonic() + LONGEST_WAIT_S
        while any(auto is not None and auto.is_planning for auto in autos) and time.monotonic() < end_s:
            time.sleep(0.1)

    def finish(self) -> list[dict[str, Any]]:
        """Removes Pooch from the models and returns its summaries, one for each line."""
        found = [each.stop() if each is self._finder else each.summary() for each in self._governing]
        if None in found:
            raise RuntimeError("pooch exec has found no model")
        self._open.close()
        self._governing.clear()
        return [{**_plain(summary), "told": str(summary)} for summary in found]


SUMMARY = ("steps", "steps_on_plan", "steps_online", "steps_in_core", "peak_bytes", "budget_bytes", "lost_ms")


def _plain(summary: Any) -> dict[str, Any]:
    """The figures of a summary."""
    return {name: getattr(summary, name) for name in SUMMARY}

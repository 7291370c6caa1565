"""What a loop is given: it says which models it trains, when a step has ended, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torch import nn

from benchmarks.setups.record import Record

if TYPE_CHECKING:
    from pooch.autopilot.finding import ModelFinder

Train = Callable[["Loop"], None]
LOOPS: dict[str, Train] = {}
NEEDS: dict[str, str] = {}
FIGURES = ("steps", "steps_on_plan", "steps_online", "steps_in_core", "steps_over_budget", "peak_bytes", "ungoverned")
WAIT_AFTER = (2, 4)  # steps, for a plan that is being made beside a training of so few steps
LONGEST_WAIT_S = 4.0


def loop(needs: str = "") -> Callable[[Train], Train]:
    """Registers a function as the loop of its name.

    Args:
        needs: The package that it needs besides torch, "" for none.
    """

    def registered(train: Train) -> Train:
        name = train.__name__.replace("_", "-")
        LOOPS[name], NEEDS[name] = train, needs
        return train

    return registered


class Loop:
    """Handed to a loop.

    Args:
        record: Of the training.
        budget_bytes: None for plain training.
        finder: What holds the budget under `pooch exec`; None elsewhere.

    Attributes:
        begins: Called when training begins, where a loop says so itself.
        told: What Pooch said.
        thread_ms: Processor time of this thread, by step.
        held_bytes: What the script holds when training begins, apart from the models: data above all.
    """

    def __init__(self, record: Record, budget_bytes: int | None, finder: ModelFinder | None, told: list[str]) -> None:
        self.record, self.told = record, told
        self._budget_bytes, self._finder = budget_bytes, finder
        self._governing: list[Any] = []
        self._open = ExitStack()
        self.thread_ms, self.held_bytes = list[float](), 0
        self.begins: Callable[[], None] = lambda: None
        self._since_s = time.thread_time()
        record.pause = self._ended

    def governs(self, models: nn.Module | Sequence[nn.Module], optimizer: Any = None) -> None:
        """The line `pooch.auto(models, budget, optimizer)`, which `pooch exec` does without."""
        if self._budget_bytes is not None and self._finder is None:
            import pooch

            auto = pooch.auto(models, self._budget_bytes, optimizer, tell=self.told.append)  # type: ignore[attr-defined]
            self._open.callback(auto.remove)
            self._governing.append(auto)
        each_model = [models] if isinstance(models, nn.Module) else models
        own = {each for model in each_model for each in (*model.parameters(), *model.buffers())}
        self.held_bytes = self.record.counter.live_bytes - sum(each.nbytes for each in own)
        self.begins()
        self.record.begin()
        self._since_s = time.thread_time()

    def callbacks(self, framework: str) -> list[Any]:
        """`callbacks=[PoochCallback(budget)]`.

        Args:
            framework: "transformers" or "lightning".
        """
        if self._budget_bytes is None or self._finder is not None:
            return []
        from pooch.integrations import lightning, transformers

        made = {"transformers": transformers, "lightning": lightning}[framework].PoochCallback(self._budget_bytes)
        self._governing.append(made)
        return [made]

    def step(self, *losses: Any) -> None:
        """A step of the optimizer ended."""
        self.record.step(*losses)

    def value(self, name: str, value: Any) -> None:
        """A number that the script prints."""
        self.record.value(name, value)

    def state(self, name: str, state: Any) -> None:
        """What the script would save in the end."""
        self.record.state(name, state)

    def _autos(self) -> list[Any]:
        governing = self._governing if self._finder is None else [self._finder.auto]
        return [auto for each in governing if (auto := getattr(each, "auto", each)) is not None]

    def _ended(self, done: int) -> None:
        """Note the time of a step, and wait for a plan in the first ones: a training of so few would be over before."""
        self.thread_ms.append(1000 * (time.thread_time() - self._since_s))
        if self._budget_bytes is not None:
            self._wait_for_a_plan(done)
        self._since_s = time.thread_time()

    def _wait_for_a_plan(self, done: int) -> None:
        end_s = time.monotonic() + LONGEST_WAIT_S
        while done in WAIT_AFTER and time.monotonic() < end_s and any(each.is_planning for each in self._autos()):
            time.sleep(0.05)

    def finish(self) -> dict[str, Any] | None:
        """Takes Pooch off, and returns its figures, or None without it."""
        if self._budget_bytes is None:
            return None
        if self._finder is not None:
            summaries = [self._finder.stop()]
            self.told += self._finder.refusals
        else:
            summaries = [each.summary() for each in self._governing]
        self._open.close()
        found = [summary for summary in summaries if summary is not None]
        figures = {name: sum(getattr(each, name) for each in found) for name in FIGURES}
        return {**figures, "verdict": "; ".join(str(each).splitlines()[0] for each in found) or "no model was found"}

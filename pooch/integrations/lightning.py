"""A callback for Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..autopilot import auto as hold_budget
from ..errors import UsageError

if TYPE_CHECKING:
    from ..autopilot import Auto, AutoSummary

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves


class PoochCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Trains within a budget: `Trainer(..., callbacks=[PoochCallback("16GiB")])`.

    The LightningModule itself is not called while it trains, `training_step` calls its submodules: these are what Pooch
    attaches to. Manual optimization, several optimizers and DDP work alike; validation is unaffected.

    Args:
        budget: as `pooch.auto` takes it.
        host_budget: as `pooch.auto` takes it.
        cache: as `pooch.auto` takes it.

    Attributes:
        auto: what holds the budget while a training runs, else None.
    """

    def __init__(
        self, budget: int | str, *, host_budget: int | str | None = None, cache: str | Path | None = None
    ) -> None:
        self._budget = budget
        self._options: dict[str, Any] = {"host_budget": host_budget, "cache": cache}
        self.auto: Auto | None = None
        self._summary: AutoSummary | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches to the submodules."""
        self.remove()
        modules = list(_called_modules(pl_module))
        if not modules:
            raise UsageError(
                f"{type(pl_module).__name__} has no submodule with parameters: hold the network as an attribute of it"
            )
        self.auto = hold_budget(modules, self._budget, **self._options)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detaches, and says so if nothing was covered."""
        self.remove()
        if self._summary is not None and not self._summary.steps:
            warnings.warn(
                f"no step was covered: training_step of {type(pl_module).__name__} called none of its submodules; "
                "call them (`self.net(x)`) rather than their methods",
                stacklevel=2,
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detaches: there is no `on_train_end`."""
        self.remove()

    def summary(self) -> AutoSummary:
        """Returns what happened so far, or in the training that ended last.

        Raises:
            UsageError: if no training has begun.
        """
        if self.auto is not None:
            return self.auto.summary()
        if self._summary is None:
            raise UsageError("no training has begun: call trainer.fit(module) before asking for a summary")
        return self._summary

    def remove(self) -> None:
        """Detaches from the submodules."""
        if self.auto is not None:
            self._summary = self.auto.summary()
            self.auto.remove()
            self.auto = None


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that are called themselves and have parameters (metrics have none)."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_modules(child)
        elif next(child.parameters(), None) is not None:
            yield child

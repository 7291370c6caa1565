"""A callback for Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from ..ground.errors import UsageError
from .budgeted import BudgetedTraining

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # are never called themselves


class PoochCallback(BudgetedTraining, Callback):  # type: ignore[misc, unused-ignore]
    """Trains within a budget: `Trainer(..., callbacks=[PoochCallback("16GiB")])`.

    The LightningModule itself is not called while it trains, `training_step` calls its submodules: these are what Pooch
    attaches to. Manual optimization, several optimizers and DDP work alike; validation is unaffected. How the last step
    ran is logged with the module's own metrics, as `pooch/peak_mib`, `pooch/on_plan` and others (`Auto.status()`).

    Args:
        budget: as `pooch.auto` takes it.
        host_budget: as `pooch.auto` takes it.
        cache: as `pooch.auto` takes it.
        quiet: as `pooch.auto` takes it.

    Attributes:
        auto: what holds the budget while a training runs, else None.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches to the submodules."""
        modules = list(_called_modules(pl_module))
        if not modules:
            raise UsageError(
                f"{type(pl_module).__name__} has no submodule with parameters: hold the network as an attribute of it"
            )
        self.hold(modules)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Logs how the last step ran."""
        numbers = self.logged()
        if numbers:
            pl_module.log_dict(numbers, on_step=True, on_epoch=False, batch_size=1)

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


def _called_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules that are called themselves and have parameters (metrics have none)."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _called_modules(child)
        elif next(child.parameters(), None) is not None:
            yield child

"""A callback for the Trainer of transformers, and for all that are derived from it (TRL), with PEFT or without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from ..autopilot import auto as hold_budget
from ..errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from ..autopilot import Auto, AutoSummary


class PoochCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Trains within a budget: `Trainer(..., callbacks=[PoochCallback("16GiB")])`.

    Evaluation and saving are unaffected. One callback serves several trainings in a row.

    Args:
        budget: as `pooch.auto` takes it.
        host_budget: as `pooch.auto` takes it.
        cache: as `pooch.auto` takes it.

    Attributes:
        auto: what holds the budget while a training runs, else None.

    Raises:
        UsageError: when the Trainer is made or begins, if it has `gradient_checkpointing=True`.
    """

    def __init__(
        self, budget: int | str, *, host_budget: int | str | None = None, cache: str | Path | None = None
    ) -> None:
        self._budget = budget
        self._options: dict[str, Any] = {"host_budget": host_budget, "cache": cache}
        self.auto: Auto | None = None
        self._summary: AutoSummary | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses what cannot be combined before anything is loaded or trained."""
        _check(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Attaches to the model."""
        _check(args)  # a callback that was added later saw no `on_init_end`
        self.remove()  # a training that ended with an error had no `on_train_end`
        assert model is not None
        self.auto = hold_budget(model, self._budget, **self._options)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detaches from the model."""
        self.remove()

    def summary(self) -> AutoSummary:
        """Returns what happened so far, or in the training that ended last.

        Raises:
            UsageError: if no training has begun.
        """
        if self.auto is not None:
            return self.auto.summary()
        if self._summary is None:
            raise UsageError("no training has begun: call trainer.train() before asking for a summary")
        return self._summary

    def remove(self) -> None:
        """Detaches from the model; only needed after a training that ended with an error."""
        if self.auto is not None:
            self._summary = self.auto.summary()
            self.auto.remove()
            self.auto = None


_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # the second is the name since transformers 5


def _check(arguments: TrainingArguments) -> None:
    for name in _CHECKPOINTING:
        if getattr(arguments, name, False):
            raise UsageError(
                f"{name}=True leaves PoochCallback nothing to decide: set {name}=False (the configs of TRL, such as "
                "SFTConfig, set it to True by default)"
            )

"""A callback for the Trainer of transformers, and for all that are derived from it (TRL), with PEFT or without."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..ground.errors import UsageError
from .budgeted import BudgetedTraining

if TYPE_CHECKING:
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments


class PoochCallback(BudgetedTraining, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Trains within a budget: `Trainer(..., callbacks=[PoochCallback("16GiB")])`.

    Evaluation and saving are unaffected. One callback serves several trainings in a row. Whatever the Trainer logs also
    says how the last step ran, as `pooch/peak_mib`, `pooch/on_plan` and others (`Auto.status()`).

    Args:
        budget: as `pooch.auto` takes it.
        host_budget: as `pooch.auto` takes it.
        cache: as `pooch.auto` takes it.
        quiet: as `pooch.auto` takes it.

    Attributes:
        auto: what holds the budget while a training runs, else None.

    Raises:
        UsageError: when the Trainer is made or begins, if it has `gradient_checkpointing=True`.
    """

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
        _come_first(self, sys._getframe(1))
        _check(args)  # a callback that was added later saw no `on_init_end`
        assert model is not None
        self.hold(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds how the last step ran to what is being logged, and to its entry in the history."""
        numbers = self.logged()
        if logs is None or "loss" not in logs:  # of an evaluation, or of the whole training
            return
        logs |= numbers
        if state.log_history:
            state.log_history[-1] |= numbers

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detaches from the model."""
        self.remove()


def _come_first(callback: TrainerCallback, caller: FrameType) -> None:
    """Makes a callback the first of its Trainer: those that report to a file or service would log without it.

    A Trainer puts them before those of the user, and its callbacks never see the Trainer itself.
    """
    handler = caller.f_locals.get("self")
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)


_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")  # the second is the name since transformers 5


def _check(arguments: TrainingArguments) -> None:
    for name in _CHECKPOINTING:
        if getattr(arguments, name, False):
            raise UsageError(
                f"{name}=True leaves PoochCallback nothing to decide: set {name}=False (the configs of TRL, such as "
                "SFTConfig, set it to True by default)"
            )

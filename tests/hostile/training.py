"""Trains a case, with or without something that governs it, and compares all that it leaves bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tests.hostile.case import Hostile
from tests.hostile.settings import random_states, seed_everything, settings, settings_kept

Build = Callable[[], Hostile]
Found = dict[str, Tensor]


class Governor(Protocol):
    """What governs a training."""

    def attached(self, model: Hostile) -> AbstractContextManager[None]:
        """Govern a model inside the context."""

    def step_ended(self) -> None:
        """Note that a backward pass is over."""


@dataclass
class Trained:
    """What a training left.

    Attributes:
        found: All that must be the same, by name.
        error: The error that ended it, or None.
        steps: Number of whole steps before it ended.
    """

    found: Found = field(default_factory=dict)
    error: BaseException | None = None
    steps: int = 0


def built(build: Build) -> Hostile:
    """Return a fresh model, the same each time."""
    seed_everything(0)
    return build()


def call(model: Hostile) -> Tensor:
    """Run a forward pass."""
    with model.around():
        loss: Tensor = model(model.batch(model.number))
    return loss


def train(build: Build, governor: Governor | None = None, steps: int | None = None) -> Trained:
    """Train a fresh model.

    Errors in the training itself are returned, those in attaching the governor are raised.
    """
    trained = Trained()
    with quiet(), settings_kept():
        model = built(build)
        with governor.attached(model) if governor is not None else _nothing():
            seed_everything(1)
            try:
                _run(model, governor, trained, steps or model.steps)
            except Exception as error:  # noqa: BLE001  # whatever comes is the finding
                trained.error = error
                forget_frames(error)
        trained.found |= {name: kept(tensor) for name, tensor in model.named_parameters()}
        trained.found |= {name: kept(tensor) for name, tensor in model.named_buffers()}
        trained.found |= random_states(model)
        trained.found["settings"] = torch.tensor(list(str(settings()).encode()))
    return trained


def _run(model: Hostile, governor: Governor | None, trained: Trained, steps: int) -> None:
    for number in range(steps):
        model.number = number
        model.before_step()
        optimizer = model.optimizer()
        if number % model.accumulated == 0:
            optimizer.zero_grad()
        loss = call(model)
        model.between()
        loss.backward()
        if governor is not None:
            governor.step_ended()
        trained.found[f"step {number}: loss"] = kept(loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                trained.found[f"step {number}: {name}.grad"] = kept(parameter.grad)
        del loss
        if (number + 1) % model.accumulated == 0:
            optimizer.step()
        model.after_step()
        trained.steps += 1


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings: what leaves its path is correct, and told again and again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold in which an error was raised: such tensors would be alive in later trainings."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def kept(tensor: Tensor) -> Tensor:
    """Return a copy that nothing else can change."""
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.layout is not torch.strided else tensor).clone()


def first_difference(one: Found, other: Found) -> str | None:
    """Return the name of the first entry that differs in any bit, or None."""
    for name, tensor in one.items():
        if name not in other:
            return f"{name} is missing"
        if not _is_same(tensor, other[name]):
            return name
    return next((f"{name} is new" for name in other if name not in one), None)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    raw = [t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return bool(torch.equal(*raw))

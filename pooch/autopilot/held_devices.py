"""The devices on which a budget is held: one on each."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from ..ground.errors import UsageError
from ..torchtools.training_state import model_device


class Held(Protocol):
    """What holds a budget."""

    def remove(self) -> None:
        """Hold it no longer."""

    def leave_alone(self) -> None:
        """Hold nothing in a forked child."""


_HELD: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
_BEGINNING: dict[str, object] = {}  # on which devices one is about to be held, and what stands for that


@contextmanager
def beginning(device: torch.device) -> Iterator[None]:
    """Context manager in which a budget begins to be held on a device, where there may be only one.

    Args:
        device: The device.

    Raises:
        UsageError: If one is held there, or another thread has begun to hold one.
    """
    own = object()
    if device.type in _HELD or _BEGINNING.setdefault(device.type, own) is not own:
        raise UsageError(
            f"a budget is held on {device.type} already: give all models in one list, as in "
            "pooch.auto([generator, discriminator], ...), call remove() on what pooch.auto returned, or give "
            "replace=True"
        )
    try:
        yield
    finally:
        _BEGINNING.pop(device.type, None)


def end_held(models: Iterable[object]) -> None:
    """End the budgets that are held on the devices of some models, so that another one can be.

    Args:
        models: The models; what is none is left to be refused.

    Raises:
        UsageError: If a step is running in another thread, which alone can end it.
    """
    for kind in {model_device(model).type for model in models if isinstance(model, torch.nn.Module)}:
        held = _HELD.get(kind)
        if held is not None:
            held.remove()


def note_held(device: torch.device, held: Held) -> None:
    """Note that a budget is held on a device. What holds it is not kept alive."""
    _HELD[device.type] = held


def note_released(device: torch.device, held: Held) -> None:
    """Note that it is not any more."""
    if _HELD.get(device.type) is held:
        del _HELD[device.type]


def _leave_child_alone() -> None:
    for held in list(_HELD.values()):
        held.leave_alone()
    _HELD.clear()
    _BEGINNING.clear()  # the threads that had begun are not here


os.register_at_fork(after_in_child=_leave_child_alone)

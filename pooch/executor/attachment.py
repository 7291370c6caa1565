"""Where a run meets its model: a region around the model's calls, and an eye on parts that run outside of it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from pooch.torchtools.calls import CallRegion, Region, refuse_compiled
from pooch.torchtools.tensors import version_of


class Attachment:
    """Puts a region around each call of a model, and takes it off again.

    The model holds the region, and nothing that the run holds does: a model that is let go of is gone at once, its plan
    with it.

    Args:
        model: whose calls they are.
        region: makes the context of one call.
        outside: a method; called with the name of a part of the model that runs while the model itself is not being
            called, as when `model.forward(...)` is called, or a LightningModule's `training_step` calls the parts.
            None: nobody needs to know.

    Raises:
        UsageError: the model is compiled, or under a plan.
    """

    def __init__(self, model: torch.nn.Module, region: Region, outside: Callable[[str], None] | None) -> None:
        self._model = weakref.ref(model)
        calls = _Calls()
        placed = [CallRegion(model, partial(_counted, calls, region), "plan")]
        if outside is not None:
            placed += _watches(model, calls, outside)
        self._placed = [weakref.ref(each) for each in placed]
        self._versions = _versions(model)

    def was_trained(self) -> bool:
        """Whether the model's parameters were written since, as an optimizer does."""
        model = self._model()
        return model is not None and _versions(model) != self._versions

    def refuse_compiled(self) -> None:
        """Refuse to go on with a model of which something was compiled since.

        Raises:
            UsageError: so it was.
        """
        model = self._model()
        if model is not None:
            refuse_compiled(model)

    def remove(self) -> None:
        """Take the regions off; what was wrapped around the model, or took their place, stays."""
        for reference in self._placed:
            placed = reference()
            if placed is not None:
                placed.remove()


class _Calls(threading.local):
    """How many calls of the model a thread is inside of."""

    depth = 0


@contextmanager
def _counted(calls: _Calls, region: Region) -> Iterator[None]:
    calls.depth += 1
    try:
        with region():
            yield
    finally:
        calls.depth -= 1


def _watches(model: torch.nn.Module, calls: _Calls, outside: Callable[[str], None]) -> list[CallRegion]:
    tell = weakref.WeakMethod(outside)  # a part may outlive the model, and shall not keep the run
    return [CallRegion(part, partial(_watched, calls, tell, name), "watch") for name, part in _callable_parts(model)]


@contextmanager
def _watched(calls: _Calls, tell: weakref.WeakMethod[Callable[[str], None]], name: str) -> Iterator[None]:
    outside = tell()
    if calls.depth == 0 and outside is not None:
        outside(name)
    yield


def _callable_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules that the model's own code calls: its children, and those of lists and dictionaries of modules."""
    for name, part in model.named_children():
        if isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from ((f"{name}.{inner}", each) for inner, each in _callable_parts(part))
        else:
            yield name, part


def _versions(model: torch.nn.Module) -> int:
    return sum(version_of(parameter) for parameter in model.parameters())

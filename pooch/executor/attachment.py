"""Attaches a run to a model: a region around the model's calls, and a watch for parts that run outside of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..ground.weakly import weakly
from ..torchtools.calls import CallContext, CallingThread, CallRegion, Region, refuse_compiled
from ..torchtools.tensors import version_of


class Attachment:
    """Puts a region around each call of a model, and removes it again.

    Only the model holds the region. The run holds weak references, so a model that is released is freed at once,
    together with its plan.

    Args:
        model: The model whose calls are wrapped.
        region: Returns the context manager for one call.
        has_graphs: Whether compiled graphs are among the ops of its plan.
        outside: A method that is called with the name of a submodule that runs outside of a call of the model, as when
            `model.forward(...)` is called, or when a LightningModule's `training_step` calls submodules directly. None
            watches nothing.

    Raises:
        UsageError: If the model is compiled though the plan knows no graphs, or already under a plan.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        region: Region,
        outside: Callable[[str], None] | None,
        *,
        has_graphs: bool = False,
    ) -> None:
        self._model = weakref.ref(model)
        here = CallingThread()
        self._has_graphs = has_graphs
        placed = [CallRegion(model, partial(_Call, here, region), "plan", takes_compiled=has_graphs)]
        if outside is not None:
            tell = weakly(outside)  # a submodule may outlive the model, and must not keep the run alive
            parts = [] if has_graphs else callable_parts(model)  # what a graph calls would be compiled anew
            placed += [CallRegion(part, partial(_told, tell, name), "watch", here) for name, part in parts]
        self._placed = [weakref.ref(each) for each in placed]
        self._versions = _versions(model)

    def was_trained(self) -> bool:
        """Whether the model's parameters were written since the plan was applied, as an optimizer does."""
        model = self._model()
        return model is not None and _versions(model) != self._versions

    def refuse_compiled(self) -> None:
        """Refuse a model that was compiled, in whole or in part, after the plan was applied.

        Raises:
            UsageError: If anything in the model is compiled, and the plan knows no graphs.
        """
        model = self._model()
        if model is not None and not self._has_graphs:
            refuse_compiled(model)

    def remove(self) -> None:
        """Remove the regions. Wrappers around the model, and anything that replaced the regions, stay."""
        for reference in self._placed:
            placed = reference()
            if placed is not None:
                placed.remove()


class _Call(CallContext):
    """The region of one call of the model. Nothing is done around the parts that it calls meanwhile."""

    def __init__(self, here: CallingThread, region: Region) -> None:
        self._here, self._region = here, region()
        self._outer: CallContext | None = None

    def __enter__(self) -> None:
        self._region.__enter__()
        self._outer, self._here.call = self._here.call, self

    def __exit__(self, *exception: Any) -> bool | None:
        self._here.call = self._outer
        return self._region.__exit__(*exception)


@contextmanager
def _told(tell: Callable[[str], None], name: str) -> Iterator[None]:
    if torch._C._current_graph_task_id() == -1:  # else a checkpoint of a planned call computes it again
        tell(name)
    yield


def callable_parts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that the model's code calls: its children, and the items of `ModuleList` and `ModuleDict`."""
    for name, part in model.named_children():
        if isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from ((f"{name}.{inner}", each) for inner, each in callable_parts(part))
        else:
            yield name, part


def _versions(model: torch.nn.Module) -> int:
    return sum(version_of(parameter) for parameter in model.parameters())

"""Attributes of modules, put back as they were: what a forward pass counts, collects and caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pooch.torchtools.kept_contents import KeptContents

_Containers = dict[int, tuple[Any, Any]]


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put the attributes of all modules back at the end, whatever happens inside.

    Attributes keep the objects that they had; lists, dictionaries and sets (hooks, parameters and buffers among them)
    have what they held; tensors in attributes have their contents. Parameters keep `requires_grad`, but contents of
    parameters and buffers are not looked at here. What modules hold of other kinds is not looked into. Wrappers of
    torch.distributed, which arrange themselves in their first steps, stay as they have become.
    """
    containers: _Containers = {}
    for module in model.modules():
        if not type(module).__module__.startswith("torch.distributed."):
            _remember(module.__dict__, containers)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    contents = KeptContents(_plain_tensors(containers))
    try:
        yield
    finally:
        for container, held in containers.values():
            _put_back(container, held)
        for parameter, flag in flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        contents.restore()
        contents.close()


def has_lazy_parameters(model: torch.nn.Module) -> bool:
    """Whether some parameters or buffers get their shapes only in the first forward pass."""
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _remember(value: Any, containers: _Containers) -> None:
    """Containers of Python's own within a value, each with what it holds now."""
    if not isinstance(value, (dict, list, tuple, set, deque)) or id(value) in containers:
        return
    held = dict(value) if isinstance(value, dict) else list(value)
    if not isinstance(value, tuple):
        containers[id(value)] = (value, held)
    for each in held.values() if isinstance(held, dict) else held:
        _remember(each, containers)


def _plain_tensors(containers: _Containers) -> Iterator[torch.Tensor]:
    for _, held in containers.values():
        for each in held.values() if isinstance(held, dict) else held:
            if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter) and not each.requires_grad:
                yield each


def _put_back(container: Any, held: Any) -> None:
    if isinstance(container, dict):
        _put_back_items(container, held)
    elif isinstance(container, (list, deque)):
        if len(container) != len(held) or any(a is not b for a, b in zip(container, held, strict=True)):
            container.clear()
            container.extend(held)
    elif container != set(held):
        container.clear()
        container.update(held)


def _put_back_items(container: dict[Any, Any], held: dict[Any, Any]) -> None:
    is_same = len(container) == len(held) and all(k in container and container[k] is v for k, v in held.items())
    if not is_same:
        for key in [key for key in container if key not in held]:
            del container[key]
        container.update(held)

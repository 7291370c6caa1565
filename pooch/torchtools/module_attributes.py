"""Restores attributes of modules: what a forward pass counts, collects and caches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .kept_contents import KeptContents

_Containers = dict[int, tuple[Any, Any]]


@contextmanager
def attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that restores the attributes of all modules at the end, whatever happens inside.

    Attributes refer to the same objects as before. Lists, dictionaries and sets, including those of hooks, parameters
    and buffers, have the same items, and tensors in attributes have the same contents. Parameters keep `requires_grad`;
    contents of parameters and buffers are not examined here, and neither are objects of other types. Wrappers of
    torch.distributed, which set themselves up in their first steps, are left as they are.
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
            put_back(container, held)
        for parameter, flag in flags:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
        contents.restore()
        contents.close()


def has_lazy_parameters(model: torch.nn.Module) -> bool:
    """Returns whether some parameters or buffers get their shapes only in the first forward pass."""
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _remember(value: Any, containers: _Containers) -> None:
    """Records Python's own containers within a value, each with its current items."""
    if not isinstance(value, (dict, list, tuple, set, deque)) or id(value) in containers:
        return
    held = dict.copy(value) if isinstance(value, dict) else _items_of(value)
    if not isinstance(value, tuple):
        containers[id(value)] = (value, held)
    for each in held.values() if isinstance(held, dict) else held:
        _remember(each, containers)


def _items_of(value: Any) -> list[Any]:
    """Returns what a list, tuple, set or deque holds, past methods of its own, such as a `__len__` that raises."""
    kind: Any = next(kind for kind in (list, tuple, set, deque) if isinstance(value, kind))
    return [*kind.__iter__(value)]


def _plain_tensors(containers: _Containers) -> Iterator[torch.Tensor]:
    for _, held in containers.values():
        for each in held.values() if isinstance(held, dict) else held:
            if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter) and not each.requires_grad:
                yield each


def put_back(container: Any, held: Any) -> bool:
    """Restores the former items of a dictionary, list, deque or set; returns whether they had changed."""
    if isinstance(container, dict):
        if len(container) == len(held) and all(k in container and container[k] is v for k, v in held.items()):
            return False
        for key in [key for key in container if key not in held]:
            del container[key]
        container.update(held)
    elif isinstance(container, (list, deque)):
        if len(container) == len(held) and all(a is b for a, b in zip(container, held, strict=True)):
            return False
        container.clear()
        container.extend(held)
    else:
        if container == set(held):
            return False
        container.clear()
        container.update(held)
    return True

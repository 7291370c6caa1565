"""The optimizer that holds the state, inside any wrappers, and a shadow of it that steps without leaving a trace."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from ..ground.errors import ProfileError, UsageError
from ..torchtools.module_attributes import put_back
from ..torchtools.tensors import find_tensors, tensors_with_memory, version_of
from .fake.world import FakeWorld

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """Returns the optimizer itself, without wrappers such as those of Accelerate and Lightning.

    A wrapper has the optimizer in its attribute `optimizer` and no state of its own. Wrappers may be nested.

    Raises:
        UsageError: if it is not an optimizer.
        ProfileError: if it forwards its state to an optimizer that cannot be found.
    """
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            break
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state is not inner.state:
            break  # it adds state of its own
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer is {type(optimizer).__name__}: give a torch.optim.Optimizer or None")
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        raise ProfileError(
            f"{type(optimizer).__name__} forwards its state to another optimizer: give the optimizer it wraps"
        )
    return optimizer


class Shadow:
    """A copy of an optimizer, its state and its parameters that has no memory and no connection to the real one.

    Its parameters are fake tensors on the same devices, each with a gradient, wherever the optimizer keeps them. Hooks
    and patches of the real optimizer's `step`, which learning rate schedulers install, are not copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._world = FakeWorld()
        self._copies: dict[int, tuple[Any, Any]] = {}  # holds the originals, so that their ids remain unique
        self._trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._optimizers: list[torch.optim.Optimizer] = []
        self.optimizer: Any = self._copied(optimizer)

    def step(self) -> None:
        """Takes the step that the real optimizer will take, without touching it. Raises what its `step` raises."""
        with self._world.entered(), torch.no_grad():
            self.optimizer.step()

    def states(self) -> list[torch.Tensor]:
        """Returns the tensors that are in its state now."""
        return [tensor for each in self._optimizers for tensor in find_tensors(dict(each.state))]

    def state_of(self, parameter: torch.Tensor) -> Any:
        """Returns the state that it has now for the copy of a parameter."""
        return self.optimizer.state.get(self._copied(parameter), {})

    def _copied(self, value: Any) -> Any:
        if id(value) not in self._copies:
            self._copies[id(value)] = (value, self._copy_of(value))
        return self._copies[id(value)][1]

    def _copy_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if isinstance(value, dict):
            return self._dict(value)
        if type(value) in (list, tuple, set):
            return type(value)(map(self._copied, value))
        return value

    def _dict(self, value: Any) -> Any:
        same = copy.copy(value)  # keeps the type of an OrderedDict or a defaultdict
        same.clear()
        self._copies[id(value)] = (value, same)
        same.update({self._copied(key): self._copied(each) for key, each in list(value.items())})
        return same

    def _optimizer(self, value: torch.optim.Optimizer) -> Any:
        same: Any = object.__new__(type(value))
        self._copies[id(value)] = (value, same)
        self._optimizers.append(same)
        held = {name: each for name, each in vars(value).items() if name != "step" and name not in _HOOKS}
        same.__dict__.update({name: self._copied(each) for name, each in held.items()})
        same.__dict__.update({name: OrderedDict() for name in _HOOKS})
        step: Any = type(value).step
        # PyTorch wraps the class's own step to call hooks, including global ones that apply to every optimizer.
        same.__dict__["step"] = MethodType(step.__wrapped__ if getattr(step, "hooked", False) else step, same)
        return same

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 0 and id(value) not in self._trained and type(value) is torch.Tensor:
            number = value.item()
            with self._world.entered():  # a step count or a learning rate, which `step` may read
                return torch.full((), number, dtype=value.dtype, device=value.device)
        inner, _ = tensors_with_memory(value)
        geometry = inner[0] if len(inner) == 1 else value  # this rank's shard of a sharded parameter
        same = self._like(geometry)
        if id(value) in self._trained and value.requires_grad:
            same.requires_grad_()
            same.grad = self._like(geometry)
        return same

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not `empty_like`: the tensor may be a fake tensor of another world.
        size, stride = tuple(tensor.shape), tensor.stride()
        with self._world.entered():
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


class OptimizerChanged(Exception):
    """The optimizer was modified, and has been restored."""


@contextmanager
def kept_as_it_was(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager that compares attributes, groups, parameters and state afterwards with those before.

    Raises:
        OptimizerChanged: if they had changed; they have been restored.
        ProfileError: if contents of tensors changed, which cannot be restored.
    """
    groups, state = optimizer.param_groups, optimizer.state
    containers: list[Any] = [vars(optimizer), groups, *groups, *(group["params"] for group in groups), state]
    containers += [each for each in state.values() if isinstance(each, dict)]
    held = [(each, list(each) if isinstance(each, list) else dict(each)) for each in containers]
    tensors = find_tensors([groups, dict(state)])
    versions = [version_of(tensor) for tensor in tensors]
    try:
        yield
    finally:
        changed = [put_back(container, items) for container, items in held]
        if versions != [version_of(tensor) for tensor in tensors]:
            raise ProfileError(
                f"{type(optimizer).__name__} changes its parameters or its state outside of PyTorch's operators: "
                "profile without the optimizer, after its first step"
            )
    if any(changed):
        raise OptimizerChanged("its step modifies objects other than its own attributes")

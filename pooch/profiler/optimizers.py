"""The optimizer that holds the state, under whatever wraps it, and a shadow of it that can step without a trace."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from pooch.errors import ProfileError, UsageError
from pooch.profiler.fake.world import FakeWorld
from pooch.torchtools.tensors import find_tensors, tensors_with_memory, version_of

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def unwrapped(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer itself, without wrappers such as those of Accelerate and Lightning.

    A wrapper has the optimizer in its attribute `optimizer` and no state of its own; several may lie around each other.

    Raises:
        UsageError: it is no optimizer.
        ProfileError: it passes its state through to an optimizer that cannot be found.
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
            f"{type(optimizer).__name__} passes its state through to another optimizer: give the optimizer it wraps"
        )
    return optimizer


class Shadow:
    """A copy of an optimizer, of its state and of its parameters that has no memory and no connection to the real one.

    Its parameters are fake tensors on the same devices with a gradient each, wherever the optimizer keeps them. Hooks
    and patches of the real optimizer's `step` (learning rate schedulers put some there) stay with the real one.

    Args:
        optimizer: the real one; unwrapped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._world = FakeWorld()
        self._copies: dict[int, tuple[Any, Any]] = {}  # with the originals, so that their ids stay their own
        self._trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._shadow: Any = self._copied(optimizer)

    def step(self) -> None:
        """Step as the real one will; nothing of that is touched. Raises what its `step` raises."""
        with self._world.entered(), torch.no_grad():
            self._shadow.step()

    def states(self) -> list[torch.Tensor]:
        """Tensors in its state now."""
        return [tensor for each in self._optimizers for tensor in find_tensors(dict(each.state))]

    def has_all_states(self) -> bool:
        """Whether each parameter that is trained has state."""
        parameters = [p for group in self._shadow.param_groups for p in group["params"] if p.requires_grad]
        return all(self._shadow.state.get(parameter) for parameter in parameters)

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
        same = copy.copy(value)  # an OrderedDict or a defaultdict stays one
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
        # PyTorch wraps the class's own step to call hooks, those of every optimizer in the process among them.
        same.__dict__["step"] = MethodType(step.__wrapped__ if getattr(step, "hooked", False) else step, same)
        return same

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 0 and id(value) not in self._trained and type(value) is torch.Tensor:
            number = value.item()
            with self._world.entered():  # a count of steps or a learning rate, which `step` may look at
                return torch.full((), number, dtype=value.dtype, device=value.device)
        inner, _ = tensors_with_memory(value)
        geometry = inner[0] if len(inner) == 1 else value  # this rank's part of a sharded parameter
        same = self._like(geometry)
        if id(value) in self._trained and value.requires_grad:
            same.requires_grad_()
            same.grad = self._like(geometry)
        return same

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        # Not `empty_like`: the tensor may be a fake one of another world.
        size, stride = tuple(tensor.shape), tensor.stride()
        with self._world.entered():
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)


@dataclass(frozen=True)
class _Held:
    """A dictionary or list of an optimizer, and what it held."""

    container: Any
    contents: Any

    @classmethod
    def of(cls, container: Any) -> _Held:
        return cls(container, list(container) if isinstance(container, list) else dict(container))

    def put_back(self) -> bool:
        """Put the contents back; whether that was needed."""
        if self._is_same():
            return False
        if isinstance(self.container, list):
            self.container[:] = self.contents
        else:
            self.container.clear()
            self.container.update(self.contents)
        return True

    def _is_same(self) -> bool:
        now, before = self.container, self.contents
        if len(now) != len(before):
            return False
        if isinstance(now, list):
            return all(a is b for a, b in zip(now, before, strict=True))
        return all(key in now and now[key] is each for key, each in before.items())


class OptimizerChanged(Exception):
    """The optimizer was not left as it was, and has been put back."""


@contextmanager
def kept_as_it_was(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Compare attributes, groups, parameters and state at the end with those before.

    Raises:
        OptimizerChanged: they had changed, and were put back.
        ProfileError: contents of tensors changed, which cannot be put back.
    """
    groups, state = optimizer.param_groups, optimizer.state
    held = [_Held.of(each) for each in (vars(optimizer), groups, *groups, *(g["params"] for g in groups), state)]
    held += [_Held.of(each) for each in state.values() if isinstance(each, dict)]
    tensors = list(find_tensors([groups, dict(state)]))
    versions = [version_of(tensor) for tensor in tensors]
    try:
        yield
    finally:
        changed = [each.put_back() for each in held]
        if versions != [version_of(tensor) for tensor in tensors]:
            raise ProfileError(
                f"{type(optimizer).__name__} changes its parameters or its state from outside of PyTorch's operators: "
                "profile without the optimizer, after its first step"
            )
    if any(changed):
        raise OptimizerChanged("its step reaches around its own attributes")

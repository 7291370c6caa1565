"""Copies of an optimizer that have a few small parameters of made-up values instead of its own."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as of_torch

LARGEST_ELEMENTS = 4096  # of a tensor that is made or copied
_GROUPS_WITH_PARAMETERS = 3  # the others are empty
_LONG, _SHORT = 8, 4  # longest sides of samples: of a few, and where each parameter has one
# Objects of these types are handed on as they are; others are copied or refused, as a step may change them.
_SHARED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type, BuiltinFunctionType)
_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, defaultdict, torch.Size)


@dataclass(frozen=True, slots=True)
class _Scale:
    """By which gradients are multiplied in a step."""

    of_others: float
    of_last: float


# Clipping by a norm shows itself only where there is something to clip, and skipping only where there is a reason.
_SCALES = (
    _Scale(1.0, 1.0),
    _Scale(1e4, 1e4),
    _Scale(1e-8, 1e-8),
    _Scale(1.0, 1e-3),
    _Scale(1.0, 0.0),
    _Scale(1.0, math.nan),
)
TRIAL_STEPS = len(_SCALES) + 20  # of ordinary gradients: some couple parameters in every tenth step alone
TRIAL_STEPS_OF_ALL = 2  # where each parameter has its sample


class NotOneByOne(Exception):
    """Why an optimizer cannot be run in slices, as far as could be found out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How a parameter of a copy is made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: type[torch.Tensor]
    has_gradient: bool
    state: tuple[tuple[str, object], ...] = ()


def samples_of(optimizer: Optimizer, with_closure: bool, with_state: bool = False) -> tuple[tuple[Sample, ...], ...]:
    """Returns a few samples for each of the first groups: up to two of a kind with a gradient, and one that has none.

    Args:
        optimizer: the optimizer.
        with_closure: whether gradients are still to be computed, so that all parameters are taken to have one.
        with_state: whether copies have state like that of the optimizer from the beginning.
    """
    states: Mapping[torch.Tensor, Any] = optimizer.state if with_state else {}
    samples: list[tuple[Sample, ...]] = []
    groups_left = _GROUPS_WITH_PARAMETERS
    for group in optimizer.param_groups:
        parameters = group["params"] if groups_left else []
        stepped = [each for each in parameters if _is_stepped(each, with_closure)]
        others = [] if with_closure or len(stepped) == len(parameters) else [_without_gradient(parameters)]
        few = (_sample(each, True, _like_state(each, states.get(each))) for each in _few_of(stepped))
        samples.append((*few, *others))
        groups_left -= bool(stepped)
    return tuple(samples)


def _few_of(parameters: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Two parameters of each kind: an optimizer may treat matrices in a way of their own, and those only together."""
    alike: dict[object, list[torch.Tensor]] = {}
    for each in parameters:
        alike.setdefault((_small_shape(each), each.dtype), []).append(each)
    few = {id(each) for kind in alike.values() for each in kind[:2]}
    return [each for each in parameters if id(each) in few]


def all_samples_of(
    optimizer: Optimizer, with_closure: bool, with_state: bool = False
) -> tuple[tuple[Sample, ...], ...]:
    """Returns a sample for each parameter of all groups: a step may depend on their number, or the place of each.

    Args:
        optimizer: the optimizer.
        with_closure: as `samples_of` takes it.
        with_state: likewise.
    """
    states: Mapping[torch.Tensor, Any] = optimizer.state if with_state else {}
    return tuple(
        tuple(
            _sample(each, _is_stepped(each, with_closure), _like_state(each, states.get(each)), _SHORT)
            for each in group["params"]
        )
        for group in optimizer.param_groups
    )


def _is_stepped(parameter: torch.Tensor, with_closure: bool) -> bool:
    return parameter.requires_grad if with_closure else parameter.grad is not None


def _without_gradient(parameters: Sequence[torch.Tensor]) -> Sample:
    return _sample(next(each for each in parameters if each.grad is None), False)


def have_states(optimizer: Optimizer, with_closure: bool) -> bool:
    """Returns whether all parameters that a step changes have a state, of which copies can have the like.

    Args:
        optimizer: the optimizer.
        with_closure: as `samples_of` takes it.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if _is_stepped(parameter, with_closure):
            state = optimizer.state.get(parameter)
            if not (isinstance(state, dict) and state and _like_state(parameter, state)):
                return False
    return True


def _like_state(parameter: torch.Tensor, state: Any) -> tuple[tuple[str, object], ...]:
    """What a state of a parameter is like: for each name the dtype of a tensor, or a number. (): nothing is like it."""
    found: list[tuple[str, object]] = []
    for name, value in (state or {}).items():
        if type(value) is torch.Tensor and value.shape in (parameter.shape, torch.Size([])):
            found.append((name, (value.dtype, value.dim() > 0)))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append((name, type(value)))
        else:
            return ()
    return tuple(found)


def _made_state(sample: Sample) -> dict[str, Any]:
    """A state like the one that a sample is of, of positive numbers, as it may hold squares."""
    made: dict[str, Any] = {}
    for number, (name, like) in enumerate(sample.state):
        if isinstance(like, tuple):
            dtype, is_large = like
            values = replace(sample, dtype=dtype, shape=sample.shape if is_large else ())
            made[name] = _values(values, 200 + number).abs() + 1 if is_large else torch.ones((), dtype=dtype)
        else:
            made[name] = 1 if like is int else 1.0
    return made


def _sample(
    parameter: torch.Tensor, has_gradient: bool, state: tuple[tuple[str, object], ...] = (), longest: int = _LONG
) -> Sample:
    shape = _small_shape(parameter, longest)
    return Sample(shape, parameter.dtype, parameter.device, type(parameter), has_gradient, state)


def _small_shape(parameter: torch.Tensor, longest: int = _LONG) -> tuple[int, ...]:
    return tuple(min(size, longest if parameter.dim() <= 4 else 2) for size in parameter.shape)


def small_copy(optimizer: Optimizer, samples: Sequence[Sequence[Sample]]) -> Optimizer:
    """Returns a copy with the samples as parameters, and without hooks, or anything that the optimizer has too.

    Raises:
        NotOneByOne: it has something that cannot be copied, so that a step of the copy could change it.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    vars(copy).update({name: OrderedDict() for name in vars(optimizer) if _are_hooks(name)})
    vars(copy).update({name: _copied(value, name) for name, value in _attributes(optimizer).items()})
    vars(copy)["state"] = defaultdict(dict)
    vars(copy)["param_groups"] = [
        {**_copied(_entries(group), "param_groups"), "params": [_parameter(each, n) for n, each in enumerate(made)]}
        for group, made in zip(optimizer.param_groups, samples, strict=True)
    ]
    for group, made in zip(copy.param_groups, samples, strict=True):
        for parameter, sample in zip(group["params"], made, strict=True):
            if sample.state:
                copy.state[parameter] = _made_state(sample)
    return copy


def settings_of(copy: Optimizer) -> dict[str, Any]:
    """Returns copies of everything that a copy has beside its parameters and their state."""
    groups = {f"param_groups[{index}]": _entries(group) for index, group in enumerate(copy.param_groups)}
    settings: dict[str, Any] = _copied({**_attributes(copy), **groups}, "attributes")
    return settings


def results_of(copy: Optimizer) -> list[Any]:
    """Returns parameters, gradients and state of a copy, the state in its order.

    Raises:
        NotOneByOne: it has a state for what is no parameter of it.
    """
    parameters = [parameter for group in copy.param_groups for parameter in group["params"]]
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    if any(id(key) not in numbers for key in copy.state):
        raise NotOneByOne("it keeps a state that is no parameter's")
    state = [(numbers[id(key)], value) for key, value in copy.state.items()]
    return [parameters, [parameter.grad for parameter in parameters], state]


def set_gradients(copy: Optimizer, samples: Sequence[Sequence[Sample]], step_number: int) -> None:
    """Gives the parameters of a copy new gradients, the same ones for the same arguments.

    Args:
        copy: the copy.
        samples: what its parameters were made from.
        step_number: which of the steps it is.
    """
    parameters = [parameter for group in copy.param_groups for parameter in group["params"]]
    pairs = [pair for pair in zip(parameters, chain(*samples), strict=True) if pair[1].has_gradient]
    scale = _SCALES[step_number] if step_number < len(_SCALES) else _SCALES[0]
    for number, (parameter, sample) in enumerate(pairs):
        factor = scale.of_last if number == len(pairs) - 1 else scale.of_others
        parameter.grad = _values(sample, number + 10 * step_number) * factor


def same(one: Any, other: Any) -> bool:
    """Returns whether two nestings of tensors and other values are equal in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return one is other or bool(one == other)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has beside state, groups and hooks, without functions around its methods."""
    left_out = {"state", "param_groups", "step", "zero_grad"}
    return {name: value for name, value in vars(optimizer).items() if not (_are_hooks(name) or name in left_out)}


def _are_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def _entries(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copied(value: Any, name: str) -> Any:
    """A copy of an attribute's value, down to what cannot be changed."""
    if isinstance(value, _SHARED) or value is of_torch.required:
        return value
    if isinstance(value, FunctionType) and value.__closure__ is None:
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() <= LARGEST_ELEMENTS:
        return value.detach().clone()
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, _copied(dict(value), name))
    if isinstance(value, dict) and type(value) in _CONTAINERS:
        return type(value)((key, _copied(item, name)) for key, item in value.items())
    if type(value) in _CONTAINERS:
        return type(value)(_copied(item, name) for item in value)
    raise NotOneByOne(f"its {name} holds a {type(value).__name__}, which a trial could change")


def _parameter(sample: Sample, number: int) -> torch.Tensor:
    values = _values(sample, 100 + number)
    return torch.nn.Parameter(values) if sample.kind is torch.nn.Parameter else values.requires_grad_()


@torch.no_grad()
def _values(sample: Sample, number: int) -> torch.Tensor:
    """Values in [-1, 1] without a pattern that two numbers have in common."""
    ramp = torch.arange(1, math.prod(sample.shape) + 1, dtype=torch.float32, device=sample.device)
    values = (ramp * (0.7 + 0.031 * number) + number).sin().reshape(sample.shape)
    return (torch.complex(values, values.cos()) if sample.dtype.is_complex else values).to(sample.dtype)

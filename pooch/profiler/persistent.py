"""Bytes of gradients and of the optimizer's state, including state that only its first step will create."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ground.errors import PoochError
from ..torchtools.accelerators import granule_bytes
from ..torchtools.tensors import find_tensors, gradient_of, storage_bytes
from ..torchtools.training_state import RandomStates, model_device
from .optimizers import Shadow, kept_as_it_was, unwrapped

_HISTORY_NOTE = (
    "LBFGS is counted with a full history, which it reaches after some steps; what it allocates while it calls its "
    "closure is not counted"
)


def gradient_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """Returns the bytes of the gradients that the model's parameters hold now on a device, as its allocator counts."""
    gradients = [g for g in map(gradient_of, model.parameters()) if g is not None and g.device == device]
    return storage_bytes(gradients, granule_bytes(device.type))


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Returns the device bytes of the state that the optimizer has now."""
    if optimizer is None:
        return 0
    return storage_bytes(t for state in optimizer.state.values() for t in find_tensors(state))


@dataclass(frozen=True)
class ForeseenState:
    """State of an optimizer on the model's device, as it will be after a step.

    Attributes:
        to_come_bytes: bytes that its steps will create, beyond what it has now.
        bytes_of: {name of a parameter: bytes of the state for it}. Where that cannot be told, there is nothing: LBFGS
            has one state for all parameters, and a step that fails on fake tensors tells nothing.
        notes: for the reader of the profile: about a guess, if the step cannot be taken on fake tensors, or about an
            upper bound.
    """

    to_come_bytes: int = 0
    bytes_of: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def foreseen_state(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> ForeseenState:
    """Predicts the state on the model's device that the optimizer will have.

    A shadow of the optimizer takes a step on fake tensors, so the real one, which may be inside a wrapper such as
    Accelerate's or Lightning's, is not touched.

    Raises:
        UsageError: if it is not an optimizer.
        ProfileError: if it wraps an optimizer that cannot be found.
    """
    if optimizer is None:
        return ForeseenState()
    real, device = unwrapped(optimizer), model_device(model)
    if isinstance(real, torch.optim.LBFGS):
        return ForeseenState(_full_history_bytes(real), notes=(_HISTORY_NOTE,))
    if has_all_states(real):
        return ForeseenState(bytes_of=_by_name(model, device, lambda parameter: real.state.get(parameter, {})))
    random = RandomStates.of(device)
    try:
        return _stepped(real, model, device)
    except PoochError:
        raise
    except Exception as error:  # noqa: BLE001  (any optimizer of the user's may run here)
        return _guess(real, error)
    finally:
        random.restore(device)


def _stepped(optimizer: torch.optim.Optimizer, model: torch.nn.Module, device: torch.device) -> ForeseenState:
    """Has a shadow of the optimizer take a step, and looks at its state."""
    with kept_as_it_was(optimizer):
        shadow = Shadow(optimizer)
        before_bytes, has_stepped = _bytes_on(device, shadow), True
        try:
            shadow.step()
        except Exception:
            if not has_all_states(shadow.optimizer):  # many create all state first, and fail at the arithmetic
                raise
            has_stepped = False
        trained = {id(parameter) for parameter in _trained(optimizer)}
        bytes_of = _by_name(model, device, lambda each: shadow.state_of(each) if id(each) in trained else {})
    return ForeseenState(_bytes_on(device, shadow) - before_bytes, bytes_of if has_stepped else {})


def _by_name(
    model: torch.nn.Module, device: torch.device, state_of: Callable[[torch.Tensor], Mapping[Any, Any]]
) -> dict[str, int]:
    """Returns {name of a parameter: bytes of its state}, for those that have some."""
    sizes = ((name, _long_bytes(state_of(parameter), device)) for name, parameter in model.named_parameters())
    return {name: size_bytes for name, size_bytes in sizes if size_bytes}


def _long_bytes(state: Any, device: torch.device) -> int:
    """Returns the bytes of tensors on a device that have more than one number, as a count of steps has."""
    tensors = (t for t in find_tensors(dict(state)) if t.ndim > 0 and t.device.type == device.type)
    return storage_bytes(tensors, granule_bytes(device.type))


def has_all_states(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether every parameter that is trained has state, as after the first step; creates no state."""
    return all(optimizer.state.get(parameter) for parameter in _trained(optimizer))


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _bytes_on(device: torch.device, shadow: Shadow) -> int:
    return storage_bytes((t for t in shadow.states() if t.device.type == device.type), granule_bytes(device.type))


def _guess(optimizer: torch.optim.Optimizer, error: Exception) -> ForeseenState:
    guess = 2 * sum(p.numel() * p.element_size() for p in _trained(optimizer))
    note = (
        f"the state of {type(optimizer).__name__} could not be predicted ({type(error).__name__}); {guess} bytes "
        "were assumed: take one optimizer step before profiling to have it measured"
    )
    return ForeseenState(guess, notes=(note,))


def _full_history_bytes(optimizer: torch.optim.LBFGS) -> int:
    """Returns what L-BFGS holds at most beyond what it has: a direction and a gradient as long as all parameters,
    `history_size` pairs of the same length, and one number for each of them.
    """
    group = optimizer.param_groups[0]
    parameters, pairs = group["params"], int(group["history_size"])
    long_bytes: int = sum(p.numel() * p.element_size() for p in parameters)
    number_bytes: int = max(p.element_size() for p in parameters)
    most = 2 * (pairs + 1) * (long_bytes + number_bytes)
    return max(0, most - state_bytes(optimizer))

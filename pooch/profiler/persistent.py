"""Bytes of gradients and of the optimizer's state, including state that only its first step will create."""

from __future__ import annotations

from typing import Any

import torch

from ..ground.errors import PoochError
from ..torchtools.accelerators import granule_bytes
from ..torchtools.tensors import find_tensors, storage_bytes
from ..torchtools.training_state import RandomStates, model_device
from .optimizers import Shadow, kept_as_it_was, unwrapped

_HISTORY_NOTE = (
    "LBFGS is counted with a full history, which it reaches after some steps; what it allocates while it calls its "
    "closure is not counted"
)


def gradient_bytes(model: torch.nn.Module, device: torch.device) -> int:
    """Returns the bytes of the gradients that the model's parameters hold now on a device, as its allocator counts."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None and p.grad.device == device]
    return storage_bytes(gradients, granule_bytes(device.type))


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Returns the device bytes of the state that the optimizer has now."""
    if optimizer is None:
        return 0
    return storage_bytes(t for state in optimizer.state.values() for t in find_tensors(state))


def foreseen_state_bytes(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> tuple[int, list[str]]:
    """Predicts the bytes of state on the model's device that the optimizer's steps will create, beyond what it has now.

    A shadow of the optimizer takes a step on fake tensors, so the real one, which may be inside a wrapper such as
    Accelerate's or Lightning's, is not touched.

    Returns:
        The bytes, and notes for the reader of the profile: about a guess, if the step cannot be taken on fake tensors,
        or about an upper bound.

    Raises:
        UsageError: if it is not an optimizer.
        ProfileError: if it wraps an optimizer that cannot be found.
    """
    if optimizer is None:
        return 0, []
    real = unwrapped(optimizer)
    device = model_device(model)
    if isinstance(real, torch.optim.LBFGS):
        return _full_history_bytes(real), [_HISTORY_NOTE]
    if has_all_states(real):
        return 0, []
    random = RandomStates.of(device)
    try:
        return _stepped_bytes(real, device), []
    except PoochError:
        raise
    except Exception as error:  # noqa: BLE001  (any optimizer of the user's may run here)
        return _guess(real, error)
    finally:
        random.restore(device)


def state_by_parameter(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> dict[str, int]:
    """Returns {name of a parameter: device bytes of the state that the optimizer has for it after a step}.

    Where that cannot be told, there is nothing: LBFGS has one state for all parameters, and a step that fails on fake
    tensors tells nothing.
    """
    if optimizer is None:
        return {}
    real, device = unwrapped(optimizer), model_device(model)
    if isinstance(real, torch.optim.LBFGS):
        return {}
    if has_all_states(real):
        sizes = {id(parameter): _long_bytes(state, device) for parameter, state in real.state.items()}
    else:
        random = RandomStates.of(device)
        try:
            sizes = _stepped_sizes(real, device)
        except Exception:  # noqa: BLE001  (any optimizer of the user's may run here; its bytes are guessed elsewhere)
            return {}
        finally:
            random.restore(device)
    return {name: sizes[id(each)] for name, each in model.named_parameters() if sizes.get(id(each))}


def _stepped_sizes(optimizer: torch.optim.Optimizer, device: torch.device) -> dict[int, int]:
    """Returns {id of a parameter: bytes of the state that a shadow of the optimizer has for its copy after a step}."""
    with kept_as_it_was(optimizer):
        shadow = Shadow(optimizer)
        shadow.step()
        return {id(parameter): _long_bytes(shadow.state_of(parameter), device) for parameter in _trained(optimizer)}


def _long_bytes(state: Any, device: torch.device) -> int:
    """Returns the bytes of tensors on a device that have more than one number, as a count of steps has."""
    tensors = (t for t in find_tensors(dict(state)) if t.ndim > 0 and t.device.type == device.type)
    return storage_bytes(tensors, granule_bytes(device.type))


def has_all_states(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether every parameter that is trained has state, as after the first step; creates no state."""
    return all(optimizer.state.get(parameter) for parameter in _trained(optimizer))


def _trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _stepped_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    with kept_as_it_was(optimizer):
        shadow = Shadow(optimizer)
        before = _bytes_on(device, shadow)
        try:
            shadow.step()
        except Exception:
            if not has_all_states(shadow.optimizer):  # many create all state first, and fail at the arithmetic
                raise
    return _bytes_on(device, shadow) - before


def _bytes_on(device: torch.device, shadow: Shadow) -> int:
    return storage_bytes((t for t in shadow.states() if t.device.type == device.type), granule_bytes(device.type))


def _guess(optimizer: torch.optim.Optimizer, error: Exception) -> tuple[int, list[str]]:
    guess = 2 * sum(p.numel() * p.element_size() for p in _trained(optimizer))
    note = (
        f"the state of {type(optimizer).__name__} could not be predicted ({type(error).__name__}); {guess} bytes "
        "were assumed: take one optimizer step before profiling to have it measured"
    )
    return guess, [note]


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

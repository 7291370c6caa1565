"""Bytes of the optimizer's state, also of what it will only create at its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pooch.errors import PoochError
from pooch.torchtools.accelerators import granule_bytes
from pooch.torchtools.tensors import find_tensors, storage_bytes
from pooch.torchtools.training_state import RandomStates, model_device

if TYPE_CHECKING:
    from pooch.profiler.optimizers import Shadow


def state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Device bytes of the state that the optimizer has now."""
    if optimizer is None:
        return 0
    return storage_bytes([t for state in optimizer.state.values() for t in find_tensors(state)])


def foreseen_state_bytes(optimizer: torch.optim.Optimizer | None, model: torch.nn.Module) -> tuple[int, list[str]]:
    """Device bytes of the state that the optimizer's steps will create and keep, besides what it has now.

    A shadow of the optimizer takes a step on fake tensors, so nothing of the real one is touched.

    Args:
        optimizer: may be a wrapper, such as Accelerate's or Lightning's.
        model: whose device counts.

    Returns:
        The bytes, and notes: on a guess where the step cannot be taken on fake tensors, or on an upper bound.

    Raises:
        UsageError: it is no optimizer.
        ProfileError: it wraps an optimizer that cannot be found.
    """
    from pooch.profiler.optimizers import unwrapped  # which needs fake tensors, whose profiles need this file

    if optimizer is None:
        return 0, []
    real = unwrapped(optimizer)
    device = model_device(model)
    if isinstance(real, torch.optim.LBFGS):
        return _full_history_bytes(real), [_HISTORY_NOTE]
    if _has_all_states(real):
        return 0, []
    random = RandomStates.of(device)
    try:
        return _stepped_bytes(real, device)
    except PoochError:
        raise
    except Exception as error:  # noqa: BLE001  (any optimizer of the user's may run here)
        return _guess(real, error)
    finally:
        random.restore(device)


def _has_all_states(optimizer: torch.optim.Optimizer) -> bool:
    """As after its first step; asking may not create what it asks for."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return all(optimizer.state.get(parameter) for parameter in parameters)


def _stepped_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[int, list[str]]:
    from pooch.profiler.optimizers import Shadow, kept_as_it_was

    with kept_as_it_was(optimizer):
        shadow = Shadow(optimizer)
        before = _bytes_on(device, shadow)
        try:
            shadow.step()
        except Exception:
            if not shadow.has_all_states():  # many create all of it first, and fail at the arithmetic
                raise
    return _bytes_on(device, shadow) - before, []


def _bytes_on(device: torch.device, shadow: Shadow) -> int:
    granule = granule_bytes(device.type)
    here = {t.untyped_storage()._cdata: t for t in shadow.states() if t.device.type == device.type}
    return sum(-(-storage_bytes([tensor]) // granule) * granule for tensor in here.values())


def _guess(optimizer: torch.optim.Optimizer, error: Exception) -> tuple[int, list[str]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    guess = 2 * sum(p.numel() * p.element_size() for p in parameters)
    note = (
        f"the state of {type(optimizer).__name__} could not be foreseen ({type(error).__name__}); {guess} bytes "
        "were assumed: take one optimizer step before profiling to have it measured"
    )
    return guess, [note]


_HISTORY_NOTE = (
    "LBFGS is counted with a full history, which it has after some steps; what it holds besides while it calls its "
    "closure is not counted"
)


def _full_history_bytes(optimizer: torch.optim.LBFGS) -> int:
    """What L-BFGS holds at most, beyond what it has: a direction and a gradient as long as all parameters, pairs of
    such, and as many numbers.
    """
    group = optimizer.param_groups[0]
    parameters, pairs = group["params"], int(group["history_size"])
    long_bytes: int = sum(p.numel() * p.element_size() for p in parameters)
    number_bytes: int = max(p.element_size() for p in parameters)
    most = 2 * (pairs + 1) * (long_bytes + number_bytes)
    return max(0, most - state_bytes(optimizer))

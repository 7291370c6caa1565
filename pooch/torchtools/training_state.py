"""Keeps the user's training state: gradients, buffers and random generators."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..ground.errors import ProfileError
from .accelerators import accelerators_in_use, has_streams, random_state, set_random_state
from .kept_contents import KeptContents
from .tensors import gradient_of, has_plain_storage, storage_of, tensor_bytes, version_of

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RandomStates:
    """States of the random generators of Python, NumPy, the CPU and a device. None of them is a tensor."""

    python: Any
    numpy: Any
    cpu: bytes
    device: bytes | None

    @classmethod
    def of(cls, device: torch.device) -> RandomStates:
        """Returns the current states."""
        with _disable_current_modes():  # within a fake world, too, real states are needed
            on_device = random_state(device) if has_streams(device) else None
            cpu = random_state(_CPU)
        return cls(random.getstate(), numpy.random.get_state(), cpu, on_device)  # noqa: NPY002

    def restore(self, device: torch.device) -> None:
        """Restores the states."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)  # noqa: NPY002
        with _disable_current_modes():
            set_random_state(_CPU, self.cpu)
            if self.device is not None:
                set_random_state(device, self.device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Context manager that restores the random generators of Python, NumPy, the CPU and `device` at the end."""
    states = RandomStates.of(device)
    try:
        yield
    finally:
        states.restore(device)


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy and PyTorch."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager in which all random generators start from a seed; their states are restored afterwards."""
    devices = [_CPU, *accelerators_in_use()]
    states = [(RandomStates.of(device), device) for device in devices]
    seed_all(seed)
    try:
        yield
    finally:
        for state, device in states:
            state.restore(device)


def references_of(model: torch.nn.Module) -> Callable[[], None]:
    """Notes which tensors are the gradients and buffers of a model, whatever they hold.

    Returns:
        What makes them its gradients and buffers again.
    """
    gradients = [(parameter, gradient_of(parameter)) for parameter in model.parameters() if parameter.is_leaf]
    owners = [(module, dict(module._buffers)) for module in model.modules()]  # some modules replace their buffers

    def put_back() -> None:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, buffers in owners:
            module._buffers.update(buffers)

    return put_back


@contextmanager
def training_state_kept(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager that restores gradients, buffers and random state at the end, whatever happens inside.

    Parameters are not copied, since neither forward nor backward changes those that are trained;
    `untrained_parameters_kept` restores others.

    Raises:
        ProfileError: if a parameter was changed nevertheless, or there is no room for a copy of the buffers.
    """
    put_back = references_of(model)
    may_move = set(map(id, _may_move_along(model)))
    stay = [(name, each, _state_of(each)) for name, each in model.named_parameters() if id(each) not in may_move]
    buffers = KeptContents(model.buffers())
    with random_state_kept(device):
        try:
            for parameter in model.parameters():
                parameter.grad = None
            yield
        finally:
            put_back()
            buffers.restore()
            buffers.close()
    for name, parameter, state in stay:
        if _state_of(parameter) != state:
            raise ProfileError(
                f"the step itself changes parameter {name}, and has just done so once: take optimizer steps out of "
                "hooks and in-place changes out of forward while profiling"
            )


@contextmanager
def untrained_parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that restores parameters that are not trained, as those of a teacher that forward moves along.

    They are left as they are where they take more bytes than those that are trained, as under LoRA.

    Raises:
        ProfileError: if there is no room for a copy of them.
    """
    contents = KeptContents(_may_move_along(model))
    try:
        yield
    finally:
        contents.restore()
        contents.close()


def _may_move_along(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns the parameters that are not trained, unless they take more bytes than those that are."""
    trained_bytes = sum(tensor_bytes(each) for each in model.parameters() if each.requires_grad)
    others: list[torch.Tensor] = [each for each in model.parameters() if not each.requires_grad]
    return others if sum(map(tensor_bytes, others)) <= trained_bytes else []


def _state_of(parameter: torch.Tensor) -> tuple[int, Any]:
    """Returns what changes if a parameter is written to or, as by `parameter.data = other`, has other data."""
    return version_of(parameter), weakref.ref(storage_of(parameter)) if has_plain_storage(parameter) else None


def model_device(model: torch.nn.Module) -> torch.device:
    """Returns the device of the model's first parameter or buffer, or the CPU for a model that has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")

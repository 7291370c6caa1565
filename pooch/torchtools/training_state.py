"""Leaving the user's training state untouched: gradients, buffers and random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the CPU and of `device` at the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@dataclass(frozen=True)
class RandomStates:
    """Where the random generators stand: Python's, NumPy's, the CPU's and the device's. None of it is a tensor."""

    python: Any
    numpy: Any
    cpu: bytes
    device: bytes | None

    @classmethod
    def of(cls, device: torch.device) -> RandomStates:
        """Read them."""
        on_device = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None
        cpu = torch.get_rng_state().numpy().tobytes()
        return cls(random.getstate(), numpy.random.get_state(), cpu, on_device)  # noqa: NPY002

    def restore(self, device: torch.device) -> None:
        """Put them back."""
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(torch.frombuffer(bytearray(self.cpu), dtype=torch.uint8))
        if self.device is not None:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.device), dtype=torch.uint8), device)


@contextmanager
def training_state_kept(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore gradients, buffers and random state of the model at the end, whatever happens inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    owners = [(module, dict(module._buffers)) for module in model.modules()]  # some modules replace their buffers
    with random_state_kept(device):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for module, names in owners:
                module._buffers.update(names)
            with torch.no_grad():
                for buffer, saved in buffers:
                    if not torch.equal(buffer, saved):
                        buffer.copy_(saved)


def model_device(model: torch.nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU for a model without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

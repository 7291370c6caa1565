"""Measuring the link between a device and its swap tier."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ..ground.progress import Progress, silent
from ..ir import Device, Link

if TYPE_CHECKING:
    import torch


def measure_device_link(device: torch.device, room_bytes: int | None = None) -> Link:
    """Measure the cost of transfers between a device and its swap tier.

    Args:
        device: The device.
        room_bytes: The most that it should take of the device, or None for half of what is free.
    """
    from ..executor.engines import make_engine
    from ..executor.engines.measurement import measure_link

    with closing(make_engine(device)) as engine:
        return measure_link(engine, device, shares=True, room_bytes=room_bytes)


def measure_devices(progress: Progress = silent) -> list[tuple[Device, Link]]:
    """Describe every device of this machine and measure its link."""
    import torch

    from ..profiler.hardware import describe_device
    from ..torchtools.accelerators import all_accelerators

    found: list[tuple[Device, Link]] = []
    for device in (*all_accelerators(), torch.device("cpu")):
        progress(f"measuring {device}")
        found.append((describe_device(device), measure_device_link(device)))
    return found

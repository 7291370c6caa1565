"""Describes a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from pooch.ir import Device
from pooch.torchtools import accelerators, cuda_only


def describe_device(device: torch.device) -> Device:
    """Returns the name, memory and software versions of a device."""
    software = {"torch": torch.__version__, "python": platform.python_version()}
    if accelerators.has_streams(device):
        software |= cuda_only.versions(device)
        return Device(device.type, accelerators.name_of(device), accelerators.total_bytes(device), False, software)
    software["threads"] = str(torch.get_num_threads())
    return Device("cpu", _processor_name(), psutil.virtual_memory().total, False, software)


def _processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.processor() or platform.machine()} ({os.cpu_count()} cores)"

"""Describes a device, and measures what a model of it needs: how fast it computes and moves its own memory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..ground.progress import Progress, silent
from ..ir import Device
from ..torchtools import accelerators, cuda_only
from ..torchtools.accelerators import has_streams, synchronize
from ..torchtools.settings import threads_now
from ..torchtools.tensors import dtype_name

_SMALL_OPS = 200
_RUNS = 5
_LONGEST_S = 0.5


def describe_device(device: torch.device) -> Device:
    """Returns the name, memory and software versions of a device."""
    software = {"torch": torch.__version__, "python": platform.python_version()}
    if has_streams(device):
        software |= cuda_only.versions(device)
        name, size_bytes = accelerators.name_of(device), accelerators.total_bytes(device)
        return Device(device.type, name, size_bytes, False, software, accelerators.shares_memory(device))
    software["threads"] = str(threads_now())
    return Device("cpu", _processor_name(), psutil.virtual_memory().total, False, software)


def _processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.processor() or platform.machine()} ({os.cpu_count()} cores)"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Measured rates.

    Attributes:
        matmul_tflops: by dtype, in 10^12 operations per second; only dtypes that the device supports.
        convolution_tflops: the same for convolutions.
        tf32_convolution_tflops: rate of float32 convolutions on tensor cores, 0 if there are none.
        memory_gb_per_s: rate of a copy within the device's memory, counting bytes read and written, in 10^9 bytes per
            second.
        launch_us: duration of an op that does next to nothing.
    """

    matmul_tflops: dict[str, float]
    convolution_tflops: dict[str, float]
    tf32_convolution_tflops: float
    memory_gb_per_s: float
    launch_us: float


def measure_rates(device: torch.device, progress: Progress = silent) -> DeviceRates:
    """Measures a device. This takes a few seconds and less than 2 GiB of its memory (256 MiB on a CPU)."""
    matmul: dict[str, float] = {}
    convolution: dict[str, float] = {}
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        for dtype in _types(device):
            name = dtype_name(dtype)
            progress(f"computing in {name}")
            try:
                matmul[name], convolution[name] = _matmul_tflops(device, dtype), _convolution_tflops(device, dtype)
            except RuntimeError:  # the device does not support the dtype
                matmul.pop(name, None)
    tf32 = 0.0
    if cuda_only.has_tf32(device):
        with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=True):
            tf32 = _convolution_tflops(device, torch.float32)
    progress("moving memory")
    return DeviceRates(matmul, convolution, tf32, _memory_gb_per_s(device), _launch_us(device))


def _types(device: torch.device) -> tuple[torch.dtype, ...]:
    """Returns the dtypes worth measuring: few processors compute in float16, and those that do are very slow."""
    halves = (torch.float16, torch.bfloat16) if has_streams(device) else (torch.bfloat16,)
    return (torch.float32, *halves)


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    run()
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _LONGEST_S:
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if has_streams(device) else 1024
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _best_s(lambda: left @ right, device) / 1e12


def _convolution_tflops(device: torch.device, dtype: torch.dtype) -> float:
    batch, channels, side = (64, 256, 56) if has_streams(device) else (4, 128, 28)
    pixels = torch.rand(batch, channels, side, side, device=device).to(dtype)
    weight = torch.rand(channels, channels, 3, 3, device=device).to(dtype)
    operations = 2 * 9 * batch * channels**2 * side**2
    seconds = _best_s(lambda: torch.nn.functional.conv2d(pixels, weight, padding=1), device)
    return operations / seconds / 1e12


def _memory_gb_per_s(device: torch.device) -> float:
    size_bytes = (512 if has_streams(device) else 128) * 2**20
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size_bytes / _best_s(lambda: target.copy_(source), device) / 1e9


def _launch_us(device: torch.device) -> float:
    number = torch.ones(1, device=device)

    def many() -> None:
        for _ in range(_SMALL_OPS):
            torch.add(number, number)

    return _best_s(many, device) / _SMALL_OPS * 1e6

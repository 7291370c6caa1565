"""What is installed, what is free, and whether Pooch's native parts can be built and loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch

from ...ground import native
from ...ground.errors import first_line
from ...ground.units import format_bytes
from ...ground.version import VERSION
from ...profiler.hardware import describe_device
from ...torchtools import accelerators, copier, cuda_only, watch
from ...torchtools.cpu_allocator import building
from ...torchtools.device_memory import free_bytes
from .finding import Figure, Finding, Patient, Status

_PACKAGES = ("numpy", "pulp", "highspy", "pydantic", "psutil", "xxhash")


def describe_software(patient: Patient) -> Iterator[Finding]:
    """Versions, the driver, and the settings that change what Pooch does."""
    described = describe_device(patient.device)
    figures: dict[str, Figure] = {"pooch": VERSION, "device": described.name, **described.software}
    figures |= {"system": f"{platform.system()} {platform.release()}", "python build": sys.implementation.name}
    figures |= cuda_only.driver(patient.device)
    figures |= {name: _version(name) for name in _PACKAGES}
    settings = sorted(name for name in os.environ if name.startswith(("POOCH_", "PYTORCH_")))
    figures |= {name: os.environ[name] for name in settings}
    yield Finding("software", "passed", f"Pooch {VERSION}, PyTorch {torch.__version__}, {described.name}", figures)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def look_at_memory(patient: Patient) -> Iterator[Finding]:
    """What the device and the host have left."""
    device, host = patient.device, torch.device("cpu")
    status: Status = "passed"
    figures: dict[str, Figure] = {
        "host bytes": psutil.virtual_memory().total,
        "host bytes that this process may take": free_bytes(host),
    }
    text = f"{format_bytes(free_bytes(host))} of host memory are left for this process"
    if accelerators.has_streams(device):
        figures |= {"device bytes": accelerators.total_bytes(device), "device bytes free": free_bytes(device)}
        whole = format_bytes(accelerators.total_bytes(device))
        text = f"{format_bytes(free_bytes(device))} of {whole} are free on the device; {text}"
        if cuda_only.spills_silently(device):
            text += "; Windows' driver puts what does not fit into the host's memory, which is slow: use budget='auto'"
            status = "told"
    yield Finding("memory", status, text, figures)


def try_compiler(patient: Patient) -> Iterator[Finding]:
    """Whether there is a compiler."""
    try:
        command = native.compiler()
    except native.BuildError as error:
        yield Finding("compiler", "failed", f"{error}: install g++ or clang++, or name a compiler in CXX")
        return
    yield Finding("compiler", "passed", Path(command[0]).name, {"compiler": Path(command[0]).name})


def build_native_parts(patient: Patient) -> Iterator[Finding]:
    """Build and load each native part that this device uses."""
    parts: dict[str, tuple[Callable[[], Path], str]] = {"watching steps": (watch.built_library, watch.VARIABLE)}
    if not accelerators.has_streams(patient.device):
        parts |= {
            "copying": (copier.built_library, copier.VARIABLE),
            "counting memory": (building.built_library, ""),
            "observing operators": (building.built_observer, ""),
        }
    for name, (build, variable) in parts.items():
        patient.progress(f"building the native part for {name}")
        yield _built(f"native part: {name}", build, variable, has_compiler="compiler" not in patient.failed)


def _built(check: str, build: Callable[[], Path], variable: str, *, has_compiler: bool) -> Finding:
    if variable and os.environ.get(variable) == "0":
        return Finding(check, "told", f"{variable}=0 asks for Python, which takes longer")
    try:
        ctypes.CDLL(str(build()))
    except (native.BuildError, OSError) as error:
        if not has_compiler:
            return Finding(check, "not run", "it was not built before, and there is no compiler")
        text = f"{first_line(error)}: steps take longer, and on a CPU live bytes are counted now and then"
        return Finding(check, "failed", text)
    return Finding(check, "passed", "built and loaded")

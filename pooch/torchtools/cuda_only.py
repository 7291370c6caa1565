"""What only CUDA has (and ROCm, which calls itself CUDA): locking existing pages, a memory limit, graph capture, and
algorithms that cuDNN chooses by timing. No other file of the package refers to CUDA by name.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import accelerators

_CYCLES_PER_MS = 1_500_000  # of a clock of 1.5 GHz
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


def _is_cuda(device: torch.device) -> bool:
    """Returns whether this file applies to a device."""
    return device.type == "cuda"


def versions(device: torch.device) -> dict[str, str]:
    """Returns {"cuda": version that PyTorch was built with} for a CUDA device, else an empty dictionary."""
    return {"cuda": str(torch.version.cuda or torch.version.hip)} if _is_cuda(device) else {}


def driver(device: torch.device) -> dict[str, str]:
    """Returns {"driver": version} for a CUDA device whose driver tells it, else an empty dictionary."""
    if not _is_cuda(device):
        return {}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"driver": done.stdout.split("\n")[0].strip()}


def locks_in_place(device: torch.device) -> bool:
    """Returns whether existing memory can be page-locked for a device with `lock_pages`."""
    return _is_cuda(device)


def spills_silently(device: torch.device) -> bool:
    """Returns whether the driver puts what does not fit on the device into the host's memory, instead of refusing it.

    Those of Windows do, also for what runs in its subsystem for Linux, whose kernel says so in its name.
    """
    return _is_cuda(device) and "microsoft" in platform.release().lower()


def lock_pages(pointer: int, size_bytes: int, device: torch.device) -> int:
    """Page-locks existing memory; returns CUDA's error code, 0 on success."""
    code = int(torch.cuda.cudart().cudaHostRegister(pointer, size_bytes, _PORTABLE))
    if code != 0:  # launching a kernel clears the error, which the next launch would report
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
    return code


def near_cores(device: torch.device) -> frozenset[int]:
    """Returns the cores of the CPU that are nearest to a CUDA device; empty where the system does not tell."""
    if not _is_cuda(device):
        return frozenset()
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        text = (_PCI_DEVICES / "{:04x}:{:02x}:{:02x}.0".format(*place) / "local_cpulist").read_text()
        spans = [span.partition("-") for span in text.strip().split(",") if span]
        return frozenset(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))
    except (AttributeError, OSError, ValueError):
        return frozenset()


def unlock_pages(pointer: int) -> None:
    """Undoes `lock_pages`, once the device has finished using the memory."""
    torch.cuda.cudart().cudaHostUnregister(pointer)


def limit_memory(device: torch.device, share: float) -> None:
    """Limits this process to a share of the device's memory.

    Raises:
        RuntimeError: if the device is not a CUDA device and has no such limit.
    """
    if not _is_cuda(device):
        raise RuntimeError(f"the memory of a device of type {device.type} cannot be limited for one process")
    torch.cuda.set_per_process_memory_fraction(share, _index(device))


def limited_share(device: torch.device) -> float | None:
    """Returns the share of the device's memory that `limit_memory` has set, 1.0 at first.

    None: the allocator in place has no such limit.
    """
    if not _has_caching_allocator(device):
        return None
    return float(torch.cuda.get_per_process_memory_fraction(_index(device)))


def occupy(device: torch.device, milliseconds: float) -> None:
    """Keeps the current stream busy for about this long, so that later work waits in line; CUDA only."""
    if _is_cuda(device):
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))


def current_stream_handle(device: torch.device) -> int:
    """Returns the address by which CUDA's own functions know the calling thread's current stream."""
    return int(torch.cuda.current_stream(device).cuda_stream)


def is_capturing() -> bool:
    """Returns whether the current stream's work is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def chooses_algorithms_by_timing(device: torch.device) -> bool:
    """Returns whether cuDNN does so on this device; each thread chooses anew, so a replay may get another algorithm."""
    return _is_cuda(device) and torch.backends.cudnn.benchmark


def has_tf32(device: torch.device) -> bool:
    """Returns whether the device's tensor cores can compute float32 convolutions in TF32."""
    return _is_cuda(device) and torch.cuda.get_device_capability(device) >= (8, 0)


def blas_workspace_bytes(device: torch.device) -> int:
    """Returns the size of cuBLAS's workspace for each thread, measured with a small product; 0 elsewhere."""
    return _kept_bytes(device, with_bias=False) if _is_cuda(device) else 0


def lt_workspace_bytes(device: torch.device) -> int:
    """Returns the size of the workspace that cuBLASLt has for each thread beside that of cuBLAS, measured with a small
    product with a bias: 0 where it uses that one.
    """
    return _kept_bytes(device, with_bias=True) - _kept_bytes(device, with_bias=False) if _is_cuda(device) else 0


def _kept_bytes(device: torch.device, *, with_bias: bool) -> int:
    """Returns what the first product of a thread takes besides its result."""
    forget_blas_workspaces()
    operand, bias = torch.zeros(64, 64, device=device), torch.zeros(64, device=device)
    before_bytes = accelerators.allocated_bytes(device)
    product = torch.addmm(bias, operand, operand) if with_bias else operand @ operand
    taken_bytes = accelerators.allocated_bytes(device) - before_bytes
    own_bytes = product.untyped_storage().nbytes()
    forget_blas_workspaces()
    return max(0, taken_bytes - own_bytes)


def forget_blas_workspaces() -> None:
    """Releases the workspaces of cuBLAS and cuBLASLt to the caching allocator; their next calls allocate new ones."""
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def begin_history(device: torch.device) -> bool:
    """Makes the caching allocator record its requests; returns False if it cannot or already does."""
    if not _has_caching_allocator(device) or not torch.cuda.is_initialized() or torch._C._cuda_isHistoryEnabled():
        return False
    torch.cuda.memory._record_memory_history(context=None)
    return True


def end_history(device: torch.device) -> list[tuple[int, int]]:
    """Stops recording and returns (address, bytes) of each allocation and, with negative bytes, each free."""
    try:
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_requested": -1}
    return [(e["addr"], signs[e["action"]] * e["size"]) for e in traces[_index(device)] if e["action"] in signs]


def blocks_in_use(device: torch.device) -> list[tuple[int, int]] | None:
    """Returns (bytes, requested bytes) of each block that the caching allocator has handed out on a device, or None if
    it does not record them.
    """
    if not _has_caching_allocator(device):
        return None
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == _index(device)]
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    return [(block["size"], block["requested_size"]) for block in blocks]


def rounds_up_to_powers(device: torch.device) -> bool:
    """Returns whether the caching allocator is configured to round sizes up to (fractions of) powers of two."""
    if not _has_caching_allocator(device):
        return False
    settings: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return any(settings.get("roundup_power2_divisions", {}).values())


def _has_caching_allocator(device: torch.device) -> bool:
    return _is_cuda(device) and torch.cuda.get_allocator_backend() == "native"


def takes_other_allocators(device: torch.device) -> bool:
    """Returns whether PyTorch's allocator for the device can be replaced at the start of a process."""
    return _is_cuda(device)


@dataclass(frozen=True, slots=True)
class AllocatorFunctions:
    """The functions of a library that are to be PyTorch's CUDA allocator.

    Attributes:
        allocate: Name of the function that allocates.
        free: Name of the function that frees.
        record_stream_address: Address of the function that notes the use of a block by another stream.
        empty_cache_address: Address of the function that gives unused memory back to all devices.
        limit_address: Address of the function that limits a device to a share of its memory.
        begin_pool_address: Address of the function that begins to allocate to a graph's own pool.
    """

    allocate: str
    free: str
    record_stream_address: int
    empty_cache_address: int
    limit_address: int
    begin_pool_address: int


def install_allocator(library: str, functions: AllocatorFunctions) -> str:
    """Make functions of a library PyTorch's CUDA allocator, for the whole process; returns the type of device.

    Args:
        library: Path of the library.
        functions: Which of its functions do what.

    Raises:
        RuntimeError: Something has been allocated on a GPU already.
    """
    allocator = torch.cuda.memory.CUDAPluggableAllocator(library, functions.allocate, functions.free)
    inner = allocator.allocator()
    inner.set_record_stream_fn(functions.record_stream_address)
    inner.set_reset_fn(functions.empty_cache_address)
    inner.set_memory_fraction_fn(functions.limit_address)
    inner.set_begin_allocate_to_pool(functions.begin_pool_address)
    torch.cuda.memory.change_current_allocator(allocator)
    return "cuda"


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else int(torch.cuda.current_device())

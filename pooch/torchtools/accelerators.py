"""What Pooch needs from a device: streams, events, counters, random state. The CPU has none of these.

PyTorch's generic interface covers all of it (`torch.accelerator`, `torch.Stream`, `torch.Event`, and the module of the
device's own type for what differs only in name), so any accelerator with streams is used in the same way. What only
CUDA has is in `cuda_only`. Only CUDA has been tested, with PyTorch's real CUDA build on a simulated runtime. ROCm calls
itself "cuda"; Intel's XPU and vendors' NPUs provide the same functions but have not been tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

from ..ground.errors import UsageError
from .peak_counters import PEAKS, flattened

Result = TypeVar("Result")

GRANULE_BYTES = 512  # caching allocators hand out multiples of this


@cache
def _has_streams(device_type: str) -> bool:
    return device_type not in ("cpu", "meta") and hasattr(torch.get_device_module(device_type), "Stream")


def has_streams(device: torch.device) -> bool:
    """Returns whether the device computes and copies in its own streams, alongside the host."""
    return _has_streams(device.type)


def granule_bytes(device_type: str) -> int:
    """Returns the granularity of the allocator of a type of device, such as "cpu" or "cuda"."""
    return 1 if device_type == "cpu" else GRANULE_BYTES


def is_in_use(device: torch.device) -> bool:
    """Returns whether the device has streams and this process has begun to use it."""
    return has_streams(device) and bool(_module(device).is_initialized())


def is_available(device_type: str) -> bool:
    """Returns whether this process can create tensors on such a device."""
    return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())


def all_accelerators() -> list[torch.device]:
    """Returns all devices with streams on this machine."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not has_streams(kind):
        return []
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


def accelerators_in_use() -> list[torch.device]:
    """Returns the devices with streams that this process has begun to use."""
    return [device for device in all_accelerators() if is_in_use(device)]


def current_device(device_type: str) -> torch.device:
    """Returns the current device of a type, which may be "cpu"."""
    device = torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index()) if has_streams(device) else device


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


# Streams and events ---------------------------------------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream:
    """Returns the calling thread's current stream on a device, which need not be the thread's current device."""
    return torch.accelerator.current_stream(device.index)  # runs for each op, and an index is the fastest argument


def new_stream(device: torch.device) -> torch.Stream:
    """Returns a new stream."""
    return torch.Stream(device)


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Returns a new event; a timed one records when it is reached."""
    return torch.Event(device, enable_timing=timed)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Context manager that makes a stream the calling thread's current one.

    A `torch.Stream` is itself a context manager, but it stores where it was entered, so two threads cannot enter one.
    """
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device_index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def synchronize(device: torch.device) -> None:
    """Waits for the device to finish; does nothing on the CPU."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


# Memory ---------------------------------------------------------------------------------------------------------------


class MemoryCounters(Protocol):
    """An allocator that took the place of PyTorch's, which then counts nothing: `torch.accelerator` would return 0."""

    def memory_counters(self, device: int) -> dict[str, int]:
        """Returns the counters of a device by PyTorch's names."""

    def reset_peaks(self, device: int) -> None:
        """Resets the peak counters of a device."""

    def empty_pool(self, device: int) -> None:
        """Gives unused memory back to a device."""


_OTHERS: dict[str, MemoryCounters] = {}  # by type of device
_SILENT: set[str] = set()  # those of which torch's profiler hears nothing
_REPLACED = "pluggable"  # what PyTorch calls every allocator that has taken the place of its own


def count_memory_with(device_type: str, counters: MemoryCounters, *, tells_profiler: bool) -> None:
    """Asks another allocator than PyTorch's from now on, since it has taken its place.

    Args:
        device_type: of the devices that it serves.
        counters: the allocator.
        tells_profiler: whether it reports to torch's profiler.
    """
    _OTHERS[device_type] = counters
    if not tells_profiler:
        _SILENT.add(device_type)


def has_other_allocator(device_type: str) -> bool:
    """Returns whether another allocator has taken the place of PyTorch's."""
    return device_type in _OTHERS


def why_unheard(device: torch.device) -> str:
    """Returns why torch's profiler hears of no memory of the device, and what to do; "" if it does."""
    if device.type in _SILENT:
        return (
            f"Pooch's CUDA allocator cannot tell the profiler of PyTorch {torch.__version__} of memory: profile in a "
            "process that does not call pooch.install_cuda_arena(), and save the profile or plan"
        )
    backend = _backend(device)
    if backend in ("", "native", _REPLACED):
        return ""
    return (
        f"PyTorch's allocator backend {backend} tells nobody of single allocations, so no step can be recorded: leave "
        f"backend:{backend} out of PYTORCH_CUDA_ALLOC_CONF"
    )


def refuse_uncounted(device: torch.device) -> None:
    """Refuses a device whose memory comes from an allocator that counts nothing: counters would return 0.

    Raises:
        UsageError: PyTorch's allocator was replaced, and not by Pooch's.
    """
    if _backend(device) == _REPLACED and not has_other_allocator(device.type):
        raise UsageError(
            f"an allocator that counts no bytes has taken the place of PyTorch's on {device.type}, so no budget can be "
            "held: train without torch.cuda.memory.change_current_allocator()"
        )


def _backend(device: torch.device) -> str:
    """Returns what PyTorch calls the allocator of a device; "" where there is only one."""
    if not has_streams(device) or not is_available(device.type):
        return ""
    named = getattr(_module(device), "get_allocator_backend", None)
    return "" if named is None else str(named())


def allocated_bytes(device: torch.device) -> int:
    """Returns the device bytes of the tensors that are live now."""
    return memory_counters(device).get("allocated_bytes.all.current", 0)


def peak_allocated_bytes(device: torch.device) -> int:
    """Returns the highest number of allocated bytes since `reset_peaks`."""
    return memory_counters(device).get("allocated_bytes.all.peak", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    """Returns the highest number of bytes that the allocator held of the device since `reset_peaks`."""
    return memory_counters(device).get("reserved_bytes.all.peak", 0)


def memory_counters(device: torch.device) -> dict[str, int]:
    """Returns all counters of the allocator by PyTorch's names; peaks count since `reset_peaks`."""
    other = _OTHERS.get(device.type)
    if other is not None:
        return other.memory_counters(_index(device))
    if not torch.accelerator.is_available() or not torch._C._accelerator_isAllocatorInitialized():
        return {}
    return flattened(PEAKS.read(_index(device)))


def reset_peaks(device: torch.device) -> None:
    """Resets the peak counters that are told here. What PyTorch's own functions tell the program goes on."""
    other = _OTHERS.get(device.type)
    if other is None:
        if torch._C._accelerator_isAllocatorInitialized():
            PEAKS.reset(_index(device))
    else:
        other.reset_peaks(_index(device))


def empty_cache(device: torch.device) -> None:
    """Releases the cached memory of the allocator; does nothing on the CPU."""
    other = _OTHERS.get(device.type)
    if other is not None:
        other.empty_pool(_index(device))
    elif has_streams(device):
        torch.accelerator.empty_cache()


def available_bytes(device: torch.device) -> int:
    """Returns the bytes that are free on the device or cached by the allocator."""
    counters = memory_counters(device)
    cached = counters.get("reserved_bytes.all.current", 0) - counters.get("allocated_bytes.all.current", 0)
    return int(torch.accelerator.get_memory_info(device)[0] + cached)


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else int(torch.accelerator.current_device_index())


def total_bytes(device: torch.device) -> int:
    """Returns the total memory of the device."""
    return int(_module(device).get_device_properties(device).total_memory)


def shares_memory(device: torch.device) -> bool:
    """Returns whether the device has no memory of its own, so that copying to that of the host frees nothing."""
    if not has_streams(device):
        return False
    properties_of = getattr(_module(device), "get_device_properties", None)
    return bool(properties_of and getattr(properties_of(device), "is_integrated", False))


def name_of(device: torch.device) -> str:
    """Returns the name of the device."""
    return str(_module(device).get_device_properties(device).name)


# Random state ---------------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> bytes:
    """Returns the state of the default generator of a device, which may be the CPU.

    It is not kept as a tensor: on the CPU, a tensor would take 5,056 bytes for each op, of the memory that a plan
    counts to the byte.
    """
    state = _module(device).get_rng_state(device) if has_streams(device) else torch.get_rng_state()
    return bytes(state.numpy().tobytes())


def random_snapshot(device: torch.device) -> bytes | torch.Generator:
    """Returns a snapshot of the default generator of a device or of the CPU; it takes no device memory."""
    generator = _shared_generator(device)
    return random_state(device) if generator is None else generator.clone_state()


def called_drawing_from(
    device: torch.device, snapshot: bytes | torch.Generator, function: Callable[[], Result]
) -> Result:
    """Calls a function with the default generator going on from a snapshot; its own state is restored afterwards.

    A generator that can share another state is never set: setting a CUDA generator makes the next recurrent layer of
    cuDNN initialize its dropout again with a newly drawn seed, which changes all later random numbers.

    Ctrl-C cannot come between the function and the restoring, which is a single call into C where PyTorch has one.
    """
    restore, state = _restoring(device, snapshot)
    try:
        if isinstance(snapshot, bytes):
            set_random_state(device, snapshot)
        else:
            restore(snapshot.clone_state())  # a copy: the snapshot may be needed again
        return function()
    finally:
        restore(state)


def _restoring(device: torch.device, snapshot: bytes | torch.Generator) -> tuple[Callable[[Any], object], Any]:
    """Returns what sets the state of a generator as a snapshot does, and the state that it has now."""
    if isinstance(snapshot, bytes):
        before = torch.frombuffer(bytearray(random_state(device)), dtype=torch.uint8)
        if has_streams(device):
            return lambda state: _module(device).set_rng_state(state, device), before
        return torch.default_generator.set_state, before
    generator: Any = _shared_generator(device)
    assert generator is not None, "the snapshot is a state of this generator"
    return generator.graphsafe_set_state, generator.graphsafe_get_state()


def _shared_generator(device: torch.device) -> torch.Generator | None:
    """Returns the default generator of a device if it can share another generator's state, else None."""
    if not has_streams(device):
        return None
    generators = getattr(_module(device), "default_generators", ())
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    generator: Any = generators[index] if index < len(generators) else None
    kind: Any = type(generator)
    return generator if generator is not None and _can_share(kind, device.type) else None


@cache
def _can_share(kind: Any, device_type: str) -> bool:
    generator = kind(device_type)
    try:
        generator.graphsafe_set_state(generator.graphsafe_get_state())
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return False
    return True


def set_random_state(device: torch.device, state: bytes) -> None:
    """Sets the state of the default generator of a device or of the CPU."""
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if has_streams(device):
        _module(device).set_rng_state(tensor, device)
    else:
        torch.set_rng_state(tensor)

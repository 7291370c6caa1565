"""What a device is to us: streams, events, counters, random state. The CPU has none of these.

PyTorch's generic interface reaches all of it (`torch.accelerator`, `torch.Stream`, `torch.Event`, and the module of the
device's own type for what differs in name only), so any accelerator with streams is asked in the same way. What CUDA
alone has is in `cuda_only`. Only CUDA has been tried: PyTorch's real CUDA build on a simulated runtime. ROCm calls
itself "cuda"; Intel's XPU and vendors' NPUs have the same functions, and have not been tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

GRANULE_BYTES = 512  # caching allocators hand out multiples of this


@cache
def _has_streams(device_type: str) -> bool:
    return device_type not in ("cpu", "meta") and hasattr(torch.get_device_module(device_type), "Stream")


def has_streams(device: torch.device) -> bool:
    """Whether it computes and copies in streams of its own, beside the host."""
    return _has_streams(device.type)


def granule_bytes(device_type: str) -> int:
    """What the device's allocator counts in multiples of; `device_type` as in a profile ("cpu", "cuda")."""
    return 1 if device_type == "cpu" else GRANULE_BYTES


def is_in_use(device: torch.device) -> bool:
    """Whether it has streams, and this process has begun to use it."""
    return has_streams(device) and bool(_module(device).is_initialized())


def is_available(device_type: str) -> bool:
    """Whether this process can make tensors on such a device."""
    return device_type == "cpu" or bool(torch.get_device_module(device_type).is_available())


def all_accelerators() -> list[torch.device]:
    """Every device with streams here; none where there is no such device."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not has_streams(kind):
        return []
    return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]


def accelerators_in_use() -> list[torch.device]:
    """Those of them that this process may have left something on."""
    return [device for device in all_accelerators() if is_in_use(device)]


def current_device(device_type: str) -> torch.device:
    """The device of a type that is current; "cpu" is one too."""
    device = torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index()) if has_streams(device) else device


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device.type)


# Streams and events ---------------------------------------------------------------------------------------------------


def current_stream(device: torch.device) -> torch.Stream:
    """The calling thread's stream on a device, which need not be the thread's current device."""
    return torch.accelerator.current_stream(device.index)  # asked for each op: a number is looked up at once


def new_stream(device: torch.device) -> torch.Stream:
    """A stream beside the others."""
    return torch.Stream(device)


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """An event to record; `timed`: it also tells when it was reached."""
    return torch.Event(device, enable_timing=timed)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """What the calling thread issues inside goes to a stream.

    A `torch.Stream` is a context itself, but it remembers where it was entered, so two threads cannot enter one.
    """
    with torch.accelerator.device_index(stream.device_index):
        before = torch.accelerator.current_stream(stream.device_index)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to do on the CPU."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


# Memory ---------------------------------------------------------------------------------------------------------------


def allocated_bytes(device: torch.device) -> int:
    """Device bytes of the tensors that live now."""
    return int(torch.accelerator.memory_allocated(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """The most since `reset_peaks`."""
    return int(torch.accelerator.max_memory_allocated(device))


def peak_reserved_bytes(device: torch.device) -> int:
    """The most that the caching allocator had taken from the device since `reset_peaks`."""
    return int(torch.accelerator.max_memory_reserved(device))


def memory_counters(device: torch.device) -> dict[str, int]:
    """All that the caching allocator counts, peaks since `reset_peaks`, by PyTorch's names."""
    return dict(torch.accelerator.memory_stats(device))


def reset_peaks(device: torch.device) -> None:
    """Peaks are counted from here."""
    torch.accelerator.reset_peak_memory_stats(device)


def empty_cache(device: torch.device) -> None:
    """Give back what the caching allocator keeps for later; nothing to do on the CPU."""
    if has_streams(device):
        torch.accelerator.empty_cache()


def available_bytes(device: torch.device) -> int:
    """What the device has free, and what the caching allocator holds without using it."""
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(torch.accelerator.get_memory_info(device)[0] + cached)


def total_bytes(device: torch.device) -> int:
    """Memory of the device in all."""
    return int(_module(device).get_device_properties(device).total_memory)


def name_of(device: torch.device) -> str:
    """What the device calls itself."""
    return str(_module(device).get_device_properties(device).name)


# Random state ---------------------------------------------------------------------------------------------------------


def random_state(device: torch.device) -> bytes:
    """State of the default generator of a device, or of the CPU.

    Not kept as a tensor: on the CPU it would take 5,056 bytes for each op, of the memory that a plan counts to the
    byte.
    """
    state = _module(device).get_rng_state(device) if has_streams(device) else torch.get_rng_state()
    return bytes(state.numpy().tobytes())


def random_snapshot(device: torch.device) -> bytes | torch.Generator:
    """Where the default generator of a device, or of the CPU, stands; takes no memory of the device."""
    generator = _shared_generator(device)
    return random_state(device) if generator is None else generator.clone_state()


@contextmanager
def drawing_from(device: torch.device, snapshot: bytes | torch.Generator) -> Iterator[None]:
    """Inside, the default generator goes on from a snapshot; afterwards it stands where it stood.

    Where a generator can point at another state, it is never set: a generator of CUDA's that is set makes the next
    recurrent layer of cuDNN begin its dropout anew, with a seed that it draws, and all later numbers are others.
    """
    if isinstance(snapshot, bytes):
        before = random_state(device)
        set_random_state(device, snapshot)
        try:
            yield
        finally:
            set_random_state(device, before)
        return
    generator = _shared_generator(device)
    assert generator is not None, "the snapshot is one of its states"
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(snapshot.clone_state())  # a copy: it is drawn from, and may be needed again
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


def _shared_generator(device: torch.device) -> torch.Generator | None:
    """The default generator of a device, if it can point at a state that another one has."""
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
    except (AttributeError, RuntimeError):  # NotImplementedError is one too
        return False
    return True


def set_random_state(device: torch.device, state: bytes) -> None:
    """Set the default generator of a device, or of the CPU."""
    tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    if has_streams(device):
        _module(device).set_rng_state(tensor, device)
    else:
        torch.set_rng_state(tensor)

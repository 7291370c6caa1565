"""What everything else relies on: clocks, memory counters, random numbers, operators that repeat, and hooks."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ...ground.units import format_bytes
from ...torchtools import accelerators, cuda_only
from ...torchtools.determinism import may_vary
from ...torchtools.memory_meter import MemoryMeter
from ...torchtools.memory_trace import live_bytes
from ...torchtools.repeatability import catalogue, draws_repeat, varying_operators
from ..hook_costs import measure_hook_costs, measure_launch_ms
from .finding import Figure, Finding, Patient

_BUSY_S = 0.02
_CLOCKS_AGREE_S = 0.005
_MOST_AHEAD = 1.2  # of the device's clock against the host's: the host's interval is the longer one
_KNOWN_BYTES = (3 * 2**20, 5 * 2**20)


def compare_clocks(patient: Patient) -> Iterator[Finding]:
    """Whether the clocks that times are taken from tell the same time; a device's events are one of them."""
    begin_s, begin_other_s, begin_thread_s = time.perf_counter(), time.monotonic(), time.thread_time()
    while time.monotonic() - begin_other_s < _BUSY_S:
        pass
    took_s, other_s = time.perf_counter() - begin_s, time.monotonic() - begin_other_s
    thread_s = time.thread_time() - begin_thread_s
    figures: dict[str, Figure] = {"clock of steps, ms": took_s * 1000, "clock of the system, ms": other_s * 1000}
    wrong = ""
    if abs(took_s - other_s) > _CLOCKS_AGREE_S + 0.1 * other_s or thread_s > took_s + _CLOCKS_AGREE_S:
        wrong = f"time.perf_counter says {took_s * 1000:.1f} ms where {other_s * 1000:.1f} ms passed"
    elif accelerators.has_streams(patient.device):
        host_ms, device_ms = _device_interval_ms(patient.device)
        figures |= {"host, ms": host_ms, "events of the device, ms": device_ms}
        if not 0 < device_ms <= _MOST_AHEAD * host_ms + 1:
            wrong = f"the device's events say {device_ms:.1f} ms where {host_ms:.1f} ms passed"
    if wrong:
        yield Finding("clocks", "failed", f"{wrong}: times of plans mean nothing here", figures)
    else:
        yield Finding("clocks", "passed", "they tell the same time", figures)


def _device_interval_ms(device: torch.device) -> tuple[float, float]:
    operand = torch.ones(1024, 1024, device=device)
    stream = accelerators.current_stream(device)
    before, after = (accelerators.new_event(device, timed=True) for _ in range(2))
    accelerators.synchronize(device)
    begin_s = time.perf_counter()
    before.record(stream)
    cuda_only.occupy(device, 10)
    _ = operand @ operand
    after.record(stream)
    accelerators.synchronize(device)
    return (time.perf_counter() - begin_s) * 1000, float(before.elapsed_time(after))


def try_counters(patient: Patient) -> Iterator[Finding]:
    """Whether a known number of bytes is measured as that."""
    device = patient.device
    before_bytes = accelerators.allocated_bytes(device) if accelerators.has_streams(device) else live_bytes(device)
    with MemoryMeter(device) as meter:
        first, second = (torch.empty(size, dtype=torch.uint8, device=device) for size in _KNOWN_BYTES)
        del first, second
    measured_bytes, known_bytes = meter.peak_bytes - meter.rounding_bytes - before_bytes, sum(_KNOWN_BYTES)
    figures: dict[str, Figure] = {"allocated bytes": known_bytes, "measured bytes": measured_bytes}
    if measured_bytes == known_bytes:
        yield Finding("memory counters", "passed", "a known peak is measured to the byte", figures)
        return
    text = f"{format_bytes(known_bytes)} were measured as {format_bytes(measured_bytes)}"
    yield Finding("memory counters", "failed", f"{text}: budgets cannot be checked here", figures)


def try_random_numbers(patient: Patient) -> Iterator[Finding]:
    """Whether draws can be repeated, on the CPU and on the device."""
    for device in dict.fromkeys((torch.device("cpu"), patient.device)):
        if not draws_repeat(device):
            text = f"the generator of {device} does not go back to a state that it had"
            yield Finding("random numbers", "failed", f"{text}: replays with dropout would give other numbers")
            return
    yield Finding("random numbers", "passed", "draws can be repeated, and leave the generator as it was")


def try_operators(patient: Patient) -> Iterator[Finding]:
    """Which operators give other bits on the same inputs."""
    calls = catalogue(patient.device)
    patient.progress(f"running {len(calls)} operators several times")
    varying = varying_operators(patient.device, calls)
    unknown = [name for name in varying if not may_vary(name.partition(" ")[0])]
    figures: dict[str, Figure] = {"operators": len(calls), "differ": ", ".join(varying) or "none"}
    if unknown:
        text = f"{', '.join(unknown)} {_differ(unknown)} from run to run, which is not documented"
        yield Finding("operators", "failed", f"{text}: replays of them are found out, and cost a copy", figures)
    elif varying:
        text = f"{', '.join(varying)} {_differ(varying)} from run to run, as documented"
        remedy = "torch.use_deterministic_algorithms(True) makes most ops repeat"
        yield Finding("operators", "told", f"{text}; {remedy}", figures)
    else:
        yield Finding("operators", "passed", f"{len(calls)} operators give the same bits each time", figures)


def _differ(operators: list[str]) -> str:
    return "differs" if len(operators) == 1 else "differ"


def measure_hooks(patient: Patient) -> Iterator[Finding]:
    """What hooks cost the host."""
    patient.progress("measuring what hooks cost")
    kind = patient.device.type
    costs, launch_ms = measure_hook_costs(kind), measure_launch_ms(kind)
    figures: dict[str, Figure] = {
        "an op, us": costs.op_ms * 1000,
        "an op on large tensors, us": (costs.op_ms + costs.cold_op_ms) * 1000,
        "a replay, us": costs.replay_ms * 1000,
        "a copy, us": costs.copy_ms * 1000,
        "a step, us": costs.step_ms * 1000,
        "a plain op, us": launch_ms * 1000,
    }
    how = "natively" if costs.adds_in_place else "in Python"
    text = f"steps are watched {how}: {costs.op_ms * 1000:.1f} us for an op, {costs.copy_ms * 1000:.0f} us for a copy"
    yield Finding("hooks", "passed", f"{text}, {costs.replay_ms * 1000:.0f} us for a replay", figures)

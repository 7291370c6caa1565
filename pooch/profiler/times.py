"""Times of a step: all of it, the op of each slot, the host's share, and times that disturbances made too long."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..ground.units import format_ms
from ..torchtools.accelerators import synchronize
from .slots import StepAssembly
from .step import Forward, check_loss

MOST_TIMES_THE_SIBLINGS = 4.0
WORTH_A_RUN = 0.03  # share of the step that outliers must take together to be measured again
BUSY = 1.5  # times the fastest of some equal steps that the slowest takes on a machine that does something else, too
_SIBLINGS = 3


# The step and its slots -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Duration of one step's passes, in ms, until the device is done, and until the host has issued all of it.

    On a CPU, both are the same.
    """

    forward_ms: float
    backward_ms: float
    forward_host_ms: float = 0.0
    backward_host_ms: float = 0.0

    @property
    def step_ms(self) -> float:
        """Duration of both passes, in ms."""
        return self.forward_ms + self.backward_ms


def time_step(
    forward: Forward,
    model: torch.nn.Module,
    device: torch.device,
    between: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Times one step, forward and backward, without recording anything.

    Gradients are dropped first. `between` is called after the forward pass.
    """
    model.zero_grad(set_to_none=True)
    synchronize(device)
    begin_s = time.perf_counter()
    loss = check_loss(forward())
    issued_s = time.perf_counter()
    synchronize(device)
    middle_s = time.perf_counter()
    between()
    loss.backward()
    all_issued_s = time.perf_counter()
    synchronize(device)
    end_s = time.perf_counter()
    spans_s = (middle_s - begin_s, end_s - middle_s, issued_s - begin_s, all_issued_s - middle_s)
    return StepTimes(*(span_s * 1000 for span_s in spans_s))


def typical(samples: Sequence[StepTimes]) -> StepTimes:
    """Returns the median of three or more steps; of fewer, the fastest, since disturbances only make a step slower."""
    ordered = sorted(samples, key=lambda times: times.step_ms)
    return ordered[(len(ordered) - 1) // 2] if len(ordered) > 2 else ordered[0]


def slot_times_ms(assembly: StepAssembly) -> list[float]:
    """Returns the duration of each slot's op in one recorded step in ms (CPU clock); the closing slot takes none."""
    forward = [op.time_ms for op in assembly.recorder.ops]
    slots = range(assembly.forward_ops, assembly.end - 1)
    lasted_ns = [assembly.spans[slot].end_ns - assembly.spans[slot].start_ns for slot in slots]
    backward = [(ns - assembly.foreign_ns(slot)) / 1e6 for slot, ns in zip(slots, lasted_ns, strict=True)]
    return [*forward, *backward, 0.0]


# The host -------------------------------------------------------------------------------------------------------------


def host_times_ms(
    launching_ms: Sequence[float], forward_ops: int, plain: StepTimes, times_ms: Sequence[float]
) -> list[float]:
    """Estimates the host's time for each op of a plain step, in proportion to launch times while the step was recorded.

    If more kernels are waiting than the device accepts at once (1,024 on CUDA), the host waits for the device and seems
    slower than it is. The backward pass runs no Python, so its ops are not counted as costing more than forward ops on
    average. `launching_ms` and `times_ms` are by slot, the closing slot included.
    """
    forward, backward = launching_ms[:forward_ops], launching_ms[forward_ops:-1]
    most_backward_ms = plain.forward_host_ms / max(1, forward_ops) * len(backward)
    shared = [
        *_shared_out(plain.forward_host_ms, forward),
        *_shared_out(min(plain.backward_host_ms, most_backward_ms), backward),
        0.0,
    ]
    return never_late(shared, times_ms)


def _shared_out(total_ms: float, weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    return [total_ms * weight / whole if whole > 0 else total_ms / len(weights) for weight in weights]


def never_late(host_ms: Sequence[float], times_ms: Sequence[float]) -> list[float]:
    """Limits host times so that none makes the device wait in-core: such time is spent waiting for the device."""
    held: list[float] = []
    ahead_ms = 0.0
    for host, device in zip(host_ms, times_ms, strict=True):
        held.append(min(host, device + ahead_ms))
        ahead_ms += device - held[-1]
    return held


def paced_by_launches(kernels_ms: Sequence[float], launch_ms: float) -> list[float]:
    """Returns how long each op takes if the host needs a given time for each: after short kernels the device waits.

    The closing slot, which is not launched, comes last.
    """
    paced: list[float] = []
    end_ms = host_ms = 0.0
    for kernel_ms in kernels_ms[:-1]:
        host_ms += launch_ms
        before_ms, end_ms = end_ms, max(end_ms, host_ms) + kernel_ms
        paced.append(end_ms - before_ms)
    return [*paced, *kernels_ms[-1:]]


# Disturbances ---------------------------------------------------------------------------------------------------------


def sibling_kinds(assembly: StepAssembly) -> list[str]:
    """Returns, for each slot, what its siblings share with it: the operator and the shapes of its results or, in the
    backward pass, of the saved values that it reads.
    """
    values = assembly.recorder.values
    kinds = [op.fingerprint for op in assembly.recorder.ops]
    read_in: dict[int, list[str]] = {}
    for unpack, slot in zip(assembly.record.unpacks, assembly.unpack_slots, strict=True):
        if unpack.value >= 0:
            read_in.setdefault(slot, []).append(f"{values[unpack.value].dtype}{values[unpack.value].shape}")
    for slot in range(assembly.forward_ops, assembly.end):
        read = " ".join(read_in.get(slot, ()))
        # Without saved values nothing tells how large the op is, so it has no siblings.
        kinds.append(f"{assembly.spans[slot].node} {assembly.spans[slot].name} {read}" if read else f"slot {slot}")
    return kinds


def outliers(kinds: Sequence[str], times_ms: Sequence[float]) -> dict[int, float]:
    """Finds slots that took many times as long as the others of their kind: {slot: median of its siblings in ms}."""
    families: dict[str, list[int]] = {}
    for slot, kind in enumerate(kinds):
        families.setdefault(kind, []).append(slot)
    found: dict[int, float] = {}
    for slots in families.values():
        if len(slots) >= _SIBLINGS:
            median_ms = statistics.median(times_ms[slot] for slot in slots)
            found |= {slot: median_ms for slot in slots if times_ms[slot] > MOST_TIMES_THE_SIBLINGS * median_ms > 0}
    return found


def are_worth_a_run(found: dict[int, float], times_ms: Sequence[float]) -> bool:
    """Returns whether the step has to be recorded once more to measure these ops."""
    excess_ms = sum(times_ms[slot] - median_ms for slot, median_ms in found.items())
    return excess_ms > WORTH_A_RUN * sum(times_ms)


def spread_notes(samples_ms: Sequence[float]) -> tuple[str, ...]:
    """Returns a remark on how long equal steps took; none for a single one.

    Args:
        samples_ms: the times of the steps.
    """
    if len(samples_ms) < 2:
        return ()
    fastest_ms, slowest_ms = min(samples_ms), max(samples_ms)
    taken = f"the {len(samples_ms)} timed steps took {format_ms(fastest_ms)} to {format_ms(slowest_ms)}"
    is_busy = slowest_ms > BUSY * fastest_ms
    return (f"{taken}: times vary by {slowest_ms / fastest_ms:.1f}x, so the machine was busy" if is_busy else taken,)

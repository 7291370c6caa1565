"""How long the host takes to issue each op to a device with streams."""

from __future__ import annotations

from collections.abc import Sequence

from .timing import StepTimes


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

"""Op times on a device with streams: the kernels that each op launched, as the device itself timed them, without
synchronizing after each op.
"""

from __future__ import annotations

from typing import Any

import torch

from ..torchtools.accelerators import synchronize
from ..torchtools.memory_trace import AUTOGRAD_NODE, MARKER
from ..torchtools.operators import is_view_name
from ..torchtools.profiler_log import quiet_start
from ..torchtools.training_state import model_device
from .recorder import ForwardRecorder
from .slots import StepAssembly
from .step import Forward, check_loss


def device_slot_times_ms(forward: Forward, model: torch.nn.Module, assembly: StepAssembly) -> list[float] | None:
    """Measures the device time of each slot's op in one more run of the step, in ms.

    Returns:
        The times, or None if the ops differ from the assembly, compiled graphs are among them, or torch's profiler got
        no times from the device.
    """
    if assembly.recorder.has_graphs:
        return None
    recorder = ForwardRecorder(model)
    activities = list(torch.profiler.supported_activities())
    with quiet_start(), torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        with recorder.path.watched(), recorder:
            loss = check_loss(forward())
        loss.backward()
        synchronize(model_device(model))
    events = list(profiler.events() or ())
    by_marker = {e.name: _kernels_ms(e) for e in events if e.name.startswith(MARKER) and _on_cpu(e)}
    forward_times = [by_marker.get(f"{MARKER}op {op.call}", 0.0) for op in recorder.ops]
    backward = sorted((e for e in events if _is_backward_op(e)), key=lambda e: e.time_range.start)
    times = [*forward_times, *map(_kernels_ms, backward), 0.0]
    return times if len(times) == assembly.end and sum(times) > 0 else None


def _kernels_ms(event: Any) -> float:
    """Returns the device time of what an event and the events inside it launched. Torch's own sum also counts the
    annotation of a named range on the device, which has the same name, besides the kernels that it spans.
    """
    own_us = sum(kernel.duration for kernel in event.kernels if kernel.name != event.name)
    return float(own_us / 1000 + sum(_kernels_ms(child) for child in event.cpu_children))


def _on_cpu(event: Any) -> bool:
    return bool(event.device_type == torch._C._autograd.DeviceType.CPU)


def _is_backward_op(event: Any) -> bool:
    """Returns whether this is an outermost operator under an autograd node and not one of Pooch's."""
    if not _on_cpu(event) or "::" not in event.name or is_view_name(event.name) or event.name.startswith(AUTOGRAD_NODE):
        return False
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(AUTOGRAD_NODE):
        if parent.name.startswith(MARKER) or ("::" in parent.name and not parent.name.startswith("torch::autograd")):
            return False
        parent = parent.cpu_parent
    return parent is not None and not event.name.startswith("torch::autograd")

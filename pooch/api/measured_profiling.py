"""Modes "run" and "offload": profile a step by running it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ground.progress import Progress
from ..ir import Profile
from .split_profiling import with_split

if TYPE_CHECKING:
    import torch

    from ..profiler import ProfileOptions
    from ..torchtools.ranks import Ranks
    from ..workloads import Workload


def measured_profile(
    workload: Workload, options: ProfileOptions, progress: Progress, ranks: Ranks | None = None
) -> Profile:
    """Run the step on its device: measure the link, profile the step, and time the step with copies beside it.

    Args:
        workload: The step.
        options: How to profile.
        progress: Called with a description of each part.
        ranks: The ranks that do this in lockstep, if there are several: they measure copies at the same time.
    """
    from ..executor.engines import make_engine
    from ..executor.engines.measurement import measure_link, with_step_shares
    from ..profiler import profile_step
    from ..profiler.times import time_step
    from ..torchtools.training_state import model_device, training_state_kept

    forward, model = workload.forward, workload.model
    device = model_device(model)
    room_bytes = _left_by_limit(device, options)
    with closing(make_engine(device)) as engine:
        if ranks is not None:
            progress("waiting for the other ranks")
            ranks.least("here", 1)
        progress("measuring the link to the swap tier")
        link = measure_link(engine, device, room_bytes=room_bytes)
        done = profile_step(forward, model, workload.optimizer, link, options, progress, ranks)
        if not done.plain:  # the plain step may not fit, so copies cannot be timed beside it
            progress("timing copies beside compute")
            link = measure_link(engine, device, shares=True, room_bytes=room_bytes)
            return with_split(replace(done.profile, link=link), workload, options, progress)

        def time_plain_step(between: Callable[[], None]) -> tuple[float, float]:
            progress("timing a step with copies beside it")
            with training_state_kept(model, device):
                times = time_step(forward, model, device, between)
            return times.forward_ms, times.backward_ms

        alone = [(times.forward_ms, times.backward_ms) for times in done.plain]
        spare_bytes = _spare_bytes(done.profile, device, options)
        if ranks is not None:  # it decides how many steps are run
            spare_bytes = ranks.least("spare bytes", spare_bytes)
        beside = with_step_shares(done.profile.link, engine, device, alone, time_plain_step, spare_bytes)
        link = beside or measure_link(engine, device, shares=True, room_bytes=room_bytes)
        return with_split(replace(done.profile, link=link), workload, options, progress)


def _left_by_limit(device: torch.device, options: ProfileOptions) -> int | None:
    """Device bytes that the limit for profiling leaves beside what lives there now. None: there is no limit."""
    from ..torchtools.memory_trace import live_bytes

    limit = options.memory_limit_bytes
    return None if limit is None else max(0, limit - live_bytes(device))


def _spare_bytes(profile: Profile, device: torch.device, options: ProfileOptions) -> int:
    """Device bytes that the process may take beyond those of a plain step."""
    from ..torchtools.device_memory import room_bytes
    from ..torchtools.memory_trace import live_bytes

    room = room_bytes(device, live_bytes(device))
    limit = options.memory_limit_bytes
    return (room if limit is None else min(room, limit)) - profile.peak_bytes

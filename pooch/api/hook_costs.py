"""What hooks, replays and copies cost the host, measured on a chain of ops too small for anything else to matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from ..errors import PoochError
from ..ir import Decisions, HookCosts, Link, Plan, Profile
from ..progress import Progress
from .planning import plan_from_decisions

if TYPE_CHECKING:
    import torch

OPS = 64
TURNS = 6
_ELEMENTS = 4096  # the smallest tensors that are decided on
_LINK = Link("not used", 0.01, 0.01, 1e6, 1e6)


def with_hook_costs(profile: Profile, progress: Progress) -> Profile:
    """The profile with the hook costs of this machine's host; unchanged for a modelled device.

    If no plain step was run on a device with streams, its ops also get the time that the host takes to issue an op:
    they wait for it if kernels are shorter.
    """
    if profile.device.modelled:
        return profile
    progress("measuring what hooks cost")
    from ..torchtools.memory_trace import earlier_objects_exempt

    try:
        with earlier_objects_exempt():
            hooked = replace(profile, hooks=measure_hook_costs(profile.device.kind))
            if profile.device.has_streams and profile.mode != "run":
                return _launched(hooked, measure_launch_ms(profile.device.kind))
            return hooked
    except PoochError as error:  # without them, only the times of plans are a little low
        note = f"the cost of hooks could not be measured ({error}), so predictions do not include it"
        return replace(profile, notes=(*profile.notes, note))


def _launched(profile: Profile, launch_ms: float) -> Profile:
    """The profile, whose op times are those of kernels alone, with a host that takes `launch_ms` to issue each op."""
    from ..profiler.host_times import paced_by_launches

    times_ms = paced_by_launches([op.time_ms for op in profile.ops], launch_ms)
    host_ms = [*[launch_ms] * (len(times_ms) - 1), 0.0]
    both = zip(profile.ops, times_ms, host_ms, strict=True)
    ops = tuple(replace(op, time_ms=device, host_ms=host) for op, device, host in both)
    return replace(profile, ops=ops, step_ms=sum(times_ms), split=None)  # its ops are not paced


def measure_hook_costs(device_type: str = "cpu") -> HookCosts:
    """Costs of this machine's host for tensors on such a device; measured once per process."""
    return _measured(device_type)[0]


def measure_launch_ms(device_type: str) -> float:
    """Time that the host takes to issue a small op of plain training; measured once per process."""
    return _measured(device_type)[1]


@cache
def _measured(device_type: str) -> tuple[HookCosts, float]:
    from ..profiler import ProfileOptions, profile_step
    from ..torchtools.accelerators import current_device

    device = current_device(device_type)
    chain, forward = _chain(device)
    profile = profile_step(forward, chain, None, _LINK, ProfileOptions(warmup=0, mode="run")).profile
    ids = [value.id for value in profile.activations]
    decisions: dict[str, Decisions] = {
        "kept": dict.fromkeys(ids[:1], "swap"),
        "swapped": dict.fromkeys(ids, "swap"),
        "replayed": dict.fromkeys(ids, "recompute"),
    }
    plans = {name: plan_from_decisions(profile, each, region="step") for name, each in decisions.items()}
    forward_ms, taken_ms = _times_ms(device, forward, plans)
    swaps = sum(action.kind in ("copy_out", "copy_in") for action in plans["swapped"].schedule.actions)
    replays = sum(action.kind == "replay" for action in plans["replayed"].schedule.actions)
    op_ms = max(0.0, taken_ms["kept"] - taken_ms["plain"]) / OPS
    copy_ms = max(0.0, taken_ms["swapped"] - taken_ms["kept"]) / max(1, swaps)
    again_ms = (taken_ms["replayed"] - taken_ms["kept"]) / max(1, replays)
    launch_ms = forward_ms / OPS
    return HookCosts(op_ms, max(0.0, again_ms - launch_ms - op_ms), copy_ms), launch_ms


def _chain(device: torch.device) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """A chain of ops, each of which saves its input."""
    import torch

    model = torch.nn.Module()
    start = torch.nn.Parameter(torch.linspace(0.1, 1.0, _ELEMENTS, device=device))
    model.register_parameter("start", start)

    def forward() -> torch.Tensor:
        hidden = start * 1
        for _ in range(OPS):
            hidden = hidden.sin()
        return hidden.sum()

    return model, forward


def _times_ms(
    device: torch.device, forward: Callable[[], torch.Tensor], plans: dict[str, Plan]
) -> tuple[float, dict[str, float]]:
    """Times of a plain forward pass and of a step plainly and under each plan: the minimum over several turns.

    On a CPU this is the time that this thread computes, so that neither other programs nor waiting for a disk count.
    With streams it is the time until everything is issued, which another thread does for the backward pass.
    """
    from ..executor import apply_plan
    from ..torchtools.accelerators import has_streams, synchronize

    clock_s = time.perf_counter if has_streams(device) else time.thread_time

    def step_ms(region: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
        synchronize(device)
        begin_s = clock_s()
        with region():
            loss = forward()
        middle_s = clock_s()
        loss.backward()
        return (clock_s() - begin_s) * 1000, (middle_s - begin_s) * 1000

    with ExitStack() as attached:
        ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
        for name, plan in plans.items():
            twin, _ = _chain(device)  # a model has only one plan at a time, and a region covers any step
            ways[name] = attached.enter_context(apply_plan(plan, twin, on_mismatch="error")).step
        turns = [{name: step_ms(way) for name, way in ways.items()} for _ in range(TURNS)]
    least = {name: min(turn[name] for turn in turns) for name in ways}
    return min(turn["plain"][1] for turn in turns), {name: whole_ms for name, (whole_ms, _) in least.items()}

"""What hooks, replays and copies cost the thread that computes, measured on a chain of ops too small for anything else
to show.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from pooch.errors import PoochError
from pooch.ir import Choice, HookCosts, Link, Plan, Profile
from pooch.progress import Progress
from pooch.session.planning import plan_from_decisions

if TYPE_CHECKING:
    import torch

OPS = 64
TURNS = 6
_ELEMENTS = 4096  # the smallest tensors that are decided on
_LINK = Link("not used", 0.01, 0.01, 1e6, 1e6)


def with_hook_costs(profile: Profile, progress: Progress) -> Profile:
    """The profile with what hooks cost where it was taken; as it is for a GPU, whose host works ahead, and for a
    modelled device.
    """
    if profile.device.kind != "cpu" or profile.device.modelled:
        return profile
    progress("measuring what hooks cost")
    from pooch.torchtools.memory_trace import earlier_objects_exempt

    try:
        with earlier_objects_exempt():
            return replace(profile, hooks=measure_hook_costs())
    except PoochError as error:  # the profile is right without, only its plans' times are a little low
        note = f"what hooks cost could not be measured ({error}), and is in no prediction"
        return replace(profile, notes=(*profile.notes, note))


@cache
def measure_hook_costs() -> HookCosts:
    """Costs on this machine's CPU; once in a process."""
    from pooch.profiler import ProfileOptions, profile_step

    chain, forward = _chain()
    profile = profile_step(forward, chain, None, _LINK, ProfileOptions(warmup=0, mode="run")).profile
    ids = [value.id for value in profile.activations]
    plans = {
        "kept": _all(profile, ids[:1], "swap"),
        "swapped": _all(profile, ids, "swap"),
        "replayed": _all(profile, ids, "recompute"),
    }
    forward_ms, taken_ms = _times_ms(forward, plans)
    swaps = sum(action.kind in ("copy_out", "copy_in") for action in plans["swapped"].schedule.actions)
    replays = sum(action.kind == "replay" for action in plans["replayed"].schedule.actions)
    op_ms = max(0.0, taken_ms["kept"] - taken_ms["plain"]) / OPS
    copy_ms = max(0.0, taken_ms["swapped"] - taken_ms["kept"]) / max(1, swaps)
    again_ms = (taken_ms["replayed"] - taken_ms["kept"]) / max(1, replays)
    return HookCosts(op_ms, max(0.0, again_ms - forward_ms / OPS - op_ms), copy_ms)


def _chain() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Ops each of which saves its input."""
    import torch

    model = torch.nn.Module()
    start = torch.nn.Parameter(torch.linspace(0.1, 1.0, _ELEMENTS, device="cpu"))
    model.register_parameter("start", start)

    def forward() -> torch.Tensor:
        hidden = start * 1
        for _ in range(OPS):
            hidden = hidden.sin()
        return hidden.sum()

    return model, forward


def _all(profile: Profile, ids: list[int], choice: Choice) -> Plan:
    return plan_from_decisions(profile, dict.fromkeys(ids, choice), region="step")


def _times_ms(forward: Callable[[], torch.Tensor], plans: dict[str, Plan]) -> tuple[float, dict[str, float]]:
    """A plain forward pass, and steps in all ways: the least of some turns, of this thread's own computing, so that
    neither other programs nor waiting for a disk count.
    """
    from pooch.executor import apply_plan

    def step_ms(region: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
        begin_s = time.thread_time()
        with region():
            loss = forward()
        middle_s = time.thread_time()
        loss.backward()
        return (time.thread_time() - begin_s) * 1000, (middle_s - begin_s) * 1000

    twins = {name: _chain()[0] for name in plans}  # a model has one plan at a time, and these regions take any step
    with ExitStack() as attached:
        ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
        for name, plan in plans.items():
            ways[name] = attached.enter_context(apply_plan(plan, twins[name], on_mismatch="error")).step
        turns = [{name: step_ms(way) for name, way in ways.items()} for _ in range(TURNS)]
    least = {name: min(turn[name] for turn in turns) for name in ways}
    return min(turn["plain"][1] for turn in turns), {name: whole_ms for name, (whole_ms, _) in least.items()}

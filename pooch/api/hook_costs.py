"""What hooks, replays and copies cost the host, measured on chains of ops: plainly, and under plans, in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from ..ground.errors import PoochError
from ..ground.progress import Progress
from ..ir import Decisions, HookCosts, Link, Plan, Profile
from .manual import plan_from_decisions

if TYPE_CHECKING:
    import torch

TURNS = 6
VIEWS = 4  # that follow an op, where they are measured
_SHORT_ELEMENTS = 4096  # the smallest tensors that are decided on
# Ops of real networks on a CPU leave little of what Python needs in the cache, so that hooks take two to three times as
# long as between short ops. An op on two tensors of this size passes over 2 MiB, the second-level cache of many cores.
_EVICTING_ELEMENTS = 2**18
_OPS, _TIMES_FEWER = 32, 8  # of a chain of these, and of one whose steps take little but what each step takes
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
    from ..profiler.times import paced_by_launches

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
    from ..torchtools import watch
    from ..torchtools.accelerators import current_device, has_streams

    device = current_device(device_type)
    # Copies are priced by the link and kernels by the device, so what starts them is seen where both are short.
    short = _taken(_Chain(device, 64, _SHORT_ELEMENTS), ("kept", "swapped", "replayed"))
    elements = _SHORT_ELEMENTS if has_streams(device) else _EVICTING_ELEMENTS
    seen = short if has_streams(device) else _taken(_Chain(device, _OPS, elements), ("kept", "replayed"))
    few, viewed = (_taken(chain, ("kept",)) for chain in (_few(seen.chain), _Chain(device, _OPS, elements, VIEWS)))
    op_ms, step_ms = _op_and_step_ms(few, seen)
    if seen is not short:  # an op takes at least what it takes between short ones, which are timed with less noise
        op_ms = max(op_ms, _op_and_step_ms(_taken(_few(short.chain), ("kept",)), short)[0])
    viewed_ms = viewed.more_ms("kept", "plain") - step_ms / _OPS
    copy_ms = short.more_ms("swapped", "kept") * short.chain.ops / max(1, short.copies)
    again_ms = seen.more_ms("replayed", "kept") * seen.chain.ops / max(1, seen.replays)
    costs = HookCosts(
        op_ms=max(0.0, op_ms),
        replay_ms=max(0.0, again_ms - seen.forward_ms - op_ms),
        copy_ms=max(0.0, copy_ms),
        view_ms=max(0.0, (viewed_ms - op_ms) / VIEWS),
        adds_in_place=watch.LIBRARY.get() is not None,
        step_ms=step_ms,
    )
    return costs, short.forward_ms


def _few(chain: _Chain) -> _Chain:
    return replace(chain, ops=chain.ops // _TIMES_FEWER)


def _op_and_step_ms(few: _Taken, many: _Taken) -> tuple[float, float]:
    """What hooks cost for each op and for each step: a step takes a part of it however few ops it has.

    Args:
        few: what a chain of few ops took.
        many: what one of many ops took.
    """
    few_ms, many_ms = (each.more_ms("kept", "plain") * each.chain.ops for each in (few, many))
    op_ms = max(0.0, (many_ms - few_ms) / (many.chain.ops - few.chain.ops))
    return op_ms, max(0.0, few_ms - op_ms * few.chain.ops)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain of ops, each of which saves its result, and of views.

    Attributes:
        device: that it runs on.
        ops: its number of ops.
        elements: of each tensor.
        views: that follow each op.
    """

    device: torch.device
    ops: int
    elements: int
    views: int = 0

    def build(self) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        """A model, and its forward pass up to the loss."""
        import torch

        model = torch.nn.Module()
        start = torch.nn.Parameter(torch.linspace(0.1, 1.0, self.elements, device=self.device))
        model.register_parameter("start", start)

        def forward() -> torch.Tensor:
            hidden = start * 1
            for _ in range(self.ops):
                hidden = hidden.relu()
                for _ in range(self.views):
                    hidden = hidden.view(-1)
            return hidden.sum()

        return model, forward


@dataclass(frozen=True, slots=True)
class _Taken:
    """What the steps of a chain took.

    Attributes:
        chain: that was run.
        step_ms: time of a step in each way.
        forward_ms: time of a plain forward pass for each op.
        copies: copies of a step where all values are swapped.
        replays: replays of a step where all values are recomputed.
    """

    chain: _Chain
    step_ms: dict[str, float]
    forward_ms: float
    copies: int
    replays: int

    def more_ms(self, way: str, other: str) -> float:
        """How much longer one way takes than another for each op."""
        return (self.step_ms[way] - self.step_ms[other]) / self.chain.ops


def _taken(chain: _Chain, names: tuple[str, ...]) -> _Taken:
    """Run steps of a chain plainly and under plans that recompute one value, or swap or recompute all of them."""
    from ..profiler import ProfileOptions, profile_step

    model, forward = chain.build()
    profile = profile_step(forward, model, None, _LINK, ProfileOptions(warmup=0, mode="run")).profile
    ids = [value.id for value in profile.activations]
    decisions: dict[str, Decisions] = {
        "kept": dict.fromkeys(ids[:1], "recompute"),
        "swapped": dict.fromkeys(ids, "swap"),
        "replayed": dict.fromkeys(ids, "recompute"),
    }
    plans = {name: plan_from_decisions(profile, decisions[name], region="step") for name in names}
    forward_ms, step_ms = _times_ms(chain, forward, plans)
    kinds = {name: Counter(action.kind for action in plan.schedule.actions) for name, plan in plans.items()}
    copies, replays = kinds.get("swapped", Counter()), kinds.get("replayed", Counter())
    return _Taken(chain, step_ms, forward_ms / chain.ops, copies["copy_out"] + copies["copy_in"], replays["replay"])


def _times_ms(
    chain: _Chain, forward: Callable[[], torch.Tensor], plans: dict[str, Plan]
) -> tuple[float, dict[str, float]]:
    """Times of a plain forward pass and of a step plainly and under each plan: the minimum over several turns.

    On a CPU this is the time that this thread computes, so that neither other programs nor waiting for a disk count.
    With streams it is the time until everything is issued, which another thread does for the backward pass.
    """
    from ..executor import apply_plan
    from ..torchtools.accelerators import has_streams, synchronize

    clock_s = time.perf_counter if has_streams(chain.device) else time.thread_time

    def step_ms(region: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
        synchronize(chain.device)
        begin_s = clock_s()
        with region():
            loss = forward()
        middle_s = clock_s()
        loss.backward()
        return (clock_s() - begin_s) * 1000, (middle_s - begin_s) * 1000

    with ExitStack() as attached:
        ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
        # A model has only one plan at a time, and a region covers any step. A run does not keep its model alive.
        twins = {name: chain.build()[0] for name in plans}
        for name, plan in plans.items():
            ways[name] = attached.enter_context(apply_plan(plan, twins[name], on_mismatch="error")).step
        turns = [{name: step_ms(way) for name, way in ways.items()} for _ in range(TURNS)]
    least = {name: min(turn[name] for turn in turns) for name in ways}
    return min(turn["plain"][1] for turn in turns), {name: whole_ms for name, (whole_ms, _) in least.items()}

"""What hooks, replays and copies cost the host, measured on chains of ops: plainly, and under plans, in turns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import TYPE_CHECKING

from ..ground.errors import PoochError
from ..ground.progress import Progress
from ..ir import Decisions, HookCosts, Link, Profile
from .manual import plan_from_decisions

if TYPE_CHECKING:
    import torch

TURNS = 12  # of which the median counts: single steps differ by more than what hooks cost
VIEWS = 4  # that follow an op, where they are measured
_SHORT_ELEMENTS = 4096  # the smallest tensors that are decided on
# Ops of real networks on a CPU leave little of what hooks need in the caches. An op on two tensors of this size passes
# over 2 MiB, the second-level cache of many cores.
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
    chain = _Chain(device, 2 * _OPS, _SHORT_ELEMENTS)
    few, short = _taken((_few(chain), ("kept",)), (chain, ("kept", "swapped", "replayed")))
    op_ms, step_ms = _op_and_step_ms(few, short)
    seen, seen_op_ms, elements = short, op_ms, _SHORT_ELEMENTS
    if not has_streams(device):
        elements = _EVICTING_ELEMENTS
        chain = _Chain(device, _OPS, elements)
        few, seen = _taken((_few(chain), ("kept",)), (chain, ("kept", "replayed")))
        seen_op_ms, step_ms = _op_and_step_ms(few, seen)
    (viewed,) = _taken((_Chain(device, _OPS, elements, VIEWS), ("kept",)))
    viewed_ms = viewed.more_ms("kept", "plain") - step_ms / _OPS
    copy_ms = short.more_ms("swapped", "kept") * short.chain.ops / max(1, short.copies)
    again_ms = seen.more_ms("replayed", "kept") * seen.chain.ops / max(1, seen.replays)
    costs = HookCosts(
        op_ms=op_ms,
        replay_ms=max(0.0, again_ms - seen.forward_ms - seen_op_ms),
        copy_ms=max(0.0, copy_ms),
        view_ms=max(0.0, (viewed_ms - seen_op_ms) / VIEWS),
        adds_in_place=watch.LIBRARY.get() is not None,
        step_ms=step_ms,
        cold_op_ms=max(0.0, seen_op_ms - op_ms),
    )
    return costs, short.forward_ms


def _few(chain: _Chain) -> _Chain:
    return replace(chain, ops=chain.ops // _TIMES_FEWER)


def _op_and_step_ms(few: _Taken, many: _Taken) -> tuple[float, float]:
    """What hooks cost for each op and for each step: a step takes a part of it however few ops it has.

    Args:
        few: what a chain of few ops took.
        many: what one of many ops took, in the same turns.
    """
    few_ms, many_ms = (each.differences_ms("kept", "plain") for each in (few, many))
    grown_ms = median(above - below for below, above in zip(few_ms, many_ms, strict=True))
    op_ms = max(0.0, grown_ms / (many.chain.ops - few.chain.ops))
    return op_ms, max(0.0, median(few_ms) - op_ms * few.chain.ops)


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
        step_ms: times of a step in each way, one for each turn.
        forward_ms: time of a plain forward pass for each op.
        copies: copies of a step where all values are swapped.
        replays: replays of a step where all values are recomputed.
    """

    chain: _Chain
    step_ms: dict[str, list[float]]
    forward_ms: float
    copies: int
    replays: int

    def differences_ms(self, way: str, other: str) -> list[float]:
        """How much longer a step takes in one way than in another, in each turn."""
        return [one - two for one, two in zip(self.step_ms[way], self.step_ms[other], strict=True)]

    def more_ms(self, way: str, other: str) -> float:
        """How much longer one way takes than another for each op."""
        return median(self.differences_ms(way, other)) / self.chain.ops


def _taken(*asked: tuple[_Chain, tuple[str, ...]]) -> list[_Taken]:
    """Run steps of chains in turns, plainly and under plans that recompute one value, or move or replay all of them."""
    with ExitStack() as attached:
        prepared = [_Prepared(chain, names, attached) for chain, names in asked]
        turns = [[each.turn_ms() for each in prepared] for _ in range(TURNS)]
    return [each.taken([turn[index] for turn in turns]) for index, each in enumerate(prepared)]


class _Prepared:
    """A chain and the ways in which it is run."""

    def __init__(self, chain: _Chain, names: tuple[str, ...], attached: ExitStack) -> None:
        from ..executor import apply_plan
        from ..profiler import ProfileOptions, profile_step

        self.chain = chain
        self._model, self._forward = chain.build()
        profile = profile_step(self._forward, self._model, None, _LINK, ProfileOptions(warmup=0, mode="run")).profile
        ids = [value.id for value in profile.activations]
        decisions: dict[str, Decisions] = {
            "kept": dict.fromkeys(ids[:1], "recompute"),
            "swapped": dict.fromkeys(ids, "swap"),
            "replayed": dict.fromkeys(ids, "recompute"),
        }
        plans = {name: plan_from_decisions(profile, decisions[name], region="step") for name in names}
        self._actions = {name: Counter(action.kind for action in plan.schedule.actions) for name, plan in plans.items()}
        # A model has only one plan at a time, and a region covers any step. A run does not keep its model alive.
        self._twins = {name: chain.build()[0] for name in plans}
        self._ways: dict[str, Callable[[], AbstractContextManager[object]]] = {"plain": nullcontext}
        for name, plan in plans.items():
            self._ways[name] = attached.enter_context(apply_plan(plan, self._twins[name], on_mismatch="error")).step

    def turn_ms(self) -> dict[str, tuple[float, float]]:
        """The times of a step and of its forward pass in each way, in ms.

        On a CPU this is the time that this thread computes, so that neither other programs nor waiting for a disk
        count. With streams it is the time until everything is issued, which another thread does for the backward pass.
        """
        from ..torchtools.accelerators import has_streams, synchronize

        clock_s = time.perf_counter if has_streams(self.chain.device) else time.thread_time

        def step_ms(region: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
            synchronize(self.chain.device)
            begin_s = clock_s()
            with region():
                loss = self._forward()
            middle_s = clock_s()
            loss.backward()
            return (clock_s() - begin_s) * 1000, (middle_s - begin_s) * 1000

        return {name: step_ms(way) for name, way in self._ways.items()}

    def taken(self, turns: list[dict[str, tuple[float, float]]]) -> _Taken:
        """All turns together."""
        copied, replayed = (self._actions.get(name, Counter()) for name in ("swapped", "replayed"))
        return _Taken(
            self.chain,
            {name: [turn[name][0] for turn in turns] for name in self._ways},
            median(turn["plain"][1] for turn in turns) / self.chain.ops,
            copied["copy_out"] + copied["copy_in"],
            replayed["replay"],
        )

"""The memory of a step as it was measured, block by block, with what the plan decides about each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...ground.errors import UsageError
from ...ground.progress import Progress, silent
from ...ir import Choice, Plan
from ...ir.layout import Block
from ...ir.lives import Life, StepLives
from ...packing import pack
from ..step_lives import DECIDED, reasons_of
from .training import applied, forward_and_backward

if TYPE_CHECKING:
    from ...torchtools.memory_trace import MemoryTrace
    from ...workloads import Workload

WARM_STEPS = 2
BEFORE = "from before the step"
_UNKNOWN = "not decided on"
_PACKING_S = 2.0


@dataclass(slots=True)
class _Seen:
    """A block while its events are read.

    Attributes:
        size_bytes: its bytes.
        begin: number of the event that allocated it; 0: it was there before.
        begin_ns: the time of that.
        end: number of the event that released it, or None.
        end_ns: the time of that.
        value: what it held first, of what the plan decides on, or -1.
    """

    size_bytes: int
    begin: int
    begin_ns: int
    end: int | None = None
    end_ns: int = 0
    value: int = -1


def measured_lives(build: Callable[[], Workload], plan: Plan, *, progress: Progress = silent) -> StepLives:
    """Train under a plan for some steps, and record the memory of the last one.

    Blocks have no addresses of their own machine, but those of one arena in which they are packed. A block in which one
    value lies after another, as after an op in place, is told by the first of them.

    Args:
        build: builds the workload.
        plan: that was made for it.
        progress: called with what is being done.

    Raises:
        UsageError: the plan moves nothing, so that nothing watches its steps.
        PlanMismatch: the plan was made for another model or device.
        ProfileError: the memory of the device cannot be recorded.
    """
    from ...torchtools.memory_trace import MemoryTracer, live_bytes
    from ...torchtools.training_state import model_device

    if not plan.schedule.actions:
        raise UsageError("the plan moves nothing, so nothing watches its steps: show what is predicted instead")
    workload = build()
    device = model_device(workload.model)
    with applied(plan, workload) as run:
        assert run is not None
        run.mark_values()
        for number in range(WARM_STEPS):
            progress(f"planned step {number + 1} of {WARM_STEPS + 1}")
            forward_and_backward(workload, run)
            if workload.optimizer is not None:
                workload.optimizer.step()
            workload.model.zero_grad(set_to_none=True)
        progress(f"planned step {WARM_STEPS + 1} of {WARM_STEPS + 1}")
        start_bytes = live_bytes(device)
        tracer = MemoryTracer(device)
        tracer.start()
        try:
            loss = forward_and_backward(workload, run)
        finally:
            trace = tracer.stop()
        del loss
    return _lives_in(trace, start_bytes, plan)


def _lives_in(trace: MemoryTrace, start_bytes: int, plan: Plan) -> StepLives:
    seen = _blocks(trace)
    before_bytes = sum(block.size_bytes for block in seen if block.begin == 0)
    last = len(trace.events) + 1
    layout = pack(
        [Block(each.begin, last + 1 if each.end is None else each.end, each.size_bytes, 64) for each in seen],
        policy="ours",
        time_limit_s=_PACKING_S,
    )
    start_ns = trace.events[0].time_ns if trace.events else 0
    reasons = reasons_of(plan)
    kinds: dict[int, Choice] = dict.fromkeys(plan.schedule.swapped, "swap")
    kinds |= dict.fromkeys(plan.schedule.recomputed, "recompute")
    decided = {each.value: (DECIDED[kinds.get(each.value, "keep")], each.label) for each in plan.choices}
    lives = tuple(
        replace(_life(each, decided, reasons, start_ns), address=offset)
        for each, offset in zip(seen, layout.offsets, strict=True)
    )
    return StepLives(f"{plan.workload}, measured", start_bytes - before_bytes, layout.arena_bytes, lives)


def _life(seen: _Seen, decided: dict[int, tuple[str, str]], reasons: dict[int, str], start_ns: int) -> Life:
    decision, label = decided.get(seen.value, (BEFORE if seen.begin == 0 else _UNKNOWN, "of no activation"))
    begin_us, end_us = ((each - start_ns) // 1000 for each in (seen.begin_ns, seen.end_ns))
    return Life(
        decision, label, reasons.get(seen.value, ""), seen.value, 0, seen.size_bytes, seen.begin, seen.end,
        max(begin_us, 0), max(end_us, 0),
    )  # fmt: skip


def _blocks(trace: MemoryTrace) -> list[_Seen]:
    """Pair allocations with releases, and marks with the block that lies at their address then."""
    from ...executor.observed import marked

    marks = sorted((span.start_ns, found) for span in trace.markers if (found := marked(span.name)) is not None)
    here: dict[int, _Seen] = {}
    blocks: list[_Seen] = []
    place = 0
    start_ns = trace.events[0].time_ns if trace.events else 0

    def note(until_ns: int) -> None:
        nonlocal place
        while place < len(marks) and marks[place][0] < until_ns:
            number, address = marks[place][1]
            if address in here and here[address].value < 0:
                here[address].value = number
            place += 1

    for number, event in enumerate(trace.events, start=1):
        note(event.time_ns)
        if event.size_bytes > 0:
            here[event.pointer] = block = _Seen(event.size_bytes, number, event.time_ns)
            blocks.append(block)
        elif event.size_bytes < 0:
            if event.pointer not in here:
                here[event.pointer] = _Seen(-event.size_bytes, 0, start_ns)
                blocks.append(here[event.pointer])
            block = here.pop(event.pointer)
            block.end, block.end_ns = number, event.time_ns
    note(1 << 63)
    return blocks

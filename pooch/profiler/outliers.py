"""Finds times that a disturbance made too long: of ops by those of the same op elsewhere, of steps by other steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..units import format_ms
from .slots import StepAssembly

MOST_TIMES_THE_SIBLINGS = 4.0
WORTH_A_RUN = 0.03  # share of the step that outliers must take together to be measured again
BUSY = 1.5  # times the fastest of some equal steps that the slowest takes on a machine that does something else, too
_SIBLINGS = 3


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

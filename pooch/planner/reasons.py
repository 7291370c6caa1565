"""Why each activation is kept, swapped or recomputed: one line with the figures."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.plan import Choice, Decision, Decisions
from ..units import format_bytes, format_ms
from .alternatives import Alternative
from .candidates import NEVER, Candidate, Candidates


def decision_rows(
    candidates: Candidates, decisions: Decisions, alternatives: Mapping[int, tuple[Alternative, ...]]
) -> tuple[Decision, ...]:
    """One row per activation, in forward order; with what other choices would have cost, where that was tried."""
    return tuple(
        _row(candidates, item, decisions[item.value], alternatives.get(item.value, ())) for item in candidates.items
    )


def _row(candidates: Candidates, item: Candidate, choice: Choice, alternatives: tuple[Alternative, ...]) -> Decision:
    value = candidates.dataflow.profile.values[item.value]
    changes: dict[Choice, float] = {other.choice: other.change_ms for other in alternatives}
    if alternatives:
        changes[choice] = 0.0
    return Decision(
        value=item.value,
        choice=choice,
        label=value.label,
        size_bytes=item.size_bytes,
        copy_ms=item.out_ms + item.in_ms,
        replay_ms=item.replay_ms,
        reason="; ".join([f"{choice}: {_why(candidates, item, choice)}", *(other.text for other in alternatives)]),
        keep_change_ms=changes.get("keep"),
        swap_change_ms=changes.get("swap"),
        recompute_change_ms=changes.get("recompute"),
    )


def _why(candidates: Candidates, item: Candidate, choice: Choice) -> str:
    room = format_bytes(item.memory_bytes)
    if choice == "recompute":
        against = f" instead of {_copying(item)}" if item.can_swap else ""
        return f"a replay of {format_ms(item.replay_ms)}{against}; frees {room}"
    if choice == "swap":
        return f"{_copying(item)}{_replay(candidates, item)}; frees {room}"
    if len(item.choices) == 1:
        return f"{_no_choice(candidates, item)}; holds {room}"
    return f"saves {_saved(item)}; holds {room}"


def _copying(item: Candidate) -> str:
    """Time of the copies on the link, and of the compute that they displace."""
    cost = f" ({format_ms(item.displaced_ms)} of compute)" if item.displaced_ms > 0 else ""
    return f"copies of {format_ms(item.copy_ms)}{cost}"


def _replay(candidates: Candidates, item: Candidate) -> str:
    refusal = candidates.dataflow.refusal(item.value)
    return f", no replay: {refusal}" if refusal is not None else f" instead of a replay of {format_ms(item.replay_ms)}"


def _no_choice(candidates: Candidates, item: Candidate) -> str:
    if item.need != NEVER and item.release + 1 >= item.need:
        return "read again at once"
    return f"cannot leave: {candidates.dataflow.refusal(item.value) or 'it is written over'}"


def _saved(item: Candidate) -> str:
    replay = [f"a replay of {format_ms(item.replay_ms)}"] if "recompute" in item.choices else []
    copying = [_copying(item)] if item.can_swap else []
    return " or ".join(replay + copying)

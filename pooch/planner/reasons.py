"""Why each activation is kept, swapped or recomputed: one line for people, in numbers."""

from __future__ import annotations

from pooch.ir.plan import Choice, Decision, Decisions
from pooch.planner.candidates import NEVER, Candidate, Candidates
from pooch.units import format_bytes, format_ms


def decision_rows(candidates: Candidates, decisions: Decisions) -> tuple[Decision, ...]:
    """One row per activation, in forward order."""
    return tuple(_row(candidates, item, decisions[item.value]) for item in candidates.items)


def _row(candidates: Candidates, item: Candidate, choice: Choice) -> Decision:
    value = candidates.dataflow.profile.values[item.value]
    return Decision(
        value=item.value,
        choice=choice,
        label=value.label,
        size_bytes=item.size_bytes,
        copy_ms=item.out_ms + item.in_ms,
        replay_ms=item.replay_ms,
        reason=f"{choice}: {_why(candidates, item, choice)}",
    )


def _why(candidates: Candidates, item: Candidate, choice: Choice) -> str:
    room = format_bytes(item.memory_bytes)
    if choice == "recompute":
        return f"replay {format_ms(item.replay_ms)} against copying {format_ms(item.copy_ms)}; frees {room}"
    if choice == "swap":
        return f"copying {format_ms(item.copy_ms)} {_beside(candidates)}, {_replay(candidates, item)}; frees {room}"
    if len(item.choices) == 1:
        return f"{_no_choice(candidates, item)}; holds {room}"
    return f"there is room; saves {_saved(item)}; holds {room}"


def _beside(candidates: Candidates) -> str:
    """How copies and compute get along on this link."""
    link = candidates.dataflow.profile.link
    share = max(link.out_compute_share, link.in_compute_share)
    return "beside compute" if share == 0 else f"beside compute (each ms displaces up to {share:.2f} ms of it)"


def _replay(candidates: Candidates, item: Candidate) -> str:
    refusal = candidates.dataflow.refusal(item.value)
    return f"no replay ({refusal})" if refusal is not None else f"against replay {format_ms(item.replay_ms)}"


def _no_choice(candidates: Candidates, item: Candidate) -> str:
    if item.need != NEVER and item.release + 1 >= item.need:
        return "it is read again as soon as the program releases it"
    return f"nothing else is possible ({candidates.dataflow.refusal(item.value)})"


def _saved(item: Candidate) -> str:
    replay = [f"a replay of {format_ms(item.replay_ms)}"] if item.can_recompute else []
    copying = [f"copying of {format_ms(item.copy_ms)}"] if item.can_swap else []
    return " or ".join(replay + copying)

"""Why each activation is kept, swapped or recomputed, in one line with the figures; and what else would have cost.

What another choice would have cost is seen on the plan with one choice changed, lowered and simulated like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ..ground.units import format_bytes, format_ms
from ..ir.plan import Choice, Decision, Decisions
from .candidates import NEVER, Candidate, Candidates
from .contract import PlanningRequest, PolicyOutcome

MOST_WORK = 300_000  # ops that are played for alternatives, of the largest activations first: about 3 s


@dataclass(frozen=True, slots=True)
class Alternative:
    """One activation with another choice, everything else as planned.

    Attributes:
        choice: the other one.
        change_ms: of the step; inf where it does not fit.
        over_bytes: by how much it is over the device budget at least or, where it keeps to that, over the host budget
            (0: it fits).
    """

    choice: Choice
    change_ms: float
    over_bytes: int

    @property
    def text(self) -> str:
        """For people, such as "swap: +1.2 ms"."""
        if self.over_bytes > 0:
            return f"{self.choice}: {format_bytes(self.over_bytes)} too much"
        sign = "-" if self.change_ms < 0 else "+"
        return f"{self.choice}: {sign}{format_ms(abs(self.change_ms))}"


def weigh_alternatives(
    request: PlanningRequest, candidates: Candidates, planned: PolicyOutcome
) -> dict[int, tuple[Alternative, ...]]:
    """The alternatives of the largest activations, as many as can be simulated quickly; none where all are kept."""
    if all(choice == "keep" for choice in planned.decisions.values()):
        return {}
    left = MOST_WORK
    found: dict[int, tuple[Alternative, ...]] = {}
    with suppress(KeyboardInterrupt):  # there is a plan already
        for item in sorted(candidates.items, key=lambda item: (-item.memory_bytes, item.value)):
            if left <= 0 or request.remaining_s() <= 0:
                break
            others = [choice for choice in item.choices if choice != planned.decisions[item.value]]
            weighed = [_instead(request, candidates, planned, item.value, choice) for choice in others]
            left -= request.dataflow.end * sum(was_simulated for _, was_simulated in weighed)
            found[item.value] = tuple(alternative for alternative, _ in weighed)
    return found


def _instead(
    request: PlanningRequest, candidates: Candidates, planned: PolicyOutcome, value: int, choice: Choice
) -> tuple[Alternative, bool]:
    """The plan with another choice for one value, and whether that had to be simulated."""
    decisions = {**planned.decisions, value: choice}
    over_bytes = int(candidates.least_points(decisions).max()) - request.budget_bytes
    if over_bytes > 0:
        return Alternative(choice, math.inf, over_bytes), False
    instead = request.evaluator.evaluate(decisions, request.budget_bytes)
    over_bytes = instead.timeline.peak_bytes - request.budget_bytes
    if over_bytes <= 0 and request.host_budget_bytes is not None:
        over_bytes = instead.schedule.host_bytes - request.host_budget_bytes
    change_ms = instead.timeline.step_ms - planned.step_ms if over_bytes <= 0 else math.inf
    return Alternative(choice, change_ms, max(0, over_bytes)), True


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

"""Makes decisions fit that nearly do, by letting a few more activations leave: for profiles with many of them."""

from __future__ import annotations

from pooch.ir.plan import Choice, Decisions
from pooch.planner.candidates import Candidate
from pooch.planner.search.trials import Trials

HALVINGS = 6  # of the number of activations that leave besides


def repair(trials: Trials, decisions: Decisions) -> None:
    """Let as few of the kept activations leave besides as are needed, the cheapest per byte first.

    What fits is remembered in `trials`; where nothing does, nothing changes.
    """
    kept = [item for item in trials.candidates.items if decisions[item.value] == "keep" and _can_leave(item)]
    order = sorted(kept, key=lambda item: (_cost_ms(item) / max(1, item.memory_bytes), item.value))
    leaving = {item.value: _choice(item) for item in order}
    low, high = 1, len(order)
    for _ in range(HALVINGS):
        if low > high or trials.request.remaining_s() <= 0:
            return
        count = (low + high) // 8 if high == len(order) else (low + high) // 2  # few are the likely answer
        count = min(max(count, low), high)
        changed = {**decisions, **{item.value: leaving[item.value] for item in order[:count]}}
        if trials.might_fit(changed) and trials.run(changed).fits:
            high = count - 1
        else:
            low = count + 1


def _can_leave(item: Candidate) -> bool:
    return item.can_swap or item.can_recompute


def _choice(item: Candidate) -> Choice:
    recomputes = item.can_recompute and (not item.can_swap or item.replay_ms <= item.copy_ms)
    return "recompute" if recomputes else "swap"


def _cost_ms(item: Candidate) -> float:
    return item.replay_ms if _choice(item) == "recompute" else item.copy_ms

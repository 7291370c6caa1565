"""Makes decisions that nearly fit do so, by letting a few more activations leave: for profiles with many of them."""

from __future__ import annotations

from ...ir.plan import Decisions
from .trials import Trials

HALVINGS = 6  # of the number of activations that leave in addition


def repair(trials: Trials, decisions: Decisions) -> None:
    """Let as few more of the kept activations leave as are needed, the cheapest per byte first.

    What fits is remembered in `trials`.
    """
    kept = [item for item in trials.candidates.items if decisions[item.value] == "keep" and item.can_leave]
    order = sorted(kept, key=lambda item: (item.cost_per_byte, item.value))
    low, high = 1, len(order)
    for _ in range(HALVINGS):
        if low > high or trials.request.remaining_s() <= 0:
            return
        count = (low + high) // 8 if high == len(order) else (low + high) // 2  # few are the likely answer
        count = min(max(count, low), high)
        changed = {**decisions, **{item.value: item.leaving() for item in order[:count]}}
        if trials.might_fit(changed) and trials.run(changed).fits:
            high = count - 1
        else:
            low = count + 1

"""Quick plans by simple rules: a start for the search, and the answer where there is no solver.

Each rule is an order in which activations leave the device, and what happens to those that leave; as few leave as
the budget asks for, found by bisection. "The head leaves, the tail stays" is what Meng et al. (2017) and
SuperNeurons (2018) do; "the cheapest replay per byte first" is the rule of Capuchin (2020).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...ir.plan import Choice, Decisions
from ..candidates import NEVER, Candidate, Candidates
from .time_limit import SHARES
from .trials import Trials


@dataclass(frozen=True, slots=True)
class Rule:
    """Values in the order in which they leave, each with its choice for that case."""

    leaving: tuple[tuple[int, Choice], ...]

    def decisions(self, count: int) -> dict[int, Choice]:
        """The first `count` leave."""
        return dict(self.leaving[:count])


WINDOWS = (4, 8, 12, 16, 32)  # in how many stretches checkpoints part all bytes
FEW_RULES = 3
HALVINGS = 6  # of the number of activations that leave in addition to decisions that nearly fit
STEPS = 64  # a rule for many activations, or one that begins with given choices, is fitted to this fraction of them


def try_rules(trials: Trials) -> None:
    """Fit every rule to the budget; the best plan is then in `trials`. With many activations: a few rules, roughly."""
    many = trials.many
    for number, rule in enumerate(rules(trials.candidates)):
        is_enough = many and number >= FEW_RULES
        is_late = trials.request.used_share() > SHARES.rules
        if trials.best is not None and (is_enough or is_late):
            return
        fit_rule(trials, rule, len(rule.leaving) // STEPS if many else 0)


def fit_rule(trials: Trials, rule: Rule, width: int = 0, fewest: int = 0) -> None:
    """Find the smallest number of leaving values that fits, from `fewest` on, by bisection down to `width`."""
    low, high = fewest, len(rule.leaving)
    if trials.fitting(rule.decisions(high)) is None:
        return
    while high - low > width:
        middle = (low + high) // 2
        if trials.fitting(rule.decisions(middle)) is not None:
            high = middle
        else:
            low = middle + 1


def repair(trials: Trials, decisions: Decisions) -> None:
    """Let as few more of the activations that are kept leave as are needed, the cheapest per byte first.

    It makes decisions that nearly fit do so, for profiles with many activations. What fits is remembered in `trials`.
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
        if trials.fitting(changed) is not None:
            high = count - 1
        else:
            low = count + 1


def rules(candidates: Candidates) -> Iterator[Rule]:
    """All rules, in a fixed order."""
    by_birth = [item for item in candidates.items if item.can_leave]
    by_cost = sorted(by_birth, key=lambda item: (item.cost_per_byte, item.value))
    yield _rule(by_birth, 0.0)
    for order in (by_birth, by_cost):
        for patience in (0.1, 0.5, 2.0):
            yield _rule(order, patience)
    cheap_first = [item for item in by_cost if item.leaving(0.5) == "recompute"]
    yield _rule([*cheap_first, *(item for item in by_birth if item not in cheap_first)], 0.5)
    yield _rule(by_cost, math.inf)
    if not candidates.mostly_swappable:
        yield from checkpoint_rules(candidates)


def checkpoint_rules(candidates: Candidates) -> Iterator[Rule]:
    """Replays between checkpoints, by how far these lie apart: what is between them leaves first, in forward order.

    Where nearly all is recomputed, replays that begin far before bring back much at once. This is the rule of Chen et
    al. (2016), with the values as checkpoints that most ops read.
    """
    for decisions in between_checkpoints(candidates):
        kept = [item for item in candidates.items if item.can_recompute and item.value not in decisions]
        yield Rule((*decisions.items(), *((item.value, "recompute") for item in kept)))


def between_checkpoints(candidates: Candidates) -> Iterator[dict[int, Choice]]:
    """Decisions to recompute all but checkpoints, for each distance of these."""
    items = [item for item in candidates.items if item.can_recompute]
    all_bytes = sum(item.memory_bytes for item in items)
    for windows in WINDOWS:
        kept = _checkpoints(items, all_bytes // windows)
        yield {item.value: "recompute" for item in items if item.value not in kept}


def _checkpoints(items: Sequence[Candidate], window_bytes: int) -> set[int]:
    """One value of each stretch of so many bytes."""
    readers = Counter(source for source, _ in {(source, item.born) for item in items for source in item.sources})
    kept: set[int] = set()
    stretch: list[Candidate] = []
    for item in items:
        stretch.append(item)
        if sum(each.memory_bytes for each in stretch) >= window_bytes:
            kept.add(max(stretch, key=lambda each: (readers[each.value], each.memory_bytes, each.born)).value)
            stretch = []
    return kept


def rule_by_cost(candidates: Candidates, patience: float) -> Rule:
    """Those leave first that cost the least time per byte."""
    leaving = (item for item in candidates.items if item.can_leave)
    return _rule(sorted(leaving, key=lambda item: (item.cost_per_byte, item.value)), patience)


def idle_first(candidates: Candidates) -> Rule:
    """First swap what lies idle for longer than its copies take, the most idle first; the others by cost per byte.

    Capuchin (2020) chooses its swaps by this "free time".
    """
    starts_ms = [0.0, *accumulate(op.time_ms for op in candidates.dataflow.profile.ops)]

    def spare_ms(item: Candidate) -> float:
        until = len(starts_ms) - 1 if item.need == NEVER else item.need
        return starts_ms[until] - starts_ms[min(item.release + 1, until)] - item.copy_ms

    leaving = [item for item in candidates.items if item.can_leave]
    hidden = sorted((i for i in leaving if i.can_swap and spare_ms(i) >= 0), key=lambda i: (-spare_ms(i), i.value))
    others = sorted((i for i in leaving if i not in hidden), key=lambda i: (i.cost_per_byte, i.value))
    swaps: list[tuple[int, Choice]] = [(item.value, "swap") for item in hidden]
    return Rule((*swaps, *((item.value, item.leaving()) for item in others)))


def _rule(order: Sequence[Candidate], patience: float) -> Rule:
    """Leaving values are recomputed where a replay costs at most `patience` times their copies, else swapped."""
    return Rule(tuple((item.value, item.leaving(patience)) for item in order))


def warm_start(trials: Trials, start: Decisions) -> None:
    """Try the choices as the request allows them; where they do not fit, let a few more activations leave.

    What fits is remembered in `trials`, so that the search gives nothing slower.
    """
    chosen = {item.value: _allowed(item, start.get(item.value, "keep")) for item in trials.candidates.items}
    if trials.run(chosen).fits:
        return
    leaving = [(value, choice) for value, choice in chosen.items() if choice != "keep"]
    others = [leave for leave in rule_by_cost(trials.candidates, 1.0).leaving if chosen[leave[0]] == "keep"]
    fit_rule(trials, Rule((*leaving, *others)), len(others) // STEPS, fewest=len(leaving))


def _allowed(item: Candidate, choice: Choice) -> Choice:
    """The choice, or where it is impossible for this activation, the other way for it to leave."""
    if choice in item.choices:
        return choice
    return item.leaving() if item.can_leave else "keep"

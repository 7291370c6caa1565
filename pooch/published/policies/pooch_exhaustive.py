"""PoocH with its exhaustive search for the maps with unhidden copies in to keep (Ito et al. 2019).

Procedure (an earlier commit of the authors' fork, and the paper as recalled):
1. swap everything;
2. go through the blocks of maps from the last to the first. In each, search every way to keep some of the maps whose
   copies *in* are not hidden behind compute, smallest first. After every keep, simulate again: other copies may be
   hidden now. In each node of the search, the rest of the memory is given away greedily: first to the maps whose copies
   *out* are not hidden, then to all, each from the last to the first. Go on with the keeps of the fastest node;
3. stop at the first block of which something leaves and whose copies in are all hidden;
4. swap or recompute as in `pooch_2018`.

Ours: predictions; the slots of copies; what a block is (`block` maps that follow each other in the forward pass); that
nodes are compared after giving away the rest of the memory, which their children do not inherit; and a limit of `most`
simulations, of which every block gets an equal share of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of
from ...planner.search.stall_rule import swap_or_recompute
from ...planner.search.trials import Trials
from .keeping import COPIES_IN, Swapped, all_swapped, keep_or_swap, keeping, unhidden_of


@dataclass(frozen=True)
class PoochExhaustive:
    """The policy with its parameters.

    Attributes:
        block: number of maps that are searched together: at most 2^block nodes.
        most: number of simulations after which the search ends with what it has.
    """

    block: int = 8
    most: int = 3000

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Classify, with a search over the unhidden copies in.

        Raises:
            InfeasibleBudget: swapping everything does not fit.
        """
        trials = Trials(request)
        node = _Node.of(trials, all_swapped(trials, "pooch_exhaustive"))
        values = sorted(node.kept.swaps)
        blocks = [values[max(0, end - self.block) : end] for end in range(len(values), 0, -self.block)]
        for done, block in enumerate(blocks):
            if _leaving(node.kept).isdisjoint(block):
                continue  # there is room for all of it so far
            if not unhidden_of(trials, node.kept, COPIES_IN).intersection(block):
                break
            allowed = trials.count + (self.most - trials.count) // (len(blocks) - done)
            node = _Search(trials, block, allowed).best_from(node)
        return outcome_of(trials, swap_or_recompute(trials, node.completed.trial))


pooch_exhaustive = PoochExhaustive()


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of the search.

    Attributes:
        kept: what the search has kept so far.
        completed: the same with the rest of the memory given away.
    """

    kept: Swapped
    completed: Swapped

    @classmethod
    def of(cls, trials: Trials, kept: Swapped) -> _Node:
        """Return the node in which the search has kept this much."""
        return cls(kept, keep_or_swap(trials, kept))

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller is better."""
        return self.completed.trial.rank


def _leaving(kept: Swapped) -> frozenset[int]:
    return frozenset(kept.trial.evaluation.schedule.swapped)


class _Search:
    """Depth-first search for the maps of one block to keep.

    Args:
        trials: counts simulations.
        block: the maps that are searched.
        allowed: count of simulations at which the search ends.
    """

    def __init__(self, trials: Trials, block: Sequence[int], allowed: int) -> None:
        self._trials = trials
        self._block = frozenset(block)
        self._allowed = allowed
        self._sizes = {item.value: item.size_bytes for item in trials.candidates.items}

    def best_from(self, start: _Node) -> _Node:
        """Return the fastest node found, or the start."""
        self._best = start
        self._visit(start, frozenset())
        return self._best

    def _visit(self, node: _Node, passed: frozenset[int]) -> None:
        """Branch on the unhidden maps of a node: keep the smallest that was not passed over, or pass it over."""
        self._best = min(self._best, node, key=lambda each: each.rank)
        stalling = (unhidden_of(self._trials, node.kept, COPIES_IN) & self._block) - passed
        for value in sorted(stalling, key=lambda each: (self._sizes[each], each)):
            if self._trials.count >= self._allowed:
                return
            kept = keeping(self._trials, node.kept, value)
            if kept is not None:
                self._visit(_Node.of(self._trials, kept), passed)
            passed |= {value}

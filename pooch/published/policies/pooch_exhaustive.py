"""PoocH with its exhaustive search for the maps with unhidden copies in to keep (Ito et al. 2019).

Procedure (an earlier commit of the authors' fork, and the paper as recalled):
1. swap everything, and note the maps whose copies *in* are not hidden behind compute, smallest first;
2. try every way to keep some of them and swap the others, and take the fastest that fits;
3. walk all maps from the last to the first and keep each that fits;
4. swap or recompute as in `pooch_2018`.

Ours: predictions, the slots of copies, and a limit of `MOST` evaluations on the search (depth first, keeping before
swapping). A branch that cannot fit is pruned, with every branch that keeps even more.
"""

from __future__ import annotations

from ...ir.plan import Choice
from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import outcome_of
from ...planner.search.stall_rule import keep_from_the_last, swap_or_recompute, unhidden
from ...planner.search.trials import Trial, Trials
from .fitting import all_swapped

MOST = 200  # evaluations of the search


def pooch_exhaustive(request: PlanningRequest) -> PolicyOutcome:
    """Classify, with a search over the unhidden copies in.

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    trials = Trials(request, Candidates(request.dataflow))
    start = all_swapped(trials, "pooch_exhaustive")
    best = _Search(trials, start).run()
    kept = keep_from_the_last(trials, best, best.evaluation.schedule.swapped)
    return outcome_of(trials, swap_or_recompute(trials, kept))


class _Search:
    """Depth-first search for the unhidden maps to keep."""

    def __init__(self, trials: Trials, start: Trial) -> None:
        self.trials = trials
        self.best = start
        self.swaps = {value for value, choice in start.decisions.items() if choice == "swap"}
        stalling = unhidden(trials.request.evaluator, start.evaluation.schedule, ("wait",))
        by_value = {item.value: item for item in trials.candidates.items}
        order = sorted(stalling, key=lambda value: (by_value[value].size_bytes, value))
        self.items = [by_value[value] for value in order]
        self.left = MOST
        # Lower bound on the live bytes, updated for the maps that the current branch keeps.
        self.points = trials.candidates.least_points(dict.fromkeys(self.swaps, "swap"))

    def run(self) -> Trial:
        """Return the fastest trial found."""
        self._visit(0, frozenset())
        return self.best

    def _visit(self, place: int, kept: frozenset[int]) -> None:
        """Try keeping, in addition, each of the items from this place on."""
        for following in range(place, len(self.items)):
            if self.left <= 0:
                return
            item = self.items[following]
            away = self.trials.candidates.away_points(item)
            self.points[away] += item.memory_bytes
            if self.points.max() <= self.trials.request.budget_bytes:
                self._keep(following, kept | {item.value})
            self.points[away] -= item.memory_bytes

    def _keep(self, place: int, kept: frozenset[int]) -> None:
        self.left -= 1
        decisions: dict[int, Choice] = dict.fromkeys(sorted(self.swaps - kept), "swap")
        trial = self.trials.run(decisions)
        if trial.fits:
            self.best = min(self.best, trial, key=lambda each: each.rank)
            self._visit(place + 1, kept)

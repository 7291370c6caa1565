"""PoocH with its exhaustive search: which of the maps with unhidden copies in are kept (Ito et al. 2019).

Procedure (an earlier commit of the authors' fork, and the paper as recalled):
1. all swap; the maps whose copies *in* are not hidden behind compute are noted, smallest first;
2. try every way to keep some of them and swap the others, and take the fastest that fits;
3. walk all maps from the last to the first and keep each that fits;
4. swap or recompute as in `pooch_2018`.

Ours: predictions, the slots of copies, and an end to the search: of more than `MOST` evaluations only the first are
made (depth first, keeping before swapping). A way that cannot fit is cut off with all that keep even more.
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
    """Classify with the search over unhidden copies in.

    Raises:
        InfeasibleBudget: swapping everything does not fit.
    """
    trials = Trials(request, Candidates(request.dataflow))
    start = all_swapped(trials, "pooch_exhaustive")
    best = _Search(trials, start).run()
    kept = keep_from_the_last(trials, best, best.evaluation.schedule.swapped)
    return outcome_of(trials, swap_or_recompute(trials, kept))


class _Search:
    """Which of the unhidden to keep, depth first."""

    def __init__(self, trials: Trials, start: Trial) -> None:
        self.trials = trials
        self.best = start
        self.swaps = {value for value, choice in start.decisions.items() if choice == "swap"}
        stalling = unhidden(trials.request.evaluator, start.evaluation.schedule, ("wait",))
        by_value = {item.value: item for item in trials.candidates.items}
        order = sorted(stalling, key=lambda value: (by_value[value].size_bytes, value))
        self.items = [by_value[value] for value in order]
        self.left = MOST
        # What is live at the very least, kept up with the keeps of the way that is being tried.
        self.points = trials.candidates.least_points(dict.fromkeys(self.swaps, "swap"))

    def run(self) -> Trial:
        """The fastest that was found."""
        self._visit(0, frozenset())
        return self.best

    def _visit(self, place: int, kept: frozenset[int]) -> None:
        """Keep each of the items from this place on besides."""
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

"""TFLMS version 2 with its tuning: finds parameters in a simulation of memory that ignores times.

Procedure (read: the authors' module, version 2):
1. swap each edge of the graph longer than `swapout_threshold` levels, except tensors of rank 0 and 1; start its copy in
   `swapin_ahead` levels before its reader;
2. simulate memory with reference counts, without times, against 0.9 of the device memory that parameters leave;
3. take the lowest `sync_mode` that fits at threshold 1 (0: copies run freely; 1: compute waits for copies out; 2: for
   copies in; 3: both);
4. find the largest `swapout_threshold` that fits by binary search, then the largest `swapin_ahead`, then
   `swapin_groupby`.

Levels are slots for edges and anchors for copies in. Our schedules have one mode: compute always waits where a value is
freed, at the latest slot that memory permits, and where it is read. Copies in are not grouped, as each has its latency
only once. The simulation of memory is ours, and also ignores times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planner.candidates import NEVER, Candidate
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of, with_smallest_budget
from ...planner.search.trials import Trial, Trials
from .fitting import fewest_leaving, swaps_of
from .timing import Trip, anchors_ahead, played, started_at, swap_schedule, trips_of


@dataclass(frozen=True)
class TflmsAuto:
    """The policy with its parameter.

    Attributes:
        memory_ratio: share of the memory left by parameters that plans may use.
    """

    memory_ratio: float = 0.9

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Tune the threshold, then the distance of copies in.

        Raises:
            InfeasibleBudget: nothing fits into this share of the memory.
        """
        return with_smallest_budget(request, self._attempt, "tflms_auto")

    def _attempt(self, request: PlanningRequest) -> PolicyOutcome | None:
        persistent_bytes = request.dataflow.profile.persistent_bytes
        room_bytes = int(persistent_bytes + self.memory_ratio * (request.budget_bytes - persistent_bytes))
        trials = Trials(replace(request, budget_bytes=max(1, room_bytes)))
        items = [item for item in trials.candidates.items if self._rank(trials, item) > 1]
        by_length = sorted(items, key=lambda item: (-_levels(item), item.value))
        trial = fewest_leaving(trials, swaps_of(by_length))
        return None if trial is None else outcome_of(trials, _tuned_ahead(trials, trial))

    @staticmethod
    def _rank(trials: Trials, item: Candidate) -> int:
        return len(trials.request.dataflow.profile.values[item.value].shape)


def _levels(item: Candidate) -> int:
    return (item.death if item.need == NEVER else item.need) - item.born


def _tuned_ahead(trials: Trials, trial: Trial) -> Trial:
    """Use the largest distance at which every copy in has room: that of the copy that had to start latest."""
    anchors = trials.request.dataflow.anchor_slots
    ahead = [_ahead(anchors, trip) for trip in trips_of(trial.evaluation.schedule).values() if trip.in_slot >= 0]
    schedule, dataflow = trial.evaluation.schedule, trials.request.dataflow
    late = started_at(trips_of(schedule), anchors_ahead(dataflow, min(ahead, default=0)))
    return trials.offer(
        trial.decisions, played(trials.request.evaluator, swap_schedule(dataflow, schedule, late, schedule))
    )


def _ahead(anchors: tuple[int, ...], trip: Trip) -> int:
    return anchors.index(trip.need_slot) - anchors.index(trip.in_slot)


tflms_auto = TflmsAuto()

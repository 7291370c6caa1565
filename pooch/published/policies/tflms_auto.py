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

from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.trials import Trial, Trials
from .fitting import attempted, end_slot, fewest_leaving, swaps_of
from .timing import anchors_ahead, played_from, trips_of


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
        return attempted(request, self._attempt, "tflms_auto")

    def _attempt(self, within: Trials) -> Trial | None:
        request, profile = within.request, within.request.dataflow.profile
        room_bytes = profile.persistent_bytes + self.memory_ratio * (request.budget_bytes - profile.persistent_bytes)
        trials = Trials(replace(request, budget_bytes=max(1, int(room_bytes))), within.candidates)
        items = [item for item in trials.candidates.items if len(profile.values[item.value].shape) > 1]
        by_length = sorted(items, key=lambda item: (item.born - end_slot(item), item.value))
        trial = fewest_leaving(trials, swaps_of(by_length))
        return None if trial is None else _tuned_ahead(trials, trial)


def _tuned_ahead(trials: Trials, trial: Trial) -> Trial:
    """Use the largest distance at which every copy in has room: that of the copy that had to start latest."""
    dataflow, schedule = trials.request.dataflow, trial.evaluation.schedule
    place = dataflow.anchor_slots.index
    trips = [trip for trip in trips_of(schedule).values() if trip.in_slot >= 0]
    ahead = min((place(trip.need_slot) - place(trip.in_slot) for trip in trips), default=0)
    timed = played_from(trials.request.evaluator, dataflow, schedule, anchors_ahead(dataflow, ahead))
    return trials.offer(trial.decisions, timed)


tflms_auto = TflmsAuto()

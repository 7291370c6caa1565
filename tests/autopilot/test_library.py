"""Which steps run on a plan, as answers of the planning process come in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pooch.api.options import PlanOptions
from pooch.autopilot.costs import HostCosts
from pooch.autopilot.jobs import Anchor, Answer, Job, done
from pooch.autopilot.library import NOT_MEASURED, PLANNED_SHARE, Library
from pooch.autopilot.signature import StepKey
from pooch.autopilot.worker import PlanningWorker
from tests.toys import blocks

KEY = StepKey(((("float32", 1),),), (4,))


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs are done at once, in this process."""
    asked: list[Job] = []

    def plan(_: PlanningWorker, job: Job, answer: Callable[[Answer], None], *, urgency: int = 0) -> None:
        asked.append(job)
        answer(done(job))

    monkeypatch.setattr(PlanningWorker, "plan", plan)
    monkeypatch.setattr(PlanningWorker, "warm_up", lambda _: None)
    return asked


def test_a_plan_may_fill_the_budget_where_no_other_is_feasible(jobs: list[Job]) -> None:
    profile = blocks(4)
    start_bytes = profile.persistent_bytes
    anchors = (Anchor(KEY.sizes, profile),)
    budget_bytes = done(Job(KEY.sizes, anchors, start_bytes, 1, PlanOptions())).minimum_bytes
    assert PLANNED_SHARE * budget_bytes < budget_bytes < profile.peak_bytes
    told: list[str] = []
    library = Library(PlanOptions(), told.append, HostCosts(lambda: NOT_MEASURED))
    for _ in range(2):  # the first step of all is not recorded
        decision, known = library.choose(KEY, start_bytes, budget_bytes)
    assert decision == "record"
    library.recorded(KEY, known, profile, 1)
    decisions = [library.choose(KEY, start_bytes, budget_bytes)[0] for _ in range(3)]
    assert decisions == ["online", "online", "plan"]
    assert [job.budget_bytes for job in jobs[:2]] == [int(PLANNED_SHARE * budget_bytes), budget_bytes]
    assert known.plan is not None
    assert known.plan.predicted_peak_bytes == budget_bytes
    assert told[0].startswith("planned for steps"), told


def test_a_plan_whose_replay_gave_other_bits_is_made_again_without_it(jobs: list[Job]) -> None:
    profile = blocks(6)
    start_bytes, budget_bytes = profile.persistent_bytes, int(0.9 * profile.peak_bytes)
    library = Library(PlanOptions(host_budget=1), lambda text: None, HostCosts(lambda: NOT_MEASURED))
    for _ in range(2):
        _, known = library.choose(KEY, start_bytes, budget_bytes)
    library.recorded(KEY, known, profile, 1)
    decisions = [library.choose(KEY, start_bytes, budget_bytes)[0] for _ in range(2)]
    assert decisions[-1] == "plan"
    table, plan = known.table, known.plan
    assert table is not None
    assert table.recomputed, "something is recomputed"
    value = min(table.recomputed)

    library.banned(known, [table.copies.key(value), ("the recipe of a step without a plan", 0)])
    asked = len(jobs)
    assert library.choose(KEY, start_bytes, budget_bytes)[0] == "plan"  # the old one, which copies the value
    assert len(jobs) == asked + 1
    refused = jobs[-1].anchors[0].profile
    assert refused.ops[refused.values[value].producer].refusal is not None
    assert library.choose(KEY, start_bytes, budget_bytes)[0] == "plan"
    assert known.plan is not plan
    assert known.table is not None
    assert value not in known.table.recomputed

"""Which steps run on a plan, as answers of the planning process come in."""

from __future__ import annotations

import queue
from dataclasses import replace
from pathlib import Path

import pytest

import pooch
from pooch.analysis.interpolation import KnownStep
from pooch.api.options import PlanOptions
from pooch.autopilot import library as library_module
from pooch.autopilot import shapes
from pooch.autopilot.cache import PlanCache, Purpose
from pooch.autopilot.costs import HostCosts
from pooch.autopilot.jobs import Answer, Job, done
from pooch.autopilot.known import MOST_RECORDS, Known
from pooch.autopilot.library import NOT_MEASURED, PLANNED_SHARE, Library
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.signature import StepKey
from pooch.autopilot.waiting import JobQueue, Request
from pooch.bounded import RecentlyUsed, Topics
from pooch.ir import Profile
from tests.toys import blocks

KEY = StepKey(((("float32", 1),),), (4,))


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs are done at once, in this process."""
    asked: list[Job] = []

    def put(requests: PlanRequests, request: Request) -> None:
        asked.append(request.job)
        requests.arrived(request, done(request.job))

    monkeypatch.setattr(PlanRequests, "_put", put)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda _: None)
    return asked


def test_a_plan_may_fill_the_budget_where_no_other_is_feasible(jobs: list[Job]) -> None:
    profile = blocks(4)
    start_bytes = profile.persistent_bytes
    anchors = (KnownStep(KEY.sizes, profile),)
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


# What is remembered is bounded ----------------------------------------------------------------------------------------


def key_of(size: int, family: str = "float32") -> StepKey:
    return StepKey((((family, 1),),), (size,))


def a_library(cache: PlanCache | None = None) -> Library:
    return Library(PlanOptions(), lambda _: None, HostCosts(lambda: NOT_MEASURED), cache)


def meet(library: Library, key: StepKey, profile: Profile | None = None) -> str:
    """Run a step, and return how it was run. One that is recorded has the given profile; without one, none is."""
    start_bytes = 0 if profile is None else profile.persistent_bytes
    budget_bytes = 10**9 if profile is None else int(0.9 * profile.peak_bytes)
    decision, known = library.choose(key, start_bytes, budget_bytes, has_tier=profile is not None)
    if decision == "record" and profile is not None:
        library.recorded(key, known, profile, 1)
    return decision


def test_a_thousand_shapes_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_SHAPES", 8)
    library, often = a_library(), key_of(5000)
    for size in range(1000):
        meet(library, key_of(size))
        meet(library, often)
        assert len(library.shapes()) <= 8
    remembered = {shape.shapes: shape.steps for shape in library.shapes()}
    assert remembered == {"5000": 1000, **{str(size): 1 for size in range(993, 1000)}}
    assert sum("are remembered" in event for event in library.events) == 1


def test_the_shape_of_the_running_step_is_remembered_whatever_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_SHAPES", 1)
    monkeypatch.setattr(shapes, "MOST_OPS", 1)
    library, profile = a_library(), blocks(4)
    assert [meet(library, KEY, profile) for _ in range(4)] == ["online", "record", "online", "plan"]
    assert meet(library, key_of(9), profile) == "record"
    assert [each.shapes for each in library.shapes()] == ["9"]


def test_profiles_are_bounded_by_their_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = blocks(4)
    monkeypatch.setattr(shapes, "MOST_OPS", 6 * len(profile.ops))
    library = a_library()
    for number in range(20):  # a family each, as where a model is called with a text
        meet(library, key_of(4, f"{number}"), blocks(4))
        assert library._known._ops() <= 6 * len(profile.ops)
    assert len(library.shapes()) > 1
    assert len(library._known._families) == len(library.shapes())


def test_a_family_keeps_few_records_to_derive_others_from() -> None:
    library = a_library()
    family = library._known.family(KEY)
    for size in range(100):
        family.add((size,), blocks(2))
    assert list(family.recorded) == [(size,) for size in range(100 - MOST_RECORDS, 100)]


def test_a_forgotten_shape_that_was_recorded_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    library, profile = a_library(), blocks(4)
    for size in (4, 4, 5):
        meet(library, key_of(size), profile)
    monkeypatch.setattr(library._known._known, "most", 1)
    meet(library, key_of(6), profile)
    assert [shape.shapes for shape in library.shapes()] == ["6"]
    assert [meet(library, KEY, profile) for _ in range(2)] == ["online", "plan"]
    assert library.shapes()[0].origin == "recorded"


def test_a_forgotten_shape_has_its_plan_back_from_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shapes, "MOST_SHAPES", 1)
    library, profile = a_library(PlanCache(tmp_path, Purpose("training"))), blocks(4)
    assert [meet(library, KEY, profile) for _ in range(4)][-1] == "plan"
    meet(library, key_of(6), profile)
    assert meet(library, KEY, profile) == "plan"
    assert library.shapes()[0].origin == "cached"


def test_an_answer_for_a_shape_that_was_forgotten_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[PlanRequests, Request]] = []
    monkeypatch.setattr(PlanRequests, "_put", lambda *given: asked.append(given))
    monkeypatch.setattr(shapes, "MOST_SHAPES", 1)
    library, profile = a_library(), blocks(4)
    for _ in range(3):
        meet(library, KEY, profile)
    meet(library, key_of(6), profile)
    requests, request = asked[0]
    requests.arrived(request, done(request.job))
    assert library.plans == {}
    assert len(library.shapes()) == 1


def test_what_was_planned_is_listed_for_the_last_thousand_lines() -> None:
    library = a_library()
    for number in range(2 * library_module.MOST_EVENTS):
        library._say(f"planned {number}")
    assert len(library.events) == library_module.MOST_EVENTS
    assert library.events[-1] == f"planned {number}"


def test_a_job_that_waits_too_long_is_dropped_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = JobQueue(3)
    monkeypatch.setattr(PlanRequests, "_put", lambda _, request: waiting.put(request))
    library, profile = a_library(), blocks(4)
    for size in (4, 4, 5, 6, 7):  # the first three are recorded, the fourth is derived
        meet(library, key_of(size), profile)
    meet(library, key_of(8), profile)
    assert [each.job.sizes for each in waiting._waiting] == [(6,), (7,), (8,)]
    pending = {shape: known.is_pending for shape, known in library._known.items()}
    assert pending[KEY] is False
    assert pending[key_of(8)] is True
    meet(library, KEY, profile)
    assert (4,) in [each.job.sizes for each in waiting._waiting]


def test_the_least_urgent_and_oldest_job_is_dropped_and_urgent_ones_go_first() -> None:
    profile, dropped = blocks(2), []
    plan = pooch.plan(profile, "100%")
    asked: dict[str, Known] = {}

    def put(name: str, *, is_urgent: bool) -> None:
        asked[name] = Known(is_pending=is_urgent, is_improved=not is_urgent)
        jobs.put(Request(KEY, asked[name], Job(KEY.sizes, (), 0, 0, PlanOptions(), None if is_urgent else plan)))
        dropped.extend(name for name, known in asked.items() if not (known.is_pending or known.is_improved))
        for each in dropped:
            asked.pop(each, None)

    jobs = JobQueue(2)
    for name in "aBCdEf":  # capitals are not urgent
        put(name, is_urgent=name.islower())
    assert dropped == ["B", "C", "E", "a"]
    jobs.wake()  # which gives nobody's turn away
    taken = [jobs.next(1) for _ in range(3)]
    assert [request and request.known for request in taken] == [asked["d"], asked["f"], None]
    with pytest.raises(queue.Empty):
        jobs.next(0.01)
    jobs.stop()
    assert jobs.is_stopped
    assert jobs.next(1) is None


@pytest.mark.parametrize(("quicker", "arrives"), [(False, False), (True, True)])
def test_of_a_plan_that_is_to_be_improved_only_a_better_one_arrives(quicker: bool, arrives: bool) -> None:
    profile = blocks(2)
    plan = pooch.plan(profile, "100%")
    request = Request(KEY, Known(), Job(KEY.sizes, (), 0, 0, PlanOptions(), plan))
    other = replace(plan, predicted_step_ms=plan.predicted_step_ms * (0.9 if quicker else 1.0))
    requests = PlanRequests(PlanOptions(), HostCosts(lambda: NOT_MEASURED), None)
    requests.arrived(request, Answer(profile, other))
    requests.arrived(request, Answer(profile, refusal="no"))
    assert len(requests.arrivals()) == arrives


def test_what_was_used_last_is_kept() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(2)
    assert kept.put("a", 1) == kept.put("b", 2) == []
    assert kept.get("a") == 1
    assert kept.look("b") == 2  # which is no use of it
    assert kept.put("c", 3) == [("b", 2)]
    assert kept.items() == [("a", 1), ("c", 3)]
    topics = Topics(2)
    assert [topics.is_new(topic) for topic in "aabacab"] == [True, False, True, False, True, False, True]

"""Which steps run on a plan, as answers of the planning process come in."""

from __future__ import annotations

import json
import math
import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.analysis.interpolation import KnownStep
from pooch.api.children import Child
from pooch.api.options import PlanOptions
from pooch.api.wire import WIRE
from pooch.autopilot import library as library_module
from pooch.autopilot import shapes
from pooch.autopilot.cache import PlanCache, Purpose
from pooch.autopilot.costs import Costs, HostCosts
from pooch.autopilot.jobs import Answer, Job, answered, completed, done
from pooch.autopilot.known import MOST_RECORDS, TRIED_STEPS, Away, Known
from pooch.autopilot.library import MOST_RECORDED, PLANNED_SHARE, Library
from pooch.autopilot.loop_times import SETTLING_STEPS, Beside, LoopTimes
from pooch.autopilot.requests import PlanRequests
from pooch.autopilot.signature import StepKey
from pooch.autopilot.summary import Decision
from pooch.autopilot.waiting import JobQueue, Request
from pooch.ground.bounded import RecentlyUsed, Topics
from pooch.ground.units import format_bytes
from pooch.ground.wording import slower_than
from pooch.ir import HookCosts, Profile
from pooch.machine import CopySpeed
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
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")))
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


@pytest.mark.parametrize("more_bytes", [0, 4096])
@pytest.mark.parametrize("sizes", [(4,), (5,)])
def test_a_child_process_does_not_tell_the_profile_that_it_was_told(sizes: tuple[int, ...], more_bytes: int) -> None:
    profile = blocks(4)
    start_bytes, anchors = profile.persistent_bytes + more_bytes, (KnownStep((4,), profile),)
    job = Job(sizes, anchors, start_bytes, int(0.8 * profile.peak_bytes), PlanOptions(explain=False))
    told = json.dumps(WIRE.plain(answered(job)))
    assert '"Profile"' not in told
    found = completed(job, WIRE.made(json.loads(told)))
    assert replace(found, plan=None) == replace(done(job), plan=None)
    if sizes == (4,):
        assert found.profile is not None
        assert found.plan is not None
        assert found.profile.persistent_bytes == start_bytes
    else:
        assert found.profile is None, "one step does not tell what another shape is like"


def test_a_plan_whose_replay_gave_other_bits_is_made_again_without_it(jobs: list[Job]) -> None:
    profile = blocks(6)
    start_bytes, budget_bytes = profile.persistent_bytes, int(0.9 * profile.peak_bytes)
    library = Library(PlanOptions(host_budget=1), lambda text: None, HostCosts(CopySpeed("not measured")))
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


# A plan that needs more than the budget -------------------------------------------------------------------------------

LITTLE_BYTES, MUCH_BYTES = 1024, 10**6  # the profile has 2 KiB of values that are too small to be decided on


def a_profile_with_small_values() -> Profile:
    profile = blocks(4)
    values = (replace(v, fixed="smaller than 4096 bytes") if v.fixed == "too small" else v for v in profile.values)
    return replace(profile, values=tuple(values))


class NearFloor:
    """A library with one kind of step, whose smallest plan needs more than the budget by some bytes."""

    def __init__(self, missing_bytes: int, cache: PlanCache | None = None, *, holds_beneath: bool = True) -> None:
        self.profile, self.told = a_profile_with_small_values(), list[str]()
        self.start_bytes = self.profile.persistent_bytes
        options, costs = PlanOptions(region="step", explain=False), HostCosts(CopySpeed("not measured"))
        job = Job(KEY.sizes, (KnownStep(KEY.sizes, self.profile),), self.start_bytes, 1, options)
        self.needed_bytes = done(job).minimum_bytes
        self.budget_bytes = self.needed_bytes - missing_bytes
        self.library = Library(options, self.told.append, costs, cache, holds_beneath=holds_beneath)

    def step(self, *, ms: float = 100.0, over_bytes: int = 0, more_bytes: int = 0) -> str:
        decision, self.known = self.library.choose(KEY, self.start_bytes + more_bytes, self.budget_bytes)
        if decision == "record":
            self.library.recorded(KEY, self.known, self.profile, 1)
        else:
            self.library.ended(KEY, self.known, decision, ms, over_bytes)
        return decision

    def steps(self, count: int, *, ms: float = 100.0) -> list[str]:
        return [self.step(ms=ms) for _ in range(count)]


def test_a_plan_that_misses_the_budget_by_little_is_followed(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "WORTH_MS", 0.0)
    near = NearFloor(LITTLE_BYTES)
    assert near.steps(8, ms=50.0) == ["online", "record", "online", *["plan"] * 5]
    fast, better = jobs
    assert (fast.budget_bytes, fast.held_bytes) == (int(PLANNED_SHARE * near.budget_bytes), near.budget_bytes)
    assert (better.budget_bytes, better.held_bytes) == (near.needed_bytes, near.budget_bytes)
    plan, known = near.known.plan, near.known
    assert plan is not None
    assert plan.predicted_peak_bytes == near.needed_bytes > near.budget_bytes
    assert known.moving_ms > 0
    assert known.predicted_step_ms == plan.predicted_step_ms + known.moving_ms
    (line,) = near.told
    assert line.startswith("planned for steps of 4: ")
    more = "needs 1.00 KiB more than the budget, so activations that it keeps leave as well"
    assert line.endswith(f"; it {more}")
    (shape,) = near.library.shapes()
    assert (shape.decision, shape.reason) == ("plan", more)
    assert shape.predicted_slowdown == known.predicted_step_ms / plan.in_core_step_ms


def test_it_is_followed_where_a_little_more_is_live_before_the_step() -> None:
    near = NearFloor(LITTLE_BYTES)
    near.steps(4)
    reserve_bytes = near.budget_bytes - int(PLANNED_SHARE * near.budget_bytes)
    assert near.step(more_bytes=reserve_bytes) == "plan"
    assert near.step(more_bytes=reserve_bytes + 1) == "online"


def test_it_is_not_followed_where_nothing_is_held_beneath_it(jobs: list[Job]) -> None:
    near = NearFloor(LITTLE_BYTES, holds_beneath=False)
    assert set(near.steps(8)) == {"online", "record"}
    assert jobs[0].held_bytes is None
    assert near.told[0].startswith("no plan for steps of 4, so they run online: ")


def test_where_even_steps_without_a_plan_pass_the_budget_none_is_followed() -> None:
    near = NearFloor(MUCH_BYTES)
    assert [near.step(over_bytes=1) for _ in range(6)] == ["online", "record", *["online"] * 4]
    assert near.library.plans == {}
    assert near.told[0].startswith("no plan for steps of 4, so they run online: ")


def test_one_step_that_held_the_budget_shows_that_it_can_be_held() -> None:
    near = NearFloor(MUCH_BYTES)
    near.step()
    near.step()
    for over_bytes in (28, 0, 28):
        near.library.ended(KEY, near.known, "online", 100.0, over_bytes)
    assert [near.step() for _ in range(3)] == ["online", "plan", "plan"]


def test_it_may_pass_the_budget_by_no_more_than_steps_without_a_plan_do() -> None:
    near = NearFloor(LITTLE_BYTES)
    near.step()
    near.step()
    for over_bytes in (28, 2048, 28):
        near.library.ended(KEY, near.known, "online", 100.0, over_bytes)
    near.step(over_bytes=2048)
    assert [near.step(over_bytes=28) for _ in range(3)] == ["plan"] * 3
    assert [near.step(over_bytes=29), near.step()] == ["plan", "online"]


def test_as_soon_as_it_passes_the_budget_steps_run_online_again(jobs: list[Job]) -> None:
    near = NearFloor(LITTLE_BYTES)
    near.steps(5)
    assert near.step(over_bytes=2048) == "plan"
    asked = len(jobs)
    assert near.steps(4) == ["online"] * 4
    assert len(jobs) == asked
    why = "the smallest plan needs 1.00 KiB more than the budget, and a step exceeded the budget by 2.00 KiB"
    assert near.told[-1] == f"steps of 4 run online again: {why}"
    (shape,) = near.library.shapes()
    assert (shape.decision, shape.reason, shape.predicted_peak_bytes) == ("online", why, None)


@pytest.mark.parametrize(("ms", "decision"), [([50.0, 90.0, 90.0, 90.0, 90.0], "plan"), ([51.0] * 5, "online")])
def test_if_it_takes_longer_than_no_plan_steps_run_online_again(ms: list[float], decision: str) -> None:
    near = NearFloor(LITTLE_BYTES)
    near.step()
    near.step()
    for each in (10.0, 50.0, 70.0):  # the last steps without a plan
        near.library.ended(KEY, near.known, "online", each, 0)
    near.step(ms=50.0)  # the answer comes with the next one
    assert [near.step(ms=each) for each in ms] == ["plan"] * TRIED_STEPS
    assert near.step(ms=1000.0) == decision  # which is looked at once
    assert near.step() == decision
    if decision == "online":
        assert near.told[-1].endswith("and its steps took longer than those without a plan")


def test_an_ordinary_plan_is_followed_however_its_steps_go() -> None:
    near = NearFloor(-MUCH_BYTES)
    near.steps(3, ms=1.0)
    assert [near.step(over_bytes=1) for _ in range(8)] == ["plan"] * 8
    assert near.known.needed_bytes == 0
    assert "more than the budget" not in "".join(near.told)


def test_a_kept_plan_that_needs_more_is_followed_from_the_first_step_on(tmp_path: Path) -> None:
    NearFloor(LITTLE_BYTES, PlanCache(tmp_path, Purpose("training"))).steps(4)
    near = NearFloor(LITTLE_BYTES, PlanCache(tmp_path, Purpose("training")))
    assert near.step() == "plan"
    assert near.known.needed_bytes == near.needed_bytes
    assert near.library.shapes()[0].reason.startswith("needs 1.00 KiB more than the budget")


def test_without_the_tier_what_it_keeps_cannot_leave() -> None:
    near = NearFloor(LITTLE_BYTES)
    near.steps(4)
    decision, _ = near.library.choose(KEY, near.start_bytes, near.budget_bytes, has_tier=False)
    assert decision == "online"


@pytest.mark.parametrize(("size", "decision"), [(3, "record"), (4, "online"), (5, "online")])
def test_a_step_is_not_recorded_if_a_smaller_one_has_no_plan(size: int, decision: str) -> None:
    """Recording takes many times as long as the step where ops are small, and such a step would have no plan either."""
    near = NearFloor(MUCH_BYTES, holds_beneath=False)
    near.steps(4)
    assert near.known.plan is None
    other = StepKey(KEY.family, (size,))
    assert near.library.choose(other, near.start_bytes, near.budget_bytes)[0] == decision
    more_bytes = near.needed_bytes  # of which the reserve takes a part
    if size > 4:
        assert near.library.choose(other, near.start_bytes, int(1.1 * more_bytes))[0] == "record"


# What is remembered is bounded ----------------------------------------------------------------------------------------


def key_of(size: int, family: str = "float32") -> StepKey:
    return StepKey((((family, 1),),), (size,))


def a_library(cache: PlanCache | None = None) -> Library:
    return Library(PlanOptions(), lambda _: None, HostCosts(CopySpeed("not measured")), cache)


def meet(library: Library, key: StepKey, profile: Profile | None = None) -> str:
    """Run a step, and return how it was run. One that is recorded has the given profile; without one, none is."""
    start_bytes = 0 if profile is None else profile.persistent_bytes
    budget_bytes = 10**9 if profile is None else int(0.9 * profile.peak_bytes)
    decision, known = library.choose(key, start_bytes, budget_bytes, has_tier=profile is not None)
    if decision == "record" and profile is not None:
        library.recorded(key, known, profile, 1)
    return decision


def test_shapes_whose_backward_passes_build_graphs_are_not_recorded_for_ever() -> None:
    """Up to there nothing of the step is replayed, and each shape may be a new one, as those of molecules are."""
    library = a_library()
    library.choose(key_of(1), 0, 2**20)  # the first step of all is not recorded
    decisions = []
    for size in range(2, 8):
        decision, known = library.choose(key_of(size), 0, 2**20)
        decisions.append(decision)
        if decision == "record":
            library.cannot_record(known)
    assert decisions == ["record"] * MOST_RECORDED + ["online"] * 3


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


def test_the_process_that_plans_starts_with_the_first_step_which_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = list[int]()
    monkeypatch.setattr(PlanRequests, "warm_up", lambda _: starts.append(1))
    library = Library(PlanOptions(), lambda _: None, HostCosts(CopySpeed("not measured")))
    assert library.choose(KEY, 0, 1000)[0] == "online"
    assert starts == [1]


def test_an_error_of_any_kind_is_an_answer_and_ends_no_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tuple()` of a generator raises a SystemError where another thread calls `gc.get_objects()` just then."""

    def fails(requests: PlanRequests, job: Job) -> Job:
        raise SystemError("bad argument to internal function")

    monkeypatch.setattr(PlanRequests, "_with_costs", fails)
    monkeypatch.setattr(Child, "start", lambda _: None)
    requests = PlanRequests(PlanOptions(), HostCosts(CopySpeed("not measured")), None)
    job = Job(KEY.sizes, (KnownStep(KEY.sizes, blocks(4)),), 0, 1, PlanOptions())
    requests.serve(Request(KEY, Known(), job))
    (arrival,) = requests.arrivals()
    assert arrival.answer.refusal == "planning failed: SystemError: bad argument to internal function"


@pytest.mark.parametrize(("quicker", "arrives"), [(False, False), (True, True)])
def test_of_a_plan_that_is_to_be_improved_only_a_better_one_arrives(quicker: bool, arrives: bool) -> None:
    profile = blocks(2)
    plan = pooch.plan(profile, "100%")
    request = Request(KEY, Known(), Job(KEY.sizes, (), 0, 0, PlanOptions(), plan), plan.predicted_step_ms)
    other = replace(plan, predicted_step_ms=plan.predicted_step_ms * (0.9 if quicker else 1.0))
    requests = PlanRequests(PlanOptions(), HostCosts(CopySpeed("not measured")), None)
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


# Costs that are measured beside training ------------------------------------------------------------------------------


class LateCosts:
    """What copies and hooks cost is known later than the first plan."""

    def __init__(self, happened: list[str], *, are_kept: bool = False) -> None:
        self.is_final, self.happened, self._are_kept = False, happened, are_kept

    @property
    def has_hooks(self) -> bool:
        return self.is_final or self._are_kept

    def prepare(self, room_bytes: int) -> None:
        """Do nothing."""

    def now(self, profile: Profile) -> Costs:
        return Costs(profile.link, HookCosts(op_ms=1.0) if self.is_final else HookCosts())

    def begin(self) -> None:
        self.happened.append("measuring")

    def close(self) -> None:
        """Do nothing."""


class _PlansHere:
    """In place of the process that plans."""

    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    def start(self) -> None:
        """Do nothing."""

    def ask(self, job: Job) -> Answer:
        self._happened.append("planning")
        return done(job)

    def end(self) -> None:
        """Do nothing."""


def _recorded_with(
    costs: LateCosts, child: _PlansHere, tell: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], Decision], Known]:
    """A kind of step that was recorded, planned by a child that answers at once, and what decides on its next step."""
    monkeypatch.setattr(PlanRequests, "_put", PlanRequests.serve)
    monkeypatch.setattr(PlanRequests, "warm_up", lambda _: None)
    profile = blocks(6)
    library = Library(PlanOptions(region="step", explain=False), tell, costs)
    library.requests._child = child  # type: ignore[assignment]
    start_bytes, budget_bytes = profile.persistent_bytes, int(0.7 * profile.peak_bytes)
    for _ in range(2):
        _, known = library.choose(KEY, start_bytes, budget_bytes)
    library.recorded(KEY, known, profile, 1)
    return lambda: library.choose(KEY, start_bytes, budget_bytes)[0], known


@pytest.mark.parametrize("are_kept", [False, True])
def test_a_plan_is_made_again_once_it_is_known_what_hooks_cost(are_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run has kept is told at once, and measured anew all the same."""
    """Else it would stay, as every plan that knows of these costs is predicted to take longer."""
    happened, told = list[str](), list[str]()
    costs = LateCosts(happened, are_kept=are_kept)
    choose, known = _recorded_with(costs, _PlansHere(happened), told.append, monkeypatch)
    decisions = [choose() for _ in range(6)]
    assert decisions[-5:] == ["plan"] * 5
    assert happened == ["planning", "measuring"], "which would delay the plan"
    assert (known.is_provisional, known.is_improved) == (True, False), "nothing is compared with what may not hold"
    early = known.slowdown
    costs.is_final = True
    for _ in range(6):
        assert choose() == "plan"
    assert early is not None
    assert known.slowdown is not None
    assert known.slowdown > early + 0.2, "each op of the forward pass takes longer"
    assert (known.is_provisional, known.is_improved) == (False, known.lost_ms >= library_module.WORTH_MS)
    assert known.plan is not None
    assert known.profile is not None
    assert known.profile.hooks.op_ms == 1.0
    assert [line.split(" for ")[0] for line in told] == ["planned", "planned again"]
    assert told[0].endswith("; what hooks cost comes on top, and is still being measured") != are_kept
    assert "measured" not in told[1]


class _RefusesLater(_PlansHere):
    """Finds a plan once."""

    def ask(self, job: Job) -> Answer:
        answer = super().ask(job)
        return answer if self._happened.count("planning") == 1 else Answer(answer.profile, None, 2**60, "no plan")


def test_a_plan_that_is_made_again_in_vain_is_followed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that such steps run online, while they ran on their plan."""
    happened, told = list[str](), list[str]()
    costs = LateCosts(happened)
    choose, known = _recorded_with(costs, _RefusesLater(happened), told.append, monkeypatch)
    for _ in range(6):
        choose()
    costs.is_final = True
    assert [choose() for _ in range(6)] == ["plan"] * 6
    assert happened.count("planning") == 2
    assert [line.split(" for ")[0] for line in told] == ["planned"]
    assert (known.reason, known.is_provisional) == ("", False)


def test_a_better_plan_is_searched_for_once_steps_have_lost_what_searching_costs(jobs: list[Job]) -> None:
    """It takes seconds of a core, and a run may be over by then."""
    near = NearFloor(-MUCH_BYTES)
    near.profile = replace(near.profile, peak_bytes=4 * near.profile.peak_bytes)
    near.steps(4)
    assert near.known.plan is not None
    lost_ms = near.known.predicted_step_ms - near.known.plan.in_core_step_ms
    assert lost_ms > 0
    most = math.ceil(library_module.WORTH_MS / lost_ms)
    near.known.steps = most - 2
    near.step()
    assert [job.known is None for job in jobs] == [True]
    near.step()
    assert [job.known is None for job in jobs] == [True, False]
    near.step()
    assert len(jobs) == 2


class _Moving(LoopTimes):
    """Says that each step takes 40 ms to move, and its optimizer 20, once that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.moves, self.is_known = True, False

    @property
    def is_measuring(self) -> bool:
        return self.moves and not self.is_known

    @property
    def beside(self) -> Beside:
        return Beside(20.0, 40.0, 10.0) if self.is_known else Beside(20.0)


@pytest.mark.parametrize(("share", "expected_share"), [(0.5, 0.5), (1.5, 1.0)])
def test_where_steps_without_a_plan_are_faster_than_the_recorded_one_plans_are_compared_with_those(
    share: float, expected_share: float
) -> None:
    """Recording makes small ops slower, which would make what a plan loses seem small."""
    profile = blocks(6)
    plan = replace(pooch.plan(profile, int(0.7 * profile.peak_bytes)), predicted_step_ms=profile.step_ms + 30)
    known = Known(profile, "recorded", plan=plan)
    for own_ms in (40.0, 10.0):
        known.trial.online_ms.append(own_ms + share * profile.step_ms)
        known.trial.online_own_ms.append(own_ms)
    plain_ms = expected_share * profile.step_ms
    told = known.expected("plan", Beside())
    assert told is not None
    assert (told.plain_ms, told.slowdown) == (plain_ms, pytest.approx(1 + 30 / plain_ms))
    told = known.expected("in-core", Beside(moving_ms=6))
    assert told is not None
    assert (told.plain_ms, told.slowdown) == (plain_ms, pytest.approx(1 + 6 / plain_ms))


def test_a_planned_step_is_compared_with_what_plain_training_takes() -> None:
    """State that was away while the step was recorded is there in plain training, and the summary counts it."""
    profile, told, away_bytes = blocks(6), list[str](), 24 * 2**20
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")), times=_Moving())
    for _ in range(2):
        _, known = library.choose(KEY, profile.persistent_bytes, int(0.7 * profile.peak_bytes))
    library.recorded(KEY, known, profile, 1)
    known.away_bytes = away_bytes
    assert library.shapes()[0].in_core_peak_bytes == profile.peak_bytes + away_bytes
    for _ in range(3):
        library.choose(KEY, profile.persistent_bytes, int(0.7 * profile.peak_bytes), away=Away(away_bytes))
    (line,), (shape,) = told, library.shapes()
    assert shape.in_core_peak_bytes == profile.peak_bytes + away_bytes
    assert f" instead of {format_bytes(shape.in_core_peak_bytes)}, " in line


LEAVES = "steps of 4 without a plan: what leaves and comes back takes 40.0 ms of"
MOVES = "steps of 4: moving parameters, gradients and the optimizer's state takes 40.0 ms of"


@pytest.mark.parametrize("share", [0.7, 2.0])
def test_what_moving_takes_in_steps_that_are_recorded_is_told_once_it_is_known(share: float) -> None:
    profile, told, times = blocks(6), list[str](), _Moving()
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")), times=times)
    start_bytes, budget_bytes = profile.persistent_bytes, int(share * profile.peak_bytes)
    for _ in range(2):
        _, known = library.choose(KEY, start_bytes, budget_bytes)
    library.recorded(KEY, known, profile, 1)
    for _ in range(3):
        decision, _ = library.choose(KEY, start_bytes, budget_bytes)
    planned = told[:1]
    assert (decision, len(planned)) == (("plan", 1) if share < 1 else ("in-core", 0))
    assert all("comes on top, and is still being measured" in line for line in planned)
    times.is_known = True
    for _ in range(3):
        library.choose(KEY, start_bytes, budget_bytes)
    (line,) = told[len(planned) :]
    plain_ms = profile.step_ms
    step_ms = (known.predicted_step_ms or plain_ms) + 40.0
    assert line.startswith(MOVES)
    assert known.slowdown == (step_ms + 20.0) / (plain_ms + 20.0)
    assert line.endswith(f"predicted {slower_than(known.slowdown, 'without Pooch')}")
    assert known.told is not None
    assert (known.told.decision, known.told.missing, known.told.moving_ms) == (decision, "", 40.0)


def test_where_steps_are_never_recorded_the_least_that_moving_costs_is_told() -> None:
    told, times = list[str](), _Moving()
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")), times=times)
    times.is_known = True
    for _ in range(4):
        _, known = library.choose(KEY, 0, 1000, has_tier=False)
        library.ended(KEY, known, "online", 110.0, 0)
    assert told == [f"{LEAVES} 160.0 ms, optimizer.step() included; predicted at least 33% slower than without Pooch"]


def test_of_steps_that_stay_without_a_plan_what_pooch_takes_in_them_is_told_once() -> None:
    told = list[str]()
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")))
    for _ in range(SETTLING_STEPS):
        _, known = library.choose(KEY, 0, 1000, has_tier=False)
        library.ended(KEY, known, "online", 100.0, 0, 20.0)
    assert not told
    for _ in range(5):
        library.choose(KEY, 0, 1000, has_tier=False)
        library.ended(KEY, known, "online", 100.0, 0, 20.0)
    rest = "100.0 ms, optimizer.step() included; predicted at least 25% slower than without Pooch"
    assert told == [f"steps of 4 without a plan: what leaves and comes back takes 20.0 ms of {rest}"]
    assert known.slowdown == 1.25


def test_what_is_decided_for_many_sizes_is_not_told_of_each_and_is_in_the_events() -> None:
    told = list[str]()
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")))
    sizes = range(1, 2 * library_module.MOST_TOLD + 1)
    for size in sizes:
        key = StepKey(KEY.family, (size,))
        for _ in range(2 * SETTLING_STEPS):
            _, known = library.choose(key, 0, 1000, has_tier=False)
            library.ended(key, known, "online", 100.0, 0, 20.0)
    lines = [f"steps of {size} without a plan: what leaves and comes back takes 20.0 ms of 100.0 ms" for size in sizes]
    assert [event.split(",")[0] for event in library.events] == lines
    assert [line.split(",")[0] for line in told[:-1]] == lines[: library_module.MOST_TOLD]
    assert told[-1].startswith(f"such steps have come in more than {library_module.MOST_TOLD} sizes, now 9: ")
    other = StepKey(((("float64", 1),),), (1,))
    for _ in range(2 * SETTLING_STEPS):
        _, known = library.choose(other, 0, 1000, has_tier=False)
        library.ended(other, known, "online", 100.0, 0, 20.0)
    assert told[-1].split(",")[0] == lines[0]


def totals_ms(answers: dict[int, Answer], away_bytes: int) -> dict[int, float]:
    """What steps take with as much of the state here, moving the rest included."""
    found = {}
    for here_bytes, answer in answers.items():
        if answer.plan is not None:
            assert answer.profile is not None
            link = answer.profile.link
            moved_ms = (away_bytes - here_bytes) * (1 / link.out_bytes_per_ms + 1 / link.in_bytes_per_ms)
            found[here_bytes] = answer.plan.predicted_step_ms + moved_ms
    return found


@pytest.mark.parametrize(
    ("away_share", "options", "stays"),
    [(0.1, {}, "all"), (0.6, {}, "a part"), (0.05, {"host_budget": 512}, "nothing")],
)
def test_a_plan_leaves_room_for_state_where_that_costs_less_than_moving_it(
    away_share: float, options: dict[str, Any], stays: str
) -> None:
    profile = blocks(6)
    if stays == "nothing":  # making anything again takes longer than moving the state, and activations cannot move
        profile = replace(profile, ops=tuple(replace(op, time_ms=1e6 * op.time_ms) for op in profile.ops))
    anchors = (KnownStep(KEY.sizes, profile),)
    budget_bytes, away_bytes = int(0.75 * profile.peak_bytes), int(away_share * profile.peak_bytes)
    job = Job(KEY.sizes, anchors, profile.persistent_bytes, budget_bytes, PlanOptions(effort="fast", **options))
    answer = done(replace(job, away_bytes=away_bytes))
    assert answer.plan is not None
    assert answer.plan.budget_bytes == budget_bytes - answer.staying_bytes
    here = {0: done(job), away_bytes: done(replace(job, budget_bytes=budget_bytes - away_bytes))}
    least_ms = min(totals_ms(here, away_bytes).values())
    assert totals_ms({answer.staying_bytes: answer}, away_bytes)[answer.staying_bytes] <= least_ms
    assert (answer.staying_bytes == away_bytes, answer.staying_bytes == 0) == (stays == "all", stays == "nothing")


def test_state_stays_up_to_what_a_plan_leaves_room_for() -> None:
    library, known = a_planned_library()
    profile, plan = known.profile, known.plan
    assert profile is not None
    assert plan is not None
    budget_bytes = int(0.7 * profile.peak_bytes)
    most_bytes = library.most_start_bytes(KEY, budget_bytes)
    assert most_bytes is not None
    assert most_bytes > profile.persistent_bytes
    assert library.choose(KEY, most_bytes, budget_bytes)[0] == "plan"
    assert library.choose(KEY, most_bytes + 1, budget_bytes)[0] == "online"
    assert library.most_start_bytes(KEY, None) is None
    assert library.most_start_bytes(StepKey(KEY.family, (5,)), budget_bytes) is None


def a_planned_library() -> tuple[Library, Known]:
    """A library, and what it knows of a step that was planned with state away, of which some stays."""
    told, profile = list[str](), blocks(6)
    library = Library(PlanOptions(), told.append, HostCosts(CopySpeed("not measured")))
    budget_bytes, away_bytes = int(0.7 * profile.peak_bytes), int(0.1 * profile.peak_bytes)
    for _ in range(2):
        _, known = library.choose(KEY, profile.persistent_bytes, budget_bytes, away=Away(away_bytes, away_bytes))
    library.recorded(KEY, known, profile, 1)
    for _ in range(3):
        decision, known = library.choose(KEY, profile.persistent_bytes, budget_bytes, away=Away(away_bytes, away_bytes))
    assert decision == "plan"
    assert known.plan is not None
    assert known.staying_bytes > 0
    peaks = (known.plan.predicted_peak_bytes + known.staying_bytes, profile.peak_bytes + away_bytes)
    assert told[0].startswith("planned for steps of 4: {} instead of {}".format(*map(format_bytes, peaks)))
    return library, known


def test_an_answer_that_comes_when_the_budget_has_grown_needs_no_more_than_that(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of a step grows by that of the optimizer's state, which comes while the first plan is being made."""
    near, waiting, put = NearFloor(LITTLE_BYTES), list[Request](), PlanRequests._put
    monkeypatch.setattr(PlanRequests, "_put", lambda _, request: waiting.append(request))
    assert near.steps(3) == ["online", "record", "online"]
    near.budget_bytes = 2 * near.needed_bytes
    near.profile = replace(near.profile, peak_bytes=3 * near.needed_bytes)  # so that it is not in-core from now on
    near.known.profile = near.profile
    assert near.step() == "online"  # which asks for nothing, as an answer is on its way
    monkeypatch.setattr(PlanRequests, "_put", put)
    put(near.library.requests, waiting.pop())
    near.known.profile = near.profile
    assert near.step() == "plan"
    assert (near.known.needed_bytes, near.known.moving_ms) == (0, 0.0)
    assert "more than the budget" not in near.told[0]
    assert [job.budget_bytes for job in jobs] == [
        int(PLANNED_SHARE * (near.needed_bytes - LITTLE_BYTES)),
        int(PLANNED_SHARE * near.budget_bytes),
    ]


def test_a_budget_that_grows_by_little_is_no_reason_to_plan_anew(jobs: list[Job]) -> None:
    near = NearFloor(-MUCH_BYTES)
    near.profile = replace(near.profile, peak_bytes=4 * near.profile.peak_bytes)
    near.steps(3)
    (first,) = jobs
    near.budget_bytes = int(near.budget_bytes * 1.04)
    near.steps(1)
    assert [job for job in jobs if job.known is None] == [first]


def test_a_better_plan_leaves_the_same_room_for_state_and_is_compared_with_the_same_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the time that it comes, less is away than as the first one was asked for."""
    library, known = a_planned_library()
    asked = list[Request]()
    monkeypatch.setattr(PlanRequests, "_put", lambda _, request: asked.append(request))
    profile, staying_bytes, before = known.profile, known.staying_bytes, library.shapes()[0]
    assert profile is not None
    budget_bytes, rest_bytes = int(0.7 * profile.peak_bytes), int(0.1 * profile.peak_bytes) - staying_bytes
    away, start_bytes = Away(rest_bytes, rest_bytes), profile.persistent_bytes + staying_bytes
    known.is_improved = False  # it is asked for a better one now
    monkeypatch.setattr(library_module, "WORTH_MS", 0.0)
    assert library.choose(KEY, start_bytes, budget_bytes, away=away)[0] == "plan"
    (request,) = asked
    assert request.job.known is known.plan, "a better one was asked for"
    library.requests.arrived(replace(request, step_ms=1e9), Answer(profile, known.plan))
    library.choose(KEY, start_bytes, budget_bytes, away=away)
    after = library.shapes()[0]
    assert known.staying_bytes == staying_bytes
    assert (after.predicted_peak_bytes, after.in_core_peak_bytes) == (
        before.predicted_peak_bytes,
        before.in_core_peak_bytes,
    )
    again = library.events[-1]
    assert again.startswith("planned again")
    assert again.split(",")[0] == library.events[0].split(",")[0].replace("planned", "planned again")

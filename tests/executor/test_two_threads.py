"""Two threads of autograd's work on one step: each slot's actions are done once, and who reads next waits for them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pooch.executor import Run, apply_plan, native_watch
from pooch.executor.engines.cpu import CpuTicket
from pooch.executor.plan_guide import PlanGuide
from pooch.executor.step import Step
from pooch.ir import Choice, Plan
from pooch.machine import StepLock, Value
from pooch.machine.growing import GrowingBudget
from pooch.torchtools.watch import HANDLES
from tests.executor.online.support import holding
from tests.executor.support import all_of, is_same, mixed, quick_profile, tight_plan

PATIENCE_S = 60
HEAD_START_S = 0.05  # for the thread that should wait; a right one is not kept from anything by it
CHOICES = ["swap", "recompute", "mixed"]


class TwoHeads(nn.Module):
    """Two branches over one trunk; each branch can be run backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shared = torch.tanh(self.trunk(rows)).sin().exp()
        return torch.tanh(self.left(shared)).exp().sum(), torch.tanh(self.right(shared)).cos().sum()


def planned(choice: str) -> tuple[TwoHeads, Tensor, Plan]:
    torch.manual_seed(0)
    model, rows = TwoHeads(), torch.rand(16, 8)
    profile = quick_profile(lambda: sum(model(rows)), model)  # type: ignore[arg-type]
    decisions: dict[int, Choice]
    decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")  # type: ignore[arg-type]
    plan = tight_plan(profile, decisions, "model")
    assert plan.schedule.actions
    return model, rows, plan


def in_threads(*works: Callable[[], None]) -> None:
    """Run them at once; whatever one of them raises is raised here."""
    barrier, errors = threading.Barrier(len(works)), []

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(PATIENCE_S)
            work()
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "they wait for one another"
    if errors:
        raise errors[0]


def gradients_in_threads(model: TwoHeads, losses: tuple[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    """Gradients of each loss alone, both at once, of one graph."""
    found: list[dict[str, Tensor]] = [{}, {}]
    names, parameters = zip(*model.named_parameters(), strict=True)

    def work(head: int) -> None:
        gradients = torch.autograd.grad(losses[head], parameters, retain_graph=True, allow_unused=True)
        found[head] = {n: g for n, g in zip(names, gradients, strict=True) if g is not None}

    in_threads(lambda: work(0), lambda: work(1))
    return found


def assert_same_heads(expected: list[dict[str, Tensor]], actual: list[dict[str, Tensor]]) -> None:
    for plain, planned_ones in zip(expected, actual, strict=True):
        assert plain.keys() == planned_ones.keys()
        assert len(plain) == 4
        assert all(is_same(plain[name], planned_ones[name]) for name in plain)


@pytest.fixture
def done_actions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, Any]]:
    """(step, action), as they were done; each lets the other threads go ahead, as ops do that give the GIL away."""
    real, done, at_work = PlanGuide.run, [], set()

    def slowly(actions: PlanGuide, action: Any) -> None:
        assert id(actions) not in at_work, "two threads act on one step"
        at_work.add(id(actions))
        done.append((id(actions), action))
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(HEAD_START_S)
        real(actions, action)
        at_work.discard(id(actions))

    monkeypatch.setattr(PlanGuide, "run", slowly)
    monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # Python runs the actions
    return done


@pytest.mark.parametrize("choice", CHOICES)
def test_one_graph_in_two_threads_does_each_action_once(choice: str, done_actions: list[tuple[object, Any]]) -> None:
    model, rows, plan = planned(choice)
    expected = gradients_in_threads(model, model(rows))
    with apply_plan(plan, model) as run:
        actual = gradients_in_threads(model, model(rows))
        assert_same_heads(expected, actual)
        assert run.stats.mismatches == 0
        assert run.stats.swapped_in_bytes + run.stats.recomputed_ops > 0
    assert len(done_actions) == len(plan.schedule.actions) > 0
    assert {action for _, action in done_actions} == set(plan.schedule.actions)


def packed_handles(step: Step) -> list[Any]:
    return [each for each in gc.get_referrers(step) if type(each) in HANDLES]


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_a_read_waits_for_actions_that_another_thread_has_begun(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every handle of the slot that is read first is read in a thread of its own, while its actions are under way."""
    model, rows, plan = planned(choice)
    with apply_plan(plan, model) as run:
        losses = model(rows)
        step = next(each for each in gc.get_objects() if isinstance(each, Step) and each.stats is run._stats)
        anchors = step.guide.table.anchor_of
        first = min(slot for slot in anchors.values() if slot >= step.guide.table.first_slot + len(plan.expected))
        handles = [packed for packed in packed_handles(step) if anchors.get(packed.value.number) == first]
        assert handles
        begun, done, read = threading.Event(), threading.Event(), []
        real = PlanGuide.run

        def slowly(actions: PlanGuide, action: Any) -> None:
            begun.set()
            done.wait(HEAD_START_S)  # whoever does not wait for us is done by then
            real(actions, action)

        monkeypatch.setattr(PlanGuide, "run", slowly)
        monkeypatch.setattr(native_watch, "native_actions", lambda *_: None)  # Python runs the actions

        def second() -> None:
            assert begun.wait(PATIENCE_S)
            read.append(step.unpack(handles[0]))
            done.set()

        in_threads(lambda: read.append(step.unpack(handles[0])), second)
        assert run.stats.late_swaps == 0
        assert is_same(*read)
        assert read[0].untyped_storage()._cdata == read[1].untyped_storage()._cdata
        del losses


def test_a_handle_that_ends_while_another_thread_is_at_work_waits_for_nobody() -> None:
    """Who is at work may wait for the very thread in which the handle ends, such as the one that copies."""
    ended: list[int] = []

    class Owner:
        def __init__(self) -> None:
            self.lock = StepLock(self.handle_ended)

        def handle_ended(self, value: Value) -> None:
            ended.append(value.number)

    owner = Owner()
    with owner.lock:
        in_threads(lambda: owner.lock.end(Value(1)))
        owner.lock.end(Value(2))  # the garbage collector, in the midst of our own work
        with owner.lock:
            owner.lock.end(Value(3))
        assert ended == []
    assert ended == [1, 2, 3]
    owner.lock.end(Value(4))
    assert ended == [1, 2, 3, 4]


def test_many_threads_end_handles_and_none_is_forgotten() -> None:
    ended: list[int] = []

    class Owner:
        def __init__(self) -> None:
            self.lock = StepLock(self.handle_ended)
            self.inside = 0

        def handle_ended(self, value: Value) -> None:
            self.inside += 1
            assert self.inside == 1
            ended.append(value.number)
            self.inside -= 1

    owner = Owner()

    def work(first: int) -> None:
        for value in range(first, first + 500):
            if value % 3:
                owner.lock.end(Value(value))
            else:
                with owner.lock:
                    owner.lock.end(Value(value))

    in_threads(*[lambda n=n: work(1000 * n) for n in range(4)])  # type: ignore[misc]
    assert sorted(ended) == [1000 * n + i for n in range(4) for i in range(500)]


@pytest.mark.cpu
@pytest.mark.usefixtures("copied_in_python")
def test_graphs_let_go_of_in_the_thread_that_copies_while_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end handles of this very step there."""
    model, rows, plan = planned("swap")
    expected = torch.autograd.grad(model(rows)[0], list(model.left.parameters()))
    with apply_plan(plan, model) as run:
        losses: list[Tensor] = list(model(rows))
        graphs = [losses.pop()]
        real, let_go = CpuTicket.run, threading.Event()

        def collecting(ticket: CpuTicket, buffer: Any) -> None:
            if not ticket.outwards and graphs:
                graphs.clear()
                let_go.set()
            real(ticket, buffer)

        monkeypatch.setattr(CpuTicket, "run", collecting)
        found: list[Any] = []
        in_threads(lambda: found.extend(torch.autograd.grad(losses[0], list(model.left.parameters()))))
        assert let_go.is_set()
        assert run.stats.swapped_in_bytes > 0
    assert all(is_same(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.cpu
def test_models_of_two_threads_share_an_engine_without_losing_its_files(tmp_path: Any) -> None:
    """Steps of one run in two threads, again and again: each has a file of its own while it is under way."""
    model, rows, plan = planned("swap")
    expected = [g.clone() for g in torch.autograd.grad(sum(model(rows)), list(model.parameters()))]  # type: ignore[arg-type]
    with apply_plan(plan, model, spill_directory=tmp_path) as run:

        def work() -> None:
            for _ in range(25):
                found = torch.autograd.grad(sum(model(rows)), list(model.parameters()))  # type: ignore[arg-type]
                assert all(is_same(*pair) for pair in zip(expected, found, strict=True))

        in_threads(work, work)
        engine: Any = run._engine
        gc.collect()
        assert not engine._in_use
        assert 1 <= len(engine._free["step"]) <= 2
    assert_closed(run)


def assert_closed(run: Run) -> None:
    engine: Any = run._engine
    assert not engine.copier.is_alive()
    assert len(engine._free["step"]) == 0


def test_a_step_that_asks_for_room_and_room_that_is_made_from_it_do_not_wait_for_one_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread acts on the step, and its allocation asks for room; another one makes room from the same step."""
    steps: list[Step] = []
    new_step = Run._new_step
    monkeypatch.setattr(Run, "_new_step", lambda *given: steps.append(new_step(*given)) or steps[-1])
    model, rows, plan = planned("swap")
    acts, makes_room = threading.Event(), threading.Event()
    with apply_plan(plan, model):
        losses = model(rows)
        step = steps[0]

        def act() -> None:
            with step.lock:
                acts.set()
                assert makes_room.wait(PATIENCE_S)
                step.evictor.make_room(1)

        def make_room() -> None:
            assert acts.wait(PATIENCE_S)
            makes_room.set()
            step.evictor.make_room(1)

        in_threads(act, make_room)
        sum(losses).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_step_that_may_have_to_leave_waits_while_room_is_made_from_others() -> None:
    """Who makes room looks through them, and they must not become more meanwhile."""

    class Leaving:
        """A step on plan."""

    with holding() as evictor:
        step: Any = Leaving()
        thread = threading.Thread(target=evictor.keeps, args=(step,), daemon=True)
        with evictor.lock:
            thread.start()
            thread.join(HEAD_START_S)
            assert step not in evictor._keeping
        thread.join(PATIENCE_S)
        assert step in evictor._keeping


def test_a_budget_that_grows_with_the_step_is_not_lowered_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with holding() as evictor:
        evictor.grow_with(GrowingBudget(evictor.live, 0.5))
        budgets: list[int] = []
        hold, grows = evictor.set_budget, threading.Event()

        def slowly(budget_bytes: int) -> None:
            if threading.current_thread().name == "first":
                grows.set()
                threading.Event().wait(HEAD_START_S)  # a second thread that does not wait for us is done by then
            hold(budget_bytes)
            budgets.append(budget_bytes)

        def first() -> None:
            threading.current_thread().name = "first"
            evictor.make_room(2**40)

        def second() -> None:
            assert grows.wait(PATIENCE_S)
            evictor.make_room(2**42)

        monkeypatch.setattr(evictor, "set_budget", slowly)
        in_threads(first, second)
        assert budgets == sorted(budgets)

"""Several microbatches in flight: forward passes of one model that are retained, then their backward passes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.evaluation import StageEvaluator
from pooch.api.manual import plan_from_decisions
from pooch.errors import InvalidSchedule, UsageError
from pooch.executor import apply_plan
from pooch.executor.engines import cpu
from pooch.ir import Plan, Profile
from pooch.ir.executable import check_plan
from pooch.ir.profile import GatheredUnit
from pooch.profiler import ProfileOptions, profile_step
from pooch.schedule import verify
from pooch.torchtools.memory_meter import MemoryMeter
from tests.executor.support import LINK, all_of, assert_same, mixed, quick_profile

IN_FLIGHT = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(rows))), 0.1, self.training)
        return rows + self.down(hidden)


class Work:
    """A model with microbatches of its own.

    With few rows its gradients are larger than what a microbatch holds, so that the peak is in the second backward
    pass, and with many it is in the first.
    """

    def __init__(self, rows: int, width: int = 48) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(*(Block(width) for _ in range(3)))
        self.batches = [torch.rand(rows, width) for _ in range(IN_FLIGHT)]

    def forward(self, number: int = 0) -> Tensor:
        return self.model(self.batches[number]).square().mean()

    def step(self) -> tuple[dict[str, Tensor], int]:
        """All results of the forward passes and then their backward passes, and their peak in bytes."""
        self.model.zero_grad()
        torch.manual_seed(3)
        with MemoryMeter(torch.device("cpu")) as meter:
            losses = [self.forward(number) for number in range(IN_FLIGHT)]
            for loss in losses:
                loss.backward()
        found = {f"loss {number}": loss.detach() for number, loss in enumerate(losses)}
        found |= {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        found["random state"] = torch.get_rng_state()
        del losses, loss
        return found, meter.peak_bytes

    def all_at_once(self) -> None:
        """All forward passes, and then all backward passes."""
        losses = [self.forward(number) for number in range(IN_FLIGHT)]
        for loss in losses:
            loss.backward()

    def profile(self) -> Profile:
        for _ in range(2):
            self.step()
        self.model.zero_grad()
        return quick_profile(self.forward, self.model)


@pytest.mark.usefixtures("without_floor")  # the test holds tensors beside the plan
@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("choice", ["keep", "swap", "recompute", "mixed"])
def test_each_microbatch_is_as_without_a_plan_and_the_peak_as_predicted(choice: str, rows: int) -> None:
    work = Work(rows)
    profile = work.profile()
    plain, _ = work.step()
    decisions = mixed(profile, "model") if choice == "mixed" else all_of(profile, choice, "model")  # type: ignore[arg-type]
    plan = plan_from_decisions(profile, decisions, "min", microbatches_in_flight=IN_FLIGHT)
    with apply_plan(plan, work.model, measure_every=None) as run:
        work.step()
        planned, peak_bytes = work.step()
        assert run.totals.steps_off_path == 0
        assert run.stats.late_swaps == 0
        if choice != "keep":
            assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    assert_same(plain, planned)
    held_bytes = sum(t.nbytes for name, t in plain.items() if name != "random state")
    assert peak_bytes - held_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)
    if choice == "keep":
        alone = plan_from_decisions(profile, decisions, "min")
        above_bytes = profile.peak_bytes - profile.persistent_bytes
        assert plan.predicted_peak_bytes - alone.predicted_peak_bytes > above_bytes / 2


@pytest.mark.usefixtures("without_floor")  # which holds the budget also where the plan does not count all
@pytest.mark.parametrize("rows", [8, 512])
def test_the_planner_counts_all_in_flight_and_a_plan_for_one_does_not(rows: int) -> None:
    work = Work(rows)
    profile = work.profile()
    work.step()
    smallest = pooch.smallest_budget(profile, microbatches_in_flight=IN_FLIGHT)
    assert smallest > pooch.smallest_budget(profile)
    in_core_bytes = profile.with_in_flight(IN_FLIGHT).peak_bytes
    budget_bytes = (smallest + in_core_bytes) // 2
    plan = pooch.plan(profile, budget_bytes, microbatches_in_flight=IN_FLIGHT)
    assert plan.in_core_peak_bytes == in_core_bytes > budget_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # several forward passes and gradients are expected
        with pooch.apply(plan, work.model) as run:
            for _ in range(2):
                work.model.zero_grad()
                work.all_at_once()
        assert run.totals.steps == 2 * IN_FLIGHT
        assert run.totals.steps_measured > 0
        assert run.totals.steps_over_budget == 0
        assert run.totals.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)
    one = pooch.plan(profile, budget_bytes)
    with apply_plan(one, work.model, measure_every=None):
        assert work.step()[1] > budget_bytes


@pytest.mark.usefixtures("without_floor")  # other tests of the process may hold tensors
def test_no_measurement_begins_between_the_passes_of_earlier_microbatches() -> None:
    work = Work(512)
    work.step()
    profile = profile_step(work.forward, work.model, None, LINK, ProfileOptions(True, warmup=0, repeats=1)).profile
    plan = pooch.plan(profile, "80%", microbatches_in_flight=2)
    waiting: list[Tensor] = []
    with warnings.catch_warnings(), pooch.apply(plan, work.model) as run:
        warnings.simplefilter("error")
        for _ in range(3):  # steps of 1F1B; the tenth microbatch, which is to be measured, is the second one of a step
            work.model.zero_grad()
            for number in range(4):
                waiting.append(work.forward(number % IN_FLIGHT))
                if len(waiting) == 2:
                    waiting.pop(0).backward()
            waiting.pop().backward()
    assert run.totals.peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=0.02)


def test_auto_holds_the_budget_over_several_forward_passes_without_a_plan() -> None:
    work = Work(512)
    for _ in range(2):
        work.step()
    plain, plain_bytes = work.step()
    budget_bytes = int(0.6 * plain_bytes)
    held_bytes = sum(t.nbytes for name, t in plain.items() if name != "random state")
    other = Work(512)
    with pooch.auto(other.model, budget_bytes) as auto:
        for _ in range(3):
            found, peak_bytes = other.step()
            assert_same(plain, found)
            assert peak_bytes - held_bytes <= budget_bytes
            del found
        assert "0 on plan, 3 online" in str(auto.summary())


@pytest.mark.usefixtures("without_floor")  # which holds the budget, so that there is nothing to tell
def test_more_in_flight_than_planned_is_told() -> None:
    work = Work(512)
    profile = work.profile()
    budget_bytes = pooch.smallest_budget(profile, microbatches_in_flight=2)
    plan = pooch.plan(profile, budget_bytes, microbatches_in_flight=2)
    told = "3 forward passes ran before one backward pass, but the plan was made for 2"
    with pooch.apply(plan, work.model), pytest.warns(UserWarning, match=told):
        work.all_at_once()


@pytest.mark.usefixtures("without_floor")  # it takes room of its own if other tests of the process hold tensors
def test_each_microbatch_has_room_of_its_own_in_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(512)
    profile = work.profile()
    plan = plan_from_decisions(profile, all_of(profile, "swap", "model"), "min", microbatches_in_flight=IN_FLIGHT)
    assert plan.host_bytes == IN_FLIGHT * plan.schedule.host_bytes > 0
    made: list[int] = []
    spill_file = cpu.SpillFile
    monkeypatch.setattr(cpu, "SpillFile", lambda *given: (made.append(given[1]), spill_file(*given))[1])
    with apply_plan(plan, work.model, measure_every=None):
        assert len(made) == IN_FLIGHT, "all of the tier is there before the first step"
        work.step()
        assert len(made) == IN_FLIGHT
    tier_bytes = plan.host_bytes // 2
    smaller = pooch.plan(profile, "70%", host_budget=tier_bytes, microbatches_in_flight=IN_FLIGHT)
    assert smaller.host_bytes <= tier_bytes


@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("region", ["model", "step"])
def test_lowering_and_verifier_count_the_same_at_every_point(rows: int, region: str) -> None:
    profile = Work(rows).profile().with_in_flight(IN_FLIGHT)
    dataflow = Dataflow(profile, region)  # type: ignore[arg-type]
    for decisions in ({}, mixed(profile, region), *(all_of(profile, c, region) for c in ("swap", "recompute"))):  # type: ignore[arg-type]
        evaluation = StageEvaluator(dataflow).evaluate_smallest(decisions)
        peak_bytes = evaluation.timeline.peak_bytes
        points = verify(dataflow, evaluation.schedule, decisions, peak_bytes)
        assert points == evaluation.timeline.point_bytes.tolist()
        with pytest.raises(InvalidSchedule, match="over the budget"):
            verify(dataflow, evaluation.schedule, decisions, peak_bytes - 1)


def test_a_plan_says_how_many_are_in_flight(tmp_path: object) -> None:
    profile = Work(8).profile()
    plan = pooch.plan(profile, "100%", microbatches_in_flight=IN_FLIGHT)
    plan.save(f"{tmp_path}/plan.json")
    assert Plan.load(f"{tmp_path}/plan.json").microbatches_in_flight == IN_FLIGHT
    assert pooch.simulate(profile, plan).peak_bytes == plan.predicted_peak_bytes
    assert check_plan(replace(plan, microbatches_in_flight=0)) == "it is for 0 microbatches in flight"
    widened = profile.with_in_flight(IN_FLIGHT)
    widened.save(f"{tmp_path}/profile.json")
    assert Profile.load(f"{tmp_path}/profile.json") == widened
    with pytest.raises(UsageError, match="3 microbatches in flight already"):
        pooch.plan(widened, "100%", microbatches_in_flight=2)


def test_what_cannot_be_is_refused() -> None:
    work = Work(8)
    profile = work.profile()
    with pytest.raises(UsageError, match="microbatches_in_flight=0: give how many"):
        pooch.plan(profile, "100%", microbatches_in_flight=0)
    with pytest.raises(UsageError, match="bound='live'"):
        pooch.plan(profile, "100%", microbatches_in_flight=2, bound="arena")
    gathered = replace(profile, gathered=(GatheredUnit("", (0,), ((profile.forward_ops, profile.forward_ops),)),))
    with pytest.raises(UsageError, match="FSDP gathers parameters in this step"):
        pooch.plan(gathered, "100%", microbatches_in_flight=2)
    plan = pooch.plan(profile, "100%", microbatches_in_flight=2)
    with pytest.raises(UsageError, match=r"use pooch\.apply"):
        pooch.guard(profile, "100%", work.model, plan=plan)
    with pytest.raises(UsageError, match="arena"):
        pooch.apply(plan, work.model, arena=True)

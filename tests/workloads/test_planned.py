"""Every built-in workload, small: profiled, planned and trained under the plan, bit by bit as without it."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
import torch

from pooch.analysis.dataflow import Dataflow
from pooch.api.measure.training import Trained, first_difference, train_steps
from pooch.api.planning import plan
from pooch.errors import InfeasibleBudget
from pooch.ir import Plan, Profile, Value
from pooch.workloads import built_in_workloads, load_workload
from tests.executor.support import planned_replays, quick_profile
from tests.workloads.test_builtin import SMALL_NAMES

SHARE = 0.65
WIDER = {"resnext101_3d@small": {"inner_channels": 16}}  # else one op of backward is the peak on some CPUs
AMPLE_S = 200.0  # planning ends by counts long before, also on a busy machine


def profiled(name: str, **settings: int) -> Profile:
    gc.collect()  # what dies in the middle of the profile would count before
    package = built_in_workloads()[name.partition("@")[0]].package
    if package:
        pytest.importorskip(package)
    workload = load_workload(name, settings=settings)
    return quick_profile(workload.forward, workload.model, workload.optimizer)


def planned(profile: Profile, share: float = SHARE, time_limit_s: float = 1.0) -> Plan:
    """At that share of the peak, or at the smallest budget: single ops of tiny networks take most of the memory."""
    budget = int(profile.peak_bytes * share)
    try:
        return plan(profile, budget, region="step", time_limit_s=time_limit_s)
    except InfeasibleBudget as error:
        return plan(profile, error.minimum_bytes, region="step", time_limit_s=time_limit_s)


def trained(name: str, chosen: Plan | None, **settings: int) -> Trained:
    gc.collect()  # the workload before this one is not part of the peak
    return train_steps(load_workload(name, settings=settings), chosen, 1, lambda text: None)


def assert_kept(chosen: Plan, plain: Trained, under_plan: Trained) -> None:
    """The promise, and that the mechanism fired."""
    assert first_difference(plain, under_plan) is None
    assert under_plan.peak_bytes <= chosen.budget_bytes < plain.peak_bytes
    stats = under_plan.stats
    assert stats is not None
    assert stats.swapped_out_bytes + stats.recomputed_ops > 0
    assert stats.recomputed_ops == planned_replays(chosen)
    assert (stats.late_swaps, stats.mismatches, stats.kept_after_errors) == (0, 0, 0)


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_trains_bitwise_equal_within_its_budget(name: str) -> None:
    settings = WIDER.get(name, {})
    chosen = planned(profiled(name, **settings))
    assert_kept(chosen, trained(name, None, **settings), trained(name, chosen, **settings))


def slow_link(profile: Profile) -> Profile:
    """The same step with a tier so slow that swapping never pays; what is decided then follows from sizes."""
    return replace(profile, link=replace(profile.link, out_bytes_per_ms=1e3, in_bytes_per_ms=1e3))


def labelled(profile: Profile, ending: str) -> list[Value]:
    return [value for value in profile.values if value.label.endswith(ending) and value.role == "made"]


def test_the_planner_finds_by_itself_that_keys_plus_query_is_made_again() -> None:
    """Additive attention: T_target * T_source * N * width saved numbers, from T * N * width kept ones."""
    settings = {"batch_size": 32, "sequence_length": 32}
    profile = slow_link(profiled("nmt@small", **settings))
    summed = [value for value in labelled(profile, "attention.tanh") if value.fixed is None]
    (keys,) = labelled(profile, "decoder.keys.mm")
    assert len(summed) == 32
    assert all(value.size_bytes == keys.size_bytes for value in summed)
    assert not keys.saved
    chosen = plan(profile, "55%", region="step", time_limit_s=AMPLE_S)
    recomputed = [value for value in summed if chosen.decisions[value.id] == "recompute"]
    assert len(recomputed) > 0.7 * len(summed)
    assert {value.id for value in recomputed} <= set(chosen.schedule.recomputed)
    assert keys.id in chosen.schedule.sources
    replayed = [profile.ops[action.target] for action in chosen.schedule.actions if action.kind == "replay"]
    assert keys.producer not in {op.index for op in replayed}
    assert sum(op.name == "aten.tanh.default" for op in replayed) >= len(recomputed)
    assert_kept(chosen, trained("nmt@small", None, **settings), trained("nmt@small", chosen, **settings))


def test_the_planner_finds_by_itself_that_an_lstm_makes_its_gates_again() -> None:
    """Of five numbers a unit and step that autograd saves for gates, most go; what they are made of stays."""
    settings = {"layers": 1, "sequence_length": 16, "dropout": 0}
    profile = slow_link(profiled("lstm@small", **settings))
    gates = [value for ending in (".sigmoid", ".tanh") for value in labelled(profile, ending)]
    chosen = plan(profile, "50%", region="step", time_limit_s=20.0)
    quick = plan(profile, "50%", region="step", effort="fast")
    assert quick.predicted_step_ms < 2 * chosen.predicted_step_ms, "swapping everything takes nine times as long"
    again = [value for value in gates if chosen.decisions[value.id] == "recompute"]
    assert sum(value.size_bytes for value in again) > 0.6 * sum(value.size_bytes for value in gates)
    assert chosen.schedule.sources
    assert_kept(chosen, trained("lstm@small", None, **settings), trained("lstm@small", chosen, **settings))


@pytest.mark.parametrize("budget", ["48%", "49%", "50%"])
def test_a_fast_plan_does_not_stay_with_dear_swaps(budget: str) -> None:
    """With times like these no rule fits but swapping everything, and changing one choice at a time ends halfway."""
    recorded = slow_link(profiled("lstm@small", layers=1, sequence_length=16, dropout=0))
    for seed in (14, 18, 27):
        random = Random(seed)
        ops = tuple(replace(op, time_ms=0.005 + 0.01 * random.random()) for op in recorded.ops)
        quick = plan(replace(recorded, ops=ops), budget, region="step", effort="fast", time_limit_s=AMPLE_S)
        assert quick.predicted_step_ms < 1.5 * quick.lower_bound_ms, seed
        assert "recompute" in quick.decisions.values()


def test_what_a_replay_of_attention_needs_grows_with_the_length_only_once() -> None:
    recipes = {}
    for length in (16, 32):
        dataflow = Dataflow(profiled("nmt@small", batch_size=32, sequence_length=length))
        values = [v for v in dataflow.activations if v.label.endswith("attention.tanh")]
        recipes[length] = [len(dataflow.recipe(value.id).ops) for value in values]
    assert recipes[16] == [3] * 16  # the query's product, the sum, the tanh
    assert recipes[32] == [3] * 32


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    """Small tensors gain nothing from more, and a busy machine loses."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

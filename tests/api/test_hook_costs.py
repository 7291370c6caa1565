"""What hooks cost is measured, carried in profiles, and part of what plans predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pooch
from pooch.api.hook_costs import _Chain, _op_and_step_ms, _Taken, measure_hook_costs, with_hook_costs
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate_in_core
from pooch.errors import FileFormatError, TierError
from pooch.ir import Choice, HookCosts, Profile, Region
from tests.rescaling import rescale
from tests.toys import FAST_LINK, blocks, chain

COSTS = HookCosts(op_ms=0.5, replay_ms=0.25, copy_ms=0.125)


def test_they_are_measured_on_this_machine() -> None:
    costs = measure_hook_costs()
    assert 0 <= costs.op_ms < 100
    assert 0 <= costs.cold_op_ms < 100
    assert 0 < costs.copy_ms < 100
    assert 0 <= costs.replay_ms < 100
    assert 0 <= costs.view_ms < 100
    assert 0 <= costs.step_ms < 1000
    assert measure_hook_costs() is costs  # once in a process


@pytest.mark.parametrize("mode", ["run", "fake"])
def test_profiles_of_a_cpu_carry_them(mode: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    rows = torch.rand(64, 64)
    profile = pooch.profile(lambda: model(rows).square().sum(), model, mode=mode)  # type: ignore[arg-type]
    assert profile.hooks == measure_hook_costs()
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").hooks == profile.hooks


def test_a_profile_does_without_where_they_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tier(device_type: str) -> HookCosts:
        raise TierError("the disk is full")

    monkeypatch.setattr("pooch.api.hook_costs.measure_hook_costs", no_tier)
    model = torch.nn.Linear(64, 64)
    profile = pooch.profile(lambda: model(torch.ones(64, 64)).sum(), model)
    assert profile.hooks == HookCosts()
    assert any("the disk is full" in note for note in profile.notes)


def on_a_gpu(profile: Profile, mode: str = "run") -> Profile:
    return replace(profile, device=replace(profile.device, kind="cuda"), mode=mode)  # type: ignore[arg-type]


@pytest.fixture
def a_gpu_s_costs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if they were measured on a GPU; for which devices."""
    asked: list[str] = []

    def measured(device_type: str) -> tuple[HookCosts, float]:
        asked.append(device_type)
        return COSTS, 4.0

    monkeypatch.setattr("pooch.api.hook_costs._measured", measured)
    return asked


def test_a_gpu_s_profile_carries_those_of_its_own_host(a_gpu_s_costs: list[str]) -> None:
    profile = on_a_gpu(chain(4))
    assert with_hook_costs(profile, lambda text: None) == replace(profile, hooks=COSTS)
    assert set(a_gpu_s_costs) == {"cuda"}


@pytest.mark.parametrize("mode", ["offload", "fake"])
@pytest.mark.usefixtures("a_gpu_s_costs")
def test_where_no_plain_step_ran_short_ops_take_as_long_as_their_launch(mode: str) -> None:
    profile = on_a_gpu(chain(4), mode)  # 4 ops of 1 ms and 4 of 2 ms
    launched = with_hook_costs(profile, lambda text: None)
    assert [op.host_ms for op in launched.ops] == [4.0] * 8 + [0.0]
    assert [op.time_ms for op in launched.ops] == [5, 4, 4, 4, 5, 4, 4, 4, 0]
    assert launched.step_ms == simulate_in_core(launched).step_ms == 8 * 4 + 2


def test_hooks_slow_a_launch_bound_step_down_and_one_of_long_kernels_not() -> None:
    """Both keep the same value away; in-core both take as long as without hooks."""

    def lost_ms(host_share: float) -> float:
        profile = on_a_gpu(replace(chain(6, link=FAST_LINK), hooks=HookCosts(op_ms=0.5)))
        ops = tuple(replace(op, host_ms=op.time_ms * host_share) for op in profile.ops)
        profile = replace(profile, ops=ops)
        plan = plan_from_decisions(profile, {1: "swap"})
        assert simulate_in_core(profile).step_ms == pytest.approx(profile.step_ms)
        assert plan.schedule.actions
        return plan.predicted_step_ms - profile.step_ms

    assert lost_ms(1.0) == pytest.approx(6 * 0.5)
    assert lost_ms(0.1) == pytest.approx(0.0, abs=1e-6)


def test_modelled_profiles_have_none() -> None:
    profile = replace(chain(4), hooks=COSTS)
    assert rescale(profile, 2.0, 3.0, FAST_LINK, 2**34, "other").hooks == HookCosts()


def test_a_plan_that_does_anything_predicts_them() -> None:
    profile = blocks(4, link=FAST_LINK)
    hooked = replace(profile, hooks=COSTS)
    plan = pooch.plan(hooked, "60%", region="step")
    kinds = [action.kind for action in plan.schedule.actions]
    replays, copies = kinds.count("replay"), sum(kind in ("copy_out", "copy_in", "refill") for kind in kinds)
    assert replays + copies > 0
    # At the least: each forward op under the mode, and each replay at the price of the op that it repeats.
    besides_ms = 0.5 * profile.forward_ops + (0.5 + 0.25) * replays + 0.125 * copies
    assert plan.predicted_step_ms >= profile.step_ms + besides_ms - 1e-9
    assert pooch.simulate(hooked, plan).step_ms == pytest.approx(plan.predicted_step_ms)
    assert plan.lower_bound_ms <= plan.predicted_step_ms


@pytest.mark.parametrize("mode", ["run", "fake"])
def test_views_pass_the_hooks_too(mode: str) -> None:
    start = torch.nn.Parameter(torch.ones(64, 64))
    model = torch.nn.Module()
    model.register_parameter("start", start)

    def forward() -> torch.Tensor:
        hidden = start.sin().t().reshape(32, 128).view(64, 64).exp()  # `reshape` copies here, which is an op
        return hidden.sum()

    profile = pooch.profile(forward, model, mode=mode)  # type: ignore[arg-type]
    views = {op.name: op.views for op in profile.ops[: profile.forward_ops]}
    assert views["aten.sin.default"] == 0
    assert sum(views.values()) == views["aten.clone.default"] + views["aten.exp.default"]
    assert views["aten.clone.default"] >= 1
    assert views["aten.exp.default"] >= 2

    def lost_ms(hooks: HookCosts) -> float:
        hooked = replace(profile, hooks=hooks, link=FAST_LINK)
        decisions = {value.id: "swap" for value in profile.activations[:1]}
        return plan_from_decisions(hooked, decisions, region="step").predicted_step_ms  # type: ignore[arg-type]

    assert lost_ms(HookCosts(view_ms=1.0)) - lost_ms(HookCosts()) == pytest.approx(sum(views.values()))


def test_a_plan_that_does_nothing_does_not() -> None:
    hooked = replace(blocks(4), hooks=COSTS)
    assert pooch.plan(hooked, "100%").predicted_step_ms == simulate_in_core(hooked).step_ms == hooked.step_ms


def test_a_policy_that_moves_things_without_need_pays_for_it() -> None:
    hooked = replace(blocks(4, link=FAST_LINK), hooks=COSTS)
    plan = pooch.plan(hooked, "100%", policy="swap_all", region="step")
    assert plan.schedule.actions
    assert plan.predicted_step_ms > hooked.step_ms + 0.5 * hooked.forward_ops
    assert pooch.simulate(hooked, plan).step_ms == pytest.approx(plan.predicted_step_ms)


def test_a_small_copy_is_not_worth_its_hooks() -> None:
    """Copies that overlap with compute are free but for what hooks cost: then a cheap replay is better."""
    profile = chain(6, link=FAST_LINK, size_bytes=16)
    free = pooch.plan(profile, "60%", region="step")
    dear = pooch.plan(replace(profile, hooks=HookCosts(0.0, 0.0, 50.0)), "60%", region="step")
    assert list(free.decisions.values()).count("swap") > 0
    assert list(dear.decisions.values()).count("swap") == 0


def test_nonsense_in_a_file_is_told(tmp_path: Path) -> None:
    replace(chain(3), hooks=HookCosts(-1.0, 0.0, 0.0)).save(tmp_path / "p.json")
    with pytest.raises(FileFormatError, match="the hooks cost"):
        Profile.load(tmp_path / "p.json")


def test_what_a_step_takes_once_is_no_cost_of_its_ops() -> None:
    """Steps with thousands of ops would be predicted to take several times as long as they do."""

    def taken(ops: int, more_ms: float) -> _Taken:
        chain = _Chain(torch.device("cpu"), ops, 4096)
        return _Taken(chain, {"plain": [ops * 1.0] * 3, "kept": [ops * 1.0 + more_ms] * 3}, 0.5, 0, 0)

    assert _op_and_step_ms(taken(4, 2.4), taken(32, 5.2)) == pytest.approx((0.1, 2.0))
    assert _op_and_step_ms(taken(4, 2.4), taken(32, 2.0)) == pytest.approx((0.0, 2.4))


def test_a_machine_that_changes_its_speed_changes_no_cost() -> None:
    """Ways are compared within turns, and the median of the turns counts, so that one that was disturbed does not."""

    def taken(ops: int) -> _Taken:
        plain_ms = [ops * speed for speed in (1.0, 2.0, 1.0, 2.0, 1.5)]
        more_ms = [0.1 * ops + 2.0 + disturbed for disturbed in (0, 0, 0, 0, 50.0 * ops)]
        kept_ms = [plain + more for plain, more in zip(plain_ms, more_ms, strict=True)]
        return _Taken(_Chain(torch.device("cpu"), ops, 4096), {"plain": plain_ms, "kept": kept_ms}, 0.5, 0, 0)

    assert _op_and_step_ms(taken(4), taken(32)) == pytest.approx((0.1, 2.0))
    assert taken(4).more_ms("kept", "plain") == pytest.approx(0.6)


@pytest.mark.parametrize(("size_bytes", "cold"), [(2**14, 1 / 32), (2**18, 1 / 2), (2**19, 1), (2**24, 1)])
def test_hooks_take_longer_between_ops_that_leave_caches_cold(size_bytes: int, cold: float) -> None:
    """Each op of the chain reads one value and makes another."""
    profile = chain(6, size_bytes=size_bytes)
    decisions: dict[int, Choice] = {profile.activations[0].id: "recompute"}

    def predicted_ms(hooks: HookCosts) -> float:
        return plan_from_decisions(replace(profile, hooks=hooks), decisions, region="step").predicted_step_ms

    forward = profile.ops[: profile.forward_ops]
    moved = [2 * size_bytes if op.reads and op.writes else 0 for op in forward]
    assert set(moved) == {2 * size_bytes}
    with_replay = profile.forward_ops + 1
    lost_ms = predicted_ms(HookCosts(cold_op_ms=1.0)) - predicted_ms(HookCosts())
    assert lost_ms == pytest.approx(with_replay * cold)


@pytest.mark.parametrize("region", ["step", "model"])
def test_what_a_step_takes_once_is_predicted_once(region: Region) -> None:
    profile = chain(6, link=FAST_LINK)
    ids = [value.id for value in profile.activations]

    def predicted_ms(hooks: HookCosts, choice: Choice) -> float:
        decisions = dict.fromkeys(ids, choice)
        return plan_from_decisions(replace(profile, hooks=hooks), decisions, region=region).predicted_step_ms

    once = HookCosts(step_ms=3.0)
    assert predicted_ms(once, "recompute") - predicted_ms(HookCosts(), "recompute") == pytest.approx(3.0)
    assert predicted_ms(once, "keep") == predicted_ms(HookCosts(), "keep")

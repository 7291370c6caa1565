"""A step that leaves its plan on a device with streams stays within the budget: room is made before each op."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pooch
from pooch.errors import PlanMismatch
from pooch.executor.plan_guide import PlanGuide
from tests.executor.support import budget_at, quick_profile
from tests.executor.test_floor import Growing, gradients, gradients_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


ONE_OP_BYTES = 2048 * 256 * 4


def planned(share: float = 0.6) -> tuple[Growing, Tensor, pooch.Plan]:
    torch.manual_seed(0)
    model, rows = Growing().cuda(), torch.rand(2048, 256, device="cuda")
    profile = quick_profile(lambda: model(rows), model)
    plan = pooch.plan(profile, budget_at(profile, share), region="model", time_limit_s=3)
    assert plan.schedule.actions
    model.zero_grad()
    return model, rows, plan


def peak_of(run: pooch.Run, step: Callable[[], object]) -> int:
    """The highest count of the allocator, of which the floor resets the counter while it looks."""
    gc.collect()
    step()
    torch.cuda.synchronize()
    return int(run.stats.peak_bytes or 0)


@pytest.mark.parametrize(("ordinary", "more", "over_bytes"), [(0, 12, 0), (5, 7, 0), (10, 8, ONE_OP_BYTES)])
def test_a_step_that_leaves_its_plan_stays_within_the_budget(ordinary: int, more: int, over_bytes: int) -> None:
    """Where it leaves at the very peak of its plan, the op with which it does so has run before anyone knows."""
    model, rows, plan = planned()
    with pooch.apply(plan, model) as run:
        for _ in range(3):
            gradients(model, rows)
        model.ordinary, model.more = ordinary, more
        with run.paused():
            expected = gradients(model, rows)
            torch.cuda.reset_peak_memory_stats()
            gradients(model, rows)
            plain_bytes = torch.cuda.max_memory_allocated()
        model.zero_grad()
        with pytest.warns(UserWarning, match="the budget is held without the plan"):
            peak_bytes = peak_of(run, lambda: model(rows).backward())
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 1
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
        assert peak_bytes <= plan.budget_bytes + over_bytes
        assert plan.budget_bytes + over_bytes < plain_bytes
        model.ordinary, model.more = 10, 0
        with run.paused():
            expected = gradients(model, rows)
        model.zero_grad()
        peak_bytes = peak_of(run, lambda: model(rows).backward())
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 0
        assert peak_bytes <= plan.budget_bytes


def test_a_plan_that_fails_in_the_middle_of_the_backward_pass_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, plan = planned()
    with pooch.apply(plan, model) as run:
        gradients(model, rows)
        with run.paused():
            expected = gradients(model, rows)
        model.zero_grad()
        loss = model(rows)
        act, acted = PlanGuide.act, list[int]()

        def fails(guide: PlanGuide, slot: int) -> None:
            acted.append(slot)
            if len(acted) == 3:
                raise PlanMismatch("the third slot of the backward pass fails")
            act(guide, slot)

        monkeypatch.setattr(PlanGuide, "act", fails)
        with pytest.warns(UserWarning, match="the third slot of the backward pass fails.; the budget is held"):
            peak_bytes = peak_of(run, loss.backward)
        assert gradients_of(model) == expected
        assert run.stats.mismatches == 1
        assert run.stats.late_swaps > 0
        assert peak_bytes <= plan.budget_bytes


def test_memory_that_runs_out_in_the_forward_pass_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use the device too. What the plan keeps leaves then, and the op that had failed runs again."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)]).cuda(), torch.rand(8192, 512, device="cuda")
    profile = quick_profile(lambda: model(rows).square().mean(), model)
    plan = pooch.plan(profile, budget_at(profile, 0.95), region="step", time_limit_s=3)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with pooch.apply(plan, model) as run:
        torch.cuda.empty_cache()
        _, total_bytes = torch.cuda.mem_get_info()
        allowed_bytes = torch.cuda.memory_allocated() + int(0.8 * (plan.budget_bytes - plan.persistent_bytes))
        torch.cuda.set_per_process_memory_fraction(allowed_bytes / total_bytes)
        try:
            with run.step():
                loss = model(rows).square().mean()
            loss.backward()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert run.stats.swapped_out_bytes + run.stats.recomputed_ops > 0
    assert expected is not None
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_chain_of_values_that_are_made_again_makes_room_as_it_goes() -> None:
    """Nothing is copied out, so the backward pass makes again what everything before it depends on."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(10)]
    model, rows = nn.Sequential(*layers).cuda(), torch.rand(4096, 256, device="cuda")
    for _ in range(2):  # the first step makes gradients, and the libraries' workspaces
        model.zero_grad()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(rows).square().mean().backward()
    plain_bytes = torch.cuda.max_memory_allocated() - before_bytes
    expected = gradients_of(model)
    budget_bytes = before_bytes + int(0.5 * plain_bytes)
    with pooch.auto(model, budget_bytes, host_budget="2KiB", quiet=True) as auto:
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        model(rows).square().mean().backward()
        peak_bytes = torch.cuda.max_memory_allocated()
        assert auto.summary().recomputed_ops > len(layers)
        assert auto.summary().swapped_bytes == 0
    assert gradients_of(model) == expected
    assert peak_bytes <= budget_bytes + rows.nbytes  # what an op takes is not known before it ran once

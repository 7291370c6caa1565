"""Devices that share the host's memory: a copy there frees nothing, so nothing is swapped, which one line tells."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

import pooch
from pooch.errors import UsageError
from pooch.executor import apply as applying
from pooch.ground import messages
from tests.children import child_environment
from tests.executor.support import quick_profile
from tests.simulated_cuda.mistakes import is_simulated


def a_model() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(32, 32), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.ones(2048, 32)


def test_a_plan_for_such_a_device_recomputes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = a_model()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    shared = replace(profile, device=replace(profile.device, shares_memory=True))
    lines: list[str] = []
    monkeypatch.setattr(messages, "tell", lines.append)
    for policy in ("ilp", "swap_all"):
        plan = pooch.plan(shared, shared.peak_bytes if policy == "swap_all" else "70%", policy=policy)
        assert "swap" not in plan.decisions.values()
        assert plan.schedule.host_bytes == 0
    assert len(lines) == 2
    assert all("shares the host's memory, so a copy there frees nothing" in line for line in lines)
    pooch.plan(profile, "70%")
    assert len(lines) == 2


def test_a_profile_keeps_that_the_device_shares_memory() -> None:
    model, inputs = a_model()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    assert not profile.device.shares_memory
    shared = replace(profile, device=replace(profile.device, shares_memory=True))
    assert pooch.plan(shared, "min").budget_bytes >= pooch.plan(profile, "min").budget_bytes


def test_a_plan_that_swaps_is_refused_on_such_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = a_model()
    profile = quick_profile(lambda: model(inputs).square().mean(), model)
    plan = pooch.plan(profile, profile.peak_bytes, policy="swap_all")
    monkeypatch.setattr(applying.accelerators, "shares_memory", lambda _: True)
    monkeypatch.setattr(applying.accelerators, "name_of", lambda _: "Orin")
    with pytest.raises(UsageError, match=r"the plan swaps, and Orin shares the host's memory.* plan again"):
        pooch.apply(plan, model)


@pytest.mark.gpu
@pytest.mark.skipif(not is_simulated(), reason="an integrated device is simulated")
def test_training_on_an_integrated_device_keeps_its_bits_and_its_budget_without_a_copy() -> None:
    code = """
        import json, torch, pooch
        from tests.deep_net import deep_net
        model, forward, steps = deep_net(10, 16384)

        plain, lines = steps(1)[0], []
        profile = pooch.profile(forward, model)
        plan = pooch.plan(profile, "min")
        with pooch.apply(plan, model) as run:
            planned = steps(2)
            stats = run.stats
        budget = (plan.budget_bytes + profile.peak_bytes) // 2
        with pooch.auto(model, budget, tell=lines.append) as held:
            online = steps(3)
            summary = held.summary()
        print(json.dumps({
            "shares": profile.device.shares_memory, "choices": sorted(set(plan.decisions.values())),
            "same": all(found == plain for found in planned + online),
            "swapped": stats.swapped_out_bytes + summary.swapped_bytes,
            "replayed": stats.recomputed_ops, "lines": lines, "verdict": str(summary).splitlines()[0],
        }))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=child_environment(SIMULATED_CUDA_INTEGRATED="1", SIMULATED_CUDA_KERNEL_US="0"),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["shares"]
    assert found["choices"] == ["keep", "recompute"]
    assert found["same"]
    assert found["swapped"] == 0
    assert found["replayed"] > 0
    assert found["lines"][0].startswith("cuda shares the host's memory, so a copy there frees nothing")

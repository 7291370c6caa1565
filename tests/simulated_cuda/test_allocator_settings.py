"""Settings of PyTorch's allocator: the same bits, and the budget, under each."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.children import child_environment

PROGRAM = """
    import json, torch, pooch
    from tests.deep_net import deep_net
    model, forward, steps = deep_net(12, 8269)  # no power of two

    plain, lines = steps(2)[1], []
    profile = pooch.profile(forward, model)
    plan = pooch.plan(profile, "85%", policy="ilp_swap")
    with pooch.apply(plan, model) as run:
        planned = steps(3)
        moved, overruns = run.stats.swapped_in_bytes, run.totals.steps_over_budget
    torch.cuda.reset_peak_memory_stats()
    with pooch.auto(model, plan.budget_bytes, tell=lines.append):
        online = steps(3)
        peak = torch.cuda.max_memory_allocated()
    print(json.dumps({
        "same": all(found == plain for found in planned + online), "moved": moved, "overruns": overruns,
        "over": peak - plan.budget_bytes, "told": any("over the budget" in line for line in lines),
        "settings": torch.cuda.memory._snapshot()["allocator_settings"],
    }))
"""
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


@pytest.mark.parametrize(
    "settings",
    [
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.6",
        "expandable_segments:True",
        "pinned_use_cuda_host_register:True,pinned_num_register_threads:2",
    ],
)
def test_training_keeps_its_bits_and_its_budget(settings: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=child_environment(PYTORCH_CUDA_ALLOC_CONF=settings, SIMULATED_CUDA_KERNEL_US="0"),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings
    assert found["same"]
    assert found["moved"] > 0
    assert found["overruns"] == 0
    assert found["over"] <= 0 or found["told"], found

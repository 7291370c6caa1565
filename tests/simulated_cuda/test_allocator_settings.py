"""Settings of PyTorch's allocator: the same bits, and the budget, under each, or one line that says why not. Other
allocators than PyTorch's own: likewise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

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
# Part of a program that has lists of errors and of numbers printed.
REFUSED = """
    def refused(what):
        try:
            what()
        except pooch.PoochError as error:
            return str(error)
    refusals = [refused(lambda: pooch.auto(model, "80MiB")), refused(lambda: pooch.profile(forward, model))]
    refusals.append(refused(lambda: pooch.profile(forward, model, mode="fake")))  # it measures workspaces
"""
PLAN = """
    import sys, pooch
    from tests.deep_net import deep_net
    model, forward, _ = deep_net(12, 8269)
    pooch.plan(pooch.profile(forward, model), "85%", policy="ilp_swap").save(sys.argv[1])
"""
POOLS = f"""
    import json, sys, torch, pooch
    from tests.deep_net import deep_net
    model, forward, steps = deep_net(12, 8269)
    {REFUSED}
    plain = steps(2)[1]
    plan = pooch.Plan.load(sys.argv[1])
    with pooch.apply(plan, model) as run:
        planned = steps(3)
    torch.cuda.synchronize()
    print(json.dumps({{
        "refusals": refusals, "backend": torch.cuda.get_allocator_backend(),
        "same": all(found == plain for found in planned), "moved": run.stats.swapped_in_bytes,
        "over": run.totals.peak_bytes - plan.budget_bytes,
    }}))
"""
OTHERS = f"""
    import json, sys, torch, pooch
    allocator = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[2], "take", "give_back")
    torch.cuda.memory.change_current_allocator(allocator)
    from tests.deep_net import deep_net
    model, forward, _ = deep_net(12, 8269)
    {REFUSED}
    refusals.append(refused(lambda: pooch.apply(pooch.Plan.load(sys.argv[1]), model)))
    print(json.dumps(refusals))
"""
PLUGGABLE = """
#include <stddef.h>
#include <sys/types.h>
int cudaMalloc(void **pointer, size_t bytes);
int cudaFree(void *pointer);
void *take(ssize_t bytes, int device, void *stream) { void *found = 0; cudaMalloc(&found, bytes); return found; }
void give_back(void *pointer, ssize_t bytes, int device, void *stream) { cudaFree(pointer); }
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
    found = json.loads(_said(PROGRAM, settings))
    assert found["settings"]["PYTORCH_CUDA_ALLOC_CONF"] == settings
    assert found["same"]
    assert found["moved"] > 0
    assert found["overruns"] == 0
    assert found["over"] <= 0 or found["told"], found


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan that was made under PyTorch's own allocator."""
    path = str(tmp_path_factory.mktemp("plans") / "plan.json")
    _said(PLAN, "backend:native", path)
    return path


def test_the_driver_s_pools_tell_nobody_of_steps_and_hold_the_budget_of_a_plan(plan: str) -> None:
    found = json.loads(_said(POOLS, "backend:cudaMallocAsync", plan))
    assert found["backend"] == "cudaMallocAsync"
    line = (
        "PyTorch's allocator backend cudaMallocAsync tells nobody of single allocations, so no step can be recorded: "
        "leave backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"
    )
    assert found["refusals"] == 3 * [line]
    assert found["same"]
    assert found["moved"] > 0
    assert found["over"] <= 0


def test_an_allocator_that_counts_nothing_is_refused(plan: str, tmp_path: Path) -> None:
    source, library = tmp_path / "pluggable.c", tmp_path / "pluggable.so"
    source.write_text(PLUGGABLE)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    line = (
        "an allocator that counts no bytes has taken the place of PyTorch's on cuda, so no budget can be held: train "
        "without torch.cuda.memory.change_current_allocator()"
    )
    assert json.loads(_said(OTHERS, "backend:native", plan, str(library))) == 4 * [line]


def _said(program: str, settings: str, *arguments: str) -> str:
    """What a program prints under settings of the allocator, as its last line."""
    lines = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", lines, *arguments],
        env=child_environment(PYTORCH_CUDA_ALLOC_CONF=settings, SIMULATED_CUDA_KERNEL_US="0"),
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return (done.stdout.splitlines() or [""])[-1]

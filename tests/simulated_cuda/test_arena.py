"""Training under the CUDA arena, with PyTorch's own CUDA build: the same numbers, at their places, and no race."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.children import child_environment
from tests.simulated_cuda.mistakes import is_simulated

computes = is_simulated() and os.environ.get("SIMULATED_CUDA_NUMBERS") != "0"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not computes, reason="needs the simulated device, computing numbers"),
]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: PyTorch's allocator can only be chosen once."""
    done = subprocess.run(
        [sys.executable, *arguments], env=child_environment(), capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done


def result_of(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(python("-m", *arguments).stdout.splitlines()[-1])
    return found


def said(program: str) -> list[str]:
    return python("-W", "always", "-c", textwrap.dedent(program)).stdout.splitlines()


def test_steps_on_an_arena_compute_the_same_and_a_copy_is_waited_for() -> None:
    expected, actual = (result_of("tests.simulated_cuda.arena_training", way) for way in ("caching", "arena"))
    assert expected["mistakes"] == actual["mistakes"] == []
    assert actual["found"] == expected["found"]
    counters = actual["counters"]
    assert counters["placed"] == counters["steps"] * actual["blocks"] > 200
    assert counters["unrecognised"] + counters["collided"] + counters["beyond"] == 0


def test_planned_steps_on_an_arena_compute_the_same(tmp_path: Path) -> None:
    child, plan = "tests.simulated_cuda.planned_arena", str(tmp_path / "plan.json")
    expected, actual = (result_of(child, way, "unet3d@small", "1", plan) for way in ("caching", "arena"))
    assert expected["mistakes"] == actual["mistakes"] == []
    same = ("digest", "swapped_bytes", "replayed_ops", "profiled_peak_bytes", "predicted_peak_bytes", "peak_bytes")
    assert {name: actual[name] for name in same} == {name: expected[name] for name in same}
    assert actual["peak_bytes"] == actual["predicted_peak_bytes"]
    assert min(actual["swapped_bytes"], actual["replayed_ops"]) > 0
    assert actual["mismatches"] == 0
    arena = actual["arena"]
    counters = arena["counters"]
    assert arena["state"] == "serving"
    assert counters["placed"] == counters["steps"] * arena["blocks"] > 1000
    assert counters["unrecognised"] + counters["collided"] + counters["beyond"] == 0


def test_optimize_measures_an_arena_in_a_process_of_its_own() -> None:
    command = ("optimize", "lstm@small", "--device", "cuda", "--batch-size", "16", "--budget", "min", "--steps", "2")
    outcome = json.loads(python("-m", "pooch", *command, "--arena", "--check", "--json").stdout)["training"]
    assert outcome["arena_difference"] is None
    assert outcome["arena_share_placed"] == 1.0
    assert outcome["arena_bytes"] >= outcome["arena_bound_bytes"] > 0


def test_pooch_counts_where_pytorch_cannot() -> None:
    lines = said(
        """
        import torch, pooch
        from pooch.torchtools import accelerators
        from pooch.torchtools.out_of_memory import is_out_of_memory, missing_bytes
        pooch.install_cuda_arena()
        pooch.install_cuda_arena()  # once is enough
        device = torch.device("cuda", 0)
        kept = torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
        small = torch.empty(1000, dtype=torch.uint8, device=device)
        counters = accelerators.memory_counters(device)
        print(counters["requested_bytes.all.current"] - 3 * 2**20, accelerators.allocated_bytes(device) - 3 * 2**20)
        del kept
        print(accelerators.allocated_bytes(device), accelerators.peak_allocated_bytes(device) - 3 * 2**20)
        accelerators.reset_peaks(device)
        print(accelerators.peak_allocated_bytes(device), accelerators.peak_reserved_bytes(device) - 3 * 2**20)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(64 * 2**20 / torch.cuda.mem_get_info()[1])
        try:
            torch.empty(80 * 2**20, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            print(is_out_of_memory(error), missing_bytes(error) // 2**20)
            print(str(error).splitlines()[0])
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.CUDAGraph().capture_begin()
        except RuntimeError as error:
            print(str(error).splitlines()[0])
        """
    )
    assert lines[:4] == ["1000 1024", "1024 1024", "1024 1024", "True 16"]
    assert lines[4].startswith("CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has a total capacity of ")
    assert lines[5].startswith("CUDA graphs cannot be captured under Pooch's allocator")


def test_an_allocator_that_comes_too_late_is_refused_and_training_goes_on() -> None:
    lines = said(
        """
        import warnings
        import torch, pooch
        model = torch.nn.Linear(4, 4).cuda()
        try:
            pooch.install_cuda_arena()
        except pooch.UsageError as error:
            print(error)
        with warnings.catch_warnings(record=True) as caught, pooch.arena(model) as arena:
            warnings.simplefilter("always")
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            print(arena.stats)
        print(*(each.message for each in caught if "arena" in str(each.message)))
        """
    )
    assert "before anything is allocated on a GPU" in lines[0]
    assert lines[1] == "None"
    assert "call pooch.install_cuda_arena() at the beginning of the program" in lines[2]


def test_a_profiler_that_hears_nothing_is_not_believed() -> None:
    lines = said(
        """
        import torch, pooch
        from pooch.torchtools.cuda_allocator import allocator
        allocator.PROFILER_REPORT = "no_such_function"
        pooch.install_cuda_arena()
        model = torch.nn.Linear(4, 4).cuda()
        try:
            pooch.profile(lambda: model(torch.ones(2, 4, device="cuda")).sum(), model)
        except pooch.ProfileError as error:
            print(error)
        """
    )
    assert "profile in a process that does not call pooch.install_cuda_arena()" in lines[0]

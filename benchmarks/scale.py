"""Very large inputs: thousands of modules, a hundred thousand activations, a thousand plans at once. Times are told.

    python -m benchmarks.scale [--modules 5000] [--activations 100000] [--plans 1000] [--threads 16]

Whatever is too much is told in one line; nothing crashes and nothing reaches Python's limit on recursion.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from torch import nn

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import InfeasibleBudget, PoochError
from pooch.ir import Choice, Plan, Profile
from tests.toys import SLOW_LINK, chain, random_profile

Times = dict[str, float]


@contextmanager
def timed(times: Times, what: str) -> Iterator[None]:
    """Note how long the block takes, and print it.

    Args:
        times: Where it is noted.
        what: Under which name.
    """
    start = time.monotonic()
    yield
    times[what] = time.monotonic() - start
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {times[what]:.1f} s, at most {memory_mib:.0f} MiB so far", flush=True)


def many_modules(count: int, nested: int = 50) -> Times:
    """Profile, plan and train a model of many modules, some of them inside of one another.

    Args:
        count: How many modules.
        nested: How deep they are nested at most.
    """
    times: Times = {}
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(count // 2):
        layer: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh()) if index % 2 else nn.Linear(8, 8)
        layers.append(layer)
    deep: nn.Module = nn.Linear(8, 8)
    for _ in range(nested):
        deep = nn.Sequential(deep)
    model = nn.Sequential(*layers, deep)
    data = torch.randn(4096, 8)

    def forward() -> torch.Tensor:
        loss: torch.Tensor = model(data).square().mean()
        return loss

    print(f"{sum(1 for _ in model.modules())} modules", flush=True)
    with timed(times, "profile"):
        profile = pooch.profile(forward, model)
    with timed(times, f"plan {len(profile.activations)} activations"):
        try:
            plan = pooch.plan(profile, "60%", effort="fast", explain=False)
        except InfeasibleBudget as error:
            plan = pooch.plan(profile, error.minimum_bytes, effort="fast", explain=False)
    with timed(times, "train two steps"), pooch.apply(plan, model) as run:
        for _ in range(2):
            forward().backward()
            model.zero_grad()
        assert run.stats is not None
    return times


def many_activations(count: int) -> Times:
    """Save, read, plan and simulate a step of many activations.

    Args:
        count: How many.
    """
    times: Times = {}
    with timed(times, "make"):
        profile = chain(count + 1, size_bytes=1 << 12, link=SLOW_LINK)
    with TemporaryDirectory() as folder, timed(times, "save and read the profile"):
        profile.save(Path(folder) / "profile.json")
        profile = Profile.load(Path(folder) / "profile.json")
    assert len(profile.activations) >= count
    with timed(times, "decide by hand"):
        dataflow = Dataflow(profile, "step")
        decisions: dict[int, Choice] = {
            value.id: "recompute" if place % 3 else "keep" for place, value in enumerate(dataflow.activations)
        }
        manual = plan_from_decisions(profile, decisions, region="step")
    with timed(times, "simulate"):
        simulate(profile, manual)
    with timed(times, "plan, fast"):
        planned = pooch.plan(profile, "60%", region="step", effort="fast", time_limit_s=60, explain=False)
    assert planned.predicted_peak_bytes <= planned.budget_bytes
    with TemporaryDirectory() as folder, timed(times, "save and read the plan"):
        planned.save(Path(folder) / "plan.json")
        Plan.load(Path(folder) / "plan.json")
    return times


def many_plans(count: int, threads: int) -> Times:
    """Plan many small steps at once, in threads, and compare with what they come to one after the other.

    Args:
        count: How many plans.
        threads: How many threads make them.
    """
    times: Times = {}
    profiles = [random_profile(Random(seed), 14) for seed in range(min(count, 50))]

    def made(number: int) -> str:
        profile = profiles[number % len(profiles)]
        budget = (profile.peak_bytes * (70 + number % 31)) // 100
        try:
            plan = pooch.plan(profile, budget, region="step", explain=False, effort="fast")
        except InfeasibleBudget as error:
            return f"at least {error.minimum_bytes}"
        except PoochError as error:
            return str(error)
        return repr((sorted(plan.decisions.items()), plan.predicted_peak_bytes, plan.predicted_step_ms))

    with timed(times, f"{count} plans in {threads} threads"), ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(made, range(count)))
    some = range(0, count, max(1, count // 100))
    with timed(times, f"{len(some)} of them again, one after the other"):
        again = [made(number) for number in some]
    different = sum(found[number] != other for number, other in zip(some, again, strict=True))
    assert not different, f"{different} plans of {len(some)} are others"
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modules", type=int, default=5000)
    parser.add_argument("--activations", type=int, default=100_000)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.modules:
        many_modules(arguments.modules)
    if arguments.activations:
        many_activations(arguments.activations)
    if arguments.plans:
        many_plans(arguments.plans, arguments.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())

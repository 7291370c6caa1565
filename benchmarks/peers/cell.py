"""One cell: a workload under one method, in a process of its own. Prints its result as one line of JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

import pooch
from benchmarks.peers.methods import Way, ways
from benchmarks.peers.workloads import WORKLOADS, PeerWorkload
from benchmarks.resident import forget_highest_rss, status_bytes
from benchmarks.samples import StepCost, cost_of, take_turns
from pooch.errors import InfeasibleBudget
from pooch.torchtools.cpu_allocator import CountingAllocator, counting_allocator

WARM_STEPS = 3  # before anything is timed; the highest of their peaks counts
PLANNING_TIME_LIMIT_S = 15.0
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured.

    Attributes:
        workload: Its name.
        method: "pooch", or a name of `methods.ways`, or "compile" with a share.
        beside: For "pooch", the method whose peak the budget comes from and whose steps take turns with its own. Or "".
        budget_bytes: Budget of Pooch or share of the compiler, or 0.
        planned_bytes: What Pooch was planned for: the budget, or the smallest feasible one where that is more.
        before_s: Time before the first step: profiling and planning, or compiling.
        peak_bytes: Highest live bytes of a step under the method, counted by the allocator.
        rss_bytes: Highest resident bytes of the process until its steps under the method were over.
        steps_rss_bytes: Highest resident bytes during these steps.
        base_rss_bytes: Resident bytes before the model was built.
        predicted_ratio: Predicted step time over the predicted in-core time, or 0.
        same_bits: Whether loss and all gradients are those of a plain step.
        samples: Steps that took turns with plain ones.
    """

    workload: str
    method: str
    budget_bytes: float
    beside: str = ""
    planned_bytes: int = 0
    before_s: float = 0.0
    peak_bytes: int = 0
    rss_bytes: int = 0
    steps_rss_bytes: int = 0
    base_rss_bytes: int = 0
    predicted_ratio: float = 0.0
    same_bits: bool = False
    samples: tuple[dict[str, Any], ...] = ()


class _Steps:
    """Steps of a workload, each from the same random state."""

    def __init__(self, workload: PeerWorkload, allocator: CountingAllocator) -> None:
        self.workload, self.allocator = workload, allocator
        self.forward = workload.forward

    def run(self, way: Way) -> torch.Tensor:
        self.workload.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        with way():
            loss = self.forward()
        loss.backward()
        return loss.detach()

    def bits(self, way: Way) -> str:
        found = hashlib.blake2b(self.run(way).numpy().tobytes())
        for parameter in self.workload.model.parameters():
            if parameter.grad is not None:
                found.update(parameter.grad.contiguous().numpy().tobytes())
        return found.hexdigest()

    def peak_bytes(self, way: Way) -> int:
        self.allocator.reset_peak()
        self.run(way)
        return self.allocator.peak_bytes()

    def cost(self, way: Way) -> StepCost:
        return cost_of(lambda: self.run(way), _CPU)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside, the forward pass is the workload's own, not the compiled one."""
        compiled, self.forward = self.forward, self.workload.forward
        try:
            yield
        finally:
            self.forward = compiled


def _both(outer: Way, inner: Way) -> Way:
    @contextmanager
    def both() -> Iterator[None]:
        with outer(), inner():
            yield

    return both


def _planned(profile: pooch.Profile, budget_bytes: int) -> pooch.Plan:
    return pooch.plan(profile, budget_bytes, region="step", time_limit_s=PLANNING_TIME_LIMIT_S)


def measure(name: str, method: str, budget: float, turns: int, beside: str = "") -> Cell:
    """Measure one cell in this process."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    base_rss_bytes = status_bytes("VmRSS")
    allocator = counting_allocator()
    if isinstance(allocator, str) or not allocator.install():
        raise SystemExit(f"the counting allocator is needed here: {allocator}")
    workload = WORKLOADS[name]()
    workload.model.train()
    steps = _Steps(workload, allocator)
    plain: Way = nullcontext
    begin_s, predicted_ratio, planned_bytes = time.perf_counter(), 0.0, int(budget)
    if method == "pooch":
        torch.manual_seed(1)
        profile = pooch.profile(workload.forward, workload.model)
        try:
            plan = _planned(profile, planned_bytes)
        except InfeasibleBudget as error:
            planned_bytes = error.minimum_bytes
            plan = _planned(profile, planned_bytes)
        predicted_ratio = plan.predicted_step_ms / plan.in_core_step_ms
        run = pooch.apply(plan, workload.model, measure_every=None)
        way, plain = run.forward_region, run.paused
        del profile
    elif method == "compile":
        torch._functorch.config.activation_memory_budget = budget  # type: ignore[attr-defined]
        steps.forward = torch.compile(workload.forward)
        way, plain = nullcontext, steps.eager
        steps.run(way)
    else:
        way = ways(workload)[method]
    before_s = time.perf_counter() - begin_s
    whole_rss_bytes = status_bytes("VmHWM")
    forget_highest_rss()
    peak_bytes = max(steps.peak_bytes(way) for _ in range(WARM_STEPS))
    steps_rss_bytes = status_bytes("VmHWM")
    bits = steps.bits(way)
    same_bits = bits == steps.bits(plain)
    kinds = {"plain": plain, method: way}
    if beside:
        kinds[beside] = _both(plain, ways(workload)[beside])
        for _ in range(WARM_STEPS):
            steps.run(kinds[beside])
    samples = take_turns({kind: partial(steps.cost, each) for kind, each in kinds.items()}, turns)
    return Cell(
        name, method, budget, beside, planned_bytes, before_s, peak_bytes, max(whole_rss_bytes, steps_rss_bytes),
        steps_rss_bytes, base_rss_bytes, predicted_ratio, same_bits, tuple(samples),
    )  # fmt: skip


def main() -> None:
    """Measure one cell and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("method")
    parser.add_argument("budget", type=float)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--beside", default="")
    arguments = parser.parse_args()
    cell = measure(arguments.workload, arguments.method, arguments.budget, arguments.turns, arguments.beside)
    sys.stdout.write(json.dumps(asdict(cell)) + "\n")


if __name__ == "__main__":
    main()

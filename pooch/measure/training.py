"""Training for a few steps, plainly and under a plan, and measuring what was promised."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pooch.api.in_core import fits_in_core, unless_out_of_memory
from pooch.ir import Plan
from pooch.progress import Progress

if TYPE_CHECKING:
    import torch

    from pooch.executor import Run, RunStats
    from pooch.workloads import Workload


@dataclass(frozen=True, slots=True)
class StepResult:
    """One measured step. `digests`: {what: digest of its bytes} of loss and gradients; peaks in bytes, `reserved_bytes`
    that of what the caching allocator took (None on the CPU), `rounding_bytes` the part of the peak that it handed out
    beyond what tensors asked for. `left_plan`: the step was not the one that was planned,
    so from there on it kept its activations.
    """

    loss: float
    digests: dict[str, str]
    peak_bytes: int
    reserved_bytes: int | None = None
    left_plan: bool = False
    rounding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A few steps, measured. `final`: digests of parameters, buffers and random state at the end; `plan`: the one in
    force at the end; `repairs`: how often it was made again because memory ran out; `offloaded`: all saved tensors were
    moved away.
    """

    steps: tuple[StepResult, ...]
    final: dict[str, str]
    stats: RunStats | None
    plan: Plan | None = None
    repairs: int = 0
    offloaded: bool = False

    @property
    def peak_bytes(self) -> int:
        """Highest peak of the steps."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def rounding_bytes(self) -> int:
        """The part of the highest peak that the allocator's rounding added: without it no step took more than the
        rest.
        """
        return self.peak_bytes - max(step.peak_bytes - step.rounding_bytes for step in self.steps)

    @property
    def reserved_bytes(self) -> int | None:
        """Highest reserved peak of the steps; None where the device has no caching allocator."""
        known = [step.reserved_bytes for step in self.steps if step.reserved_bytes is not None]
        return max(known) if known else None


def digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes: equal for bitwise equal contents."""
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return _digest(raw.numpy().data)


def _digest(raw: bytes | memoryview) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def train_steps(
    workload: Workload, plan: Plan | None, steps: int, progress: Progress, replan: Callable[[int], Plan] | None = None
) -> Trained:
    """Train for some steps, plainly (plan None) or under a plan, with every step measured at the allocator.

    Args:
        workload: freshly built; its training state changes.
        replan: makes a plan for fewer bytes, should memory run out: the step is then repeated under it. None: the error
            passes.
    """
    if plan is not None and replan is not None:
        return _train_guarded(workload, plan, steps, progress, replan)
    with applied(plan, workload) as run:
        return train_under(workload, run, steps, progress)


def train_under(workload: Workload, run: Run | None, steps: int, progress: Progress) -> Trained:
    """`train_steps` with a plan that is applied already, or plainly (run None)."""
    _begin()
    results: list[StepResult] = []
    for number in range(steps):
        progress(f"{'planned' if run else 'plain'} step {number + 1} of {steps}")
        results.append(_measured_step(workload, run))
    stats, plan = (run.stats, run.plan) if run is not None else (None, None)
    return Trained(tuple(results), _final_digests(workload), stats, plan)


def train_offloaded(workload: Workload, steps: int, progress: Progress) -> Trained:
    """Plain training for some steps, except that saved tensors leave the device until they are read: the same numbers
    in less memory, without a plan.
    """
    from pooch.profiler.offload import saved_tensors_offloaded

    with saved_tensors_offloaded(workload.model):
        return replace(train_under(workload, None, steps, progress), offloaded=True)


def _begin() -> None:
    from pooch.torchtools.accelerators import accelerators_in_use, empty_cache
    from pooch.torchtools.training_state import seed_all
    from pooch.workloads.loading import SEED

    for device in accelerators_in_use():
        empty_cache(device)  # what an earlier training left in the cache is not reserved by this one
    seed_all(SEED)


def _train_guarded(
    workload: Workload, plan: Plan, steps: int, progress: Progress, replan: Callable[[int], Plan]
) -> Trained:
    from pooch.api.guarding import Guard

    results: list[StepResult] = []
    with Guard(plan, workload.model, replan, measured_steps=steps, watch_peak=False, tell=progress) as guard:
        _begin()
        for number in range(steps):
            progress(f"planned step {number + 1} of {steps}")
            workload.model.zero_grad(set_to_none=True)
            loss = guard.step(workload.forward)
            stats = guard.run.stats
            results.append(_finished_step(workload, loss, stats))
        stats = guard.run.stats
    return Trained(tuple(results), _final_digests(workload), stats, guard.plan, len(guard.repairs))


@contextmanager
def applied(plan: Plan | None, workload: Workload) -> Iterator[Run | None]:
    """The plan on the workload's model, or nothing."""
    from pooch.executor import apply_plan

    if plan is None:
        yield None
        return
    with apply_plan(plan, workload.model, measure_every=None) as run:  # who trains here measures, or takes times
        yield run


def forward_and_backward(workload: Workload, run: Run | None) -> torch.Tensor:
    """One step as the user's loop does it; returns the loss."""
    region: Any = run.forward_region() if run is not None else nullcontext()
    with region:
        loss = workload.forward()
    loss.backward()
    return loss.detach()


def _measured_step(workload: Workload, run: Run | None) -> StepResult:
    from pooch.executor import RunStats
    from pooch.torchtools.memory_meter import MemoryMeter
    from pooch.torchtools.training_state import model_device

    workload.model.zero_grad(set_to_none=True)
    with MemoryMeter(model_device(workload.model)) as meter:
        loss = forward_and_backward(workload, run)
    stats = run.stats if run is not None else RunStats()
    stats.peak_bytes, stats.reserved_bytes = meter.peak_bytes, meter.reserved_bytes
    stats.rounding_bytes = meter.rounding_bytes
    return _finished_step(workload, loss, stats)


def _finished_step(workload: Workload, loss: torch.Tensor, stats: RunStats) -> StepResult:
    """What came out of a step; then the optimizer's."""
    digests = {"loss": digest(loss)}
    for name, parameter in workload.model.named_parameters():
        if parameter.grad is not None:
            digests[f"gradient of {name}"] = digest(parameter.grad)
    if workload.optimizer is not None:
        workload.optimizer.step()
    assert stats.peak_bytes is not None
    left_plan = stats.mismatches > 0
    return StepResult(float(loss), digests, stats.peak_bytes, stats.reserved_bytes, left_plan, stats.rounding_bytes)


def _final_digests(workload: Workload) -> dict[str, str]:
    from pooch.torchtools.training_state import RandomStates, model_device

    found = {f"parameter {name}": digest(p) for name, p in workload.model.named_parameters()}
    found |= {f"buffer {name}": digest(b) for name, b in workload.model.named_buffers()}
    states = RandomStates.of(model_device(workload.model))
    algorithm, key, *position = states.numpy
    found["random state"] = _digest(states.cpu)
    found["random state of Python"] = _digest(repr(states.python).encode())
    found["random state of NumPy"] = _digest(key.tobytes() + repr((algorithm, *position)).encode())
    if states.device is not None:
        found["random state of the GPU"] = _digest(states.device)
    return found


def first_difference(first: Trained, second: Trained) -> str | None:
    """What differs first between two trainings ("step 2: gradient of fc.weight"), in the order in which a step makes
    it, or None where all is bitwise equal.
    """
    pairs = [
        (f"step {i + 1}: ", a.digests, b.digests)
        for i, (a, b) in enumerate(zip(first.steps, second.steps, strict=True))
    ]
    for prefix, expected, actual in [*pairs, ("after training: ", first.final, second.final)]:
        for name in [*expected, *(name for name in actual if name not in expected)]:
            if expected.get(name) != actual.get(name):
                return prefix + name
    return None


@dataclass(frozen=True, slots=True)
class Timing:
    """Steps that took turns, so that both kinds saw the same machine. In ms, in the order in which they ran; plain ones
    only where they fit in-core.
    """

    plain_samples_ms: tuple[float, ...]
    planned_samples_ms: tuple[float, ...]

    @property
    def plain_ms(self) -> float | None:
        """Median of the plain steps."""
        return statistics.median(self.plain_samples_ms) if self.plain_samples_ms else None

    @property
    def planned_ms(self) -> float:
        """Median of the planned steps."""
        return statistics.median(self.planned_samples_ms)


def time_in_turns(workload: Workload, plan: Plan, steps: int, progress: Progress) -> Timing:
    """Time plain and planned steps in turns on one model; nothing is measured but time.

    Which of the two goes first changes with every turn: a machine that gets slower or faster while this lasts, and
    what one step leaves behind in the allocator for the next, then touch both alike. Plain steps that do not fit
    in-core are left out.
    """
    from pooch.torchtools.training_state import model_device

    with applied(plan, workload) as run:
        assert run is not None
        if fits_in_core(plan, workload):
            device = model_device(workload.model)
            timing = unless_out_of_memory(lambda: time_under(workload, run, steps, progress), device)
            if timing is not None:
                return timing
        return time_planned(workload, run, steps, progress)


def time_under(workload: Workload, run: Run, steps: int, progress: Progress) -> Timing:
    """`time_in_turns` with a plan that is applied already."""
    plain: list[float] = []
    planned: list[float] = []

    def time_plain() -> None:
        with run.paused():
            plain.append(timed_step(workload, None))

    def time_with_plan() -> None:
        planned.append(timed_step(workload, run))

    for number in range(steps + 1):
        progress(f"timing step {number} of {steps}" if number else "warming up")
        turn = (time_plain, time_with_plan) if number % 2 == 0 else (time_with_plan, time_plain)
        for timed in turn:
            timed()
    return Timing(tuple(plain[1:]), tuple(planned[1:]))


def time_planned(workload: Workload, run: Run, steps: int, progress: Progress) -> Timing:
    """Time planned steps alone, after one to warm up."""
    timed_step(workload, run)
    samples_ms = []
    for number in range(steps):
        progress(f"timing planned step {number + 1} of {steps}")
        samples_ms.append(timed_step(workload, run))
    return Timing((), tuple(samples_ms))


def timed_step(workload: Workload, run: Run | None) -> float:
    """One step, forward and backward, in ms; gradients are dropped before it."""
    from pooch.torchtools.accelerators import synchronize
    from pooch.torchtools.training_state import model_device

    device = model_device(workload.model)
    workload.model.zero_grad(set_to_none=True)
    synchronize(device)
    start = time.perf_counter()
    forward_and_backward(workload, run)
    synchronize(device)
    return (time.perf_counter() - start) * 1000

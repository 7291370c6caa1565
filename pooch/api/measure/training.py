"""Training for a few steps, plainly or under a plan, with the peak memory and digests of the results of each step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...ground.errors import PoochError, first_line
from ...ground.progress import Progress, silent
from ...ir import Plan

if TYPE_CHECKING:
    import torch

    from ...allocation import StepArena
    from ...executor import Run, RunStats
    from ...executor.verification import Verified, Verify
    from ...workloads import Workload
    from ..guarding import Guard


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """What to measure in a training.

    Attributes:
        steps: number of steps, each with the optimizer's.
        check: compare bitwise with plain training. If something differs, train plainly once more, to tell training that
            is not repeatable from a plan that is wrong, and then under deterministic algorithms.
        hard_limit: train twice more, plainly and planned, in processes that cannot take more than the budget.
        arena: train once more, with the memory of the steps from one arena; with `check`, compare that, too, and with
            `hard_limit`, train on an arena in such a process.
        when_trained: called with the workload after its last step.
        verify: how closely replays are compared with what they replace, as `pooch.apply` takes it.
        repeats: number of timed steps, plain and planned in turns. None: as many as `steps`.
        progress: called with what is being done.
    """

    steps: int = 3
    check: bool = False
    hard_limit: bool = False
    arena: bool = False
    when_trained: Callable[[Workload], None] | None = None
    verify: Verify = "first"
    repeats: int | None = None
    progress: Progress = silent


@dataclass(frozen=True, slots=True)
class StepResult:
    """One measured step.

    Attributes:
        loss: its value.
        digests: of the bytes of the loss and the gradients, by name.
        peak_bytes: of live tensors.
        reserved_bytes: peak of what the caching allocator reserved; None on a CPU.
        left_plan: whether the step was not the planned one, so that it kept its activations from there on.
        rounding_bytes: the part of the peak that comes from the allocator rounding up.
    """

    loss: float
    digests: dict[str, str]
    peak_bytes: int
    reserved_bytes: int | None = None
    left_plan: bool = False
    rounding_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A few measured steps.

    Attributes:
        steps: the steps.
        final: digests of parameters, buffers and random states at the end, by name.
        stats: of the last step under a plan.
        plan: the plan at the end.
        repairs: how often the plan was replaced because memory ran out.
        offloaded: whether all saved tensors were moved off the device.
        verified: which replays gave the same bytes as what they replaced; None without a plan.
    """

    steps: tuple[StepResult, ...]
    final: dict[str, str]
    stats: RunStats | None
    plan: Plan | None = None
    repairs: int = 0
    offloaded: bool = False
    verified: Verified | None = None

    @property
    def peak_bytes(self) -> int:
        """Highest peak of the steps."""
        return max(step.peak_bytes for step in self.steps)

    @property
    def rounding_bytes(self) -> int:
        """The part of the highest peak that the allocator's rounding explains: no step took more than the rest."""
        return self.peak_bytes - max(step.peak_bytes - step.rounding_bytes for step in self.steps)

    @property
    def reserved_bytes(self) -> int | None:
        """Highest reserved peak of the steps; None if the device has no caching allocator."""
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
    workload: Workload,
    plan: Plan | None,
    steps: int,
    progress: Progress,
    replan: Callable[[int], Plan] | None = None,
    verify: Verify = "first",
) -> Trained:
    """Train for a few steps and measure each.

    Args:
        workload: newly built; its training state changes.
        plan: None: plain training.
        steps: number of steps.
        progress: called with what is being done.
        replan: makes a plan for fewer bytes if memory runs out, under which the step is repeated. None: the error
            propagates.
        verify: as `pooch.apply` takes it.
    """
    if plan is None or replan is None:
        with applied(plan, workload, verify) as run:
            return train_under(workload, run, steps, progress)
    from ..guarding import Guard

    how: dict[str, Any] = {"measured_steps": steps, "watch_peak": False, "tell": progress, "verify": verify}
    with Guard(plan, workload.model, replan, **how) as guard:
        return train_under(workload, guard, steps, progress)


def train_under(workload: Workload, run: Run | Guard | None, steps: int, progress: Progress) -> Trained:
    """`train_steps` under a plan that is already applied, or plainly (`run` is None)."""
    from ..guarding import Guard

    _begin()
    results: list[StepResult] = []
    for number in range(steps):
        progress(f"{'plain' if run is None else 'planned'} step {number + 1} of {steps}")
        results.append(_measured_step(workload, run))
    final = _final_digests(workload)
    if run is None:
        return Trained(tuple(results), final, None)
    last, repairs = (run.run, len(run.repairs)) if isinstance(run, Guard) else (run, 0)
    return Trained(tuple(results), final, last.stats, run.plan, repairs, verified=last.verified)


def train_offloaded(workload: Workload, steps: int, progress: Progress) -> Trained:
    """Train plainly, but with saved tensors off the device until they are read: the same numbers in less memory."""
    from ...profiler.pressure import saved_tensors_away
    from ...torchtools.training_state import model_device

    with saved_tensors_away(model_device(workload.model)):
        return replace(train_under(workload, None, steps, progress), offloaded=True)


def _begin() -> None:
    from ...torchtools.accelerators import accelerators_in_use, empty_cache
    from ...torchtools.training_state import seed_all
    from ...workloads.loading import SEED

    for device in accelerators_in_use():
        empty_cache(device)  # so that memory cached by an earlier training does not count as reserved by this one
    seed_all(SEED)


@contextmanager
def applied(
    plan: Plan | None, workload: Workload, verify: Verify = "first", memory: StepArena | None = None
) -> Iterator[Run | None]:
    """Apply the plan to the workload's model, if there is one, on an arena, if there is one."""
    from ...executor import apply_plan

    if plan is None:
        yield None
        return
    # the caller measures
    with apply_plan(plan, workload.model, measure_every=None, verify=verify, memory=memory) as run:
        yield run


def forward_and_backward(workload: Workload, run: Run | None) -> torch.Tensor:
    """Run one step as a training loop does, without the optimizer, and return the loss."""
    region: Any = run.forward_region() if run is not None else nullcontext()
    with region:
        loss = workload.forward()
    loss.backward()
    return loss.detach()


def _measured_step(workload: Workload, run: Run | Guard | None) -> StepResult:
    """Measure one step, digest what it computed, then step the optimizer."""
    from ...executor import RunStats
    from ...torchtools.memory_meter import MemoryMeter
    from ...torchtools.training_state import model_device
    from ..guarding import Guard

    workload.model.zero_grad(set_to_none=True)
    if isinstance(run, Guard):  # which measures
        loss = run.step(workload.forward)
        stats = run.run.stats
    else:
        with MemoryMeter(model_device(workload.model)) as meter:
            loss = forward_and_backward(workload, run)
        stats = run.stats if run is not None else RunStats()
        stats.peak_bytes, stats.reserved_bytes = meter.peak_bytes, meter.reserved_bytes
        stats.rounding_bytes = meter.rounding_bytes
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
    from ...torchtools.training_state import RandomStates, model_device

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


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Raise an error of training in a child process, such as one of memory, as one that its parent can be told."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise PoochError(first_line(error)) from None


def first_difference(first: Trained, second: Trained) -> str | None:
    """The first difference of two trainings ("step 2: gradient of fc.weight"), or None if they are bitwise equal."""
    pairs = [
        (f"step {number}: ", a.digests, b.digests)
        for number, (a, b) in enumerate(zip(first.steps, second.steps, strict=True), start=1)
    ]
    for prefix, expected, actual in [*pairs, ("after training: ", first.final, second.final)]:
        for name in {**expected, **actual}:
            if expected.get(name) != actual.get(name):
                return prefix + name
    return None

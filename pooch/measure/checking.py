"""Whether training under a plan gives the numbers of plain training, and where it does not, what it is that differs.

Numbers are compared in the mode in which the user trains. Where they differ, plain training is compared with itself. If
that differs too, or if it may be a library that took another algorithm, both trainings are compared once more under
deterministic algorithms, in a process that begins with them: cuBLAS reads its setting when it is first used, and the
plan that the user has is not for that mode.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pooch.api.children import run_child
from pooch.api.in_core import fits_in_core, unless_out_of_memory
from pooch.errors import PoochError
from pooch.ir import Plan
from pooch.measure.training import Trained, first_difference, train_offloaded, train_steps
from pooch.progress import Progress
from pooch.workloads.loading import WorkloadFactory

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pooch.workloads import Workload

NOT_ALGORITHMS = (
    "it does so under torch.use_deterministic_algorithms too, so look for what draws random numbers without a seed, "
    "reads the clock or changes its data"
)
NO_DETERMINISTIC = "no deterministic implementation: {operators}"
ALGORITHMS = "algorithms that are not deterministic: with torch.use_deterministic_algorithms(True) it repeats itself"
OTHER_OPS = "with torch.use_deterministic_algorithms(True) the step is another one than was planned: profile under it"
OTHER_ALGORITHM = (
    "with deterministic algorithms they are, so a library took another algorithm under the plan, as cuDNN does where a "
    "workspace does not fit: set torch.backends.cudnn.deterministic = True and benchmark = False"
)
UNKNOWN = "it could not be compared under deterministic algorithms"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison came to.

    Attributes:
        bitwise_equal: None: cannot be said, since plain training is not repeatable.
        repeatable: whether plain training gives the same numbers twice.
        first_difference: between planned and plain training, or between two plain ones that are not the same.
        cause: of the difference, as far as it is known.
        is_deterministic: `bitwise_equal` is about training under deterministic algorithms.
    """

    bitwise_equal: bool | None
    repeatable: bool
    first_difference: str | None = None
    cause: str | None = None
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True)
class DeterministicCheck:
    """The comparison under deterministic algorithms.

    Attributes:
        first_difference: between planned and plain training. repeatable: plain training gives the same numbers twice.
        steps_off_plan: that were not the planned step.
        operators: without a deterministic implementation.
    """

    first_difference: str | None
    repeatable: bool
    steps_off_plan: int
    operators: tuple[str, ...]


def judge(
    factory: WorkloadFactory,
    plan: Plan,
    reference: Trained,
    planned: Trained,
    device: torch.device,
    progress: Progress,
) -> Verdict:
    """Compare the two trainings, and where they differ, find out what it is that differs."""
    from pooch.torchtools.accelerators import has_streams

    difference, steps = first_difference(reference, planned), len(reference.steps)
    if difference is None:  # so plain training was repeated, under the plan
        return Verdict(True, True)
    between_plain = first_difference(reference, train_reference(factory, plan, steps, progress))
    if between_plain is not None:
        return _not_repeatable(between_plain, check_deterministically(factory, plan, steps, device, progress))
    if not has_streams(device):
        return Verdict(False, True, difference)
    found = check_deterministically(factory, plan, steps, device, progress)
    is_repaired = found is not None and found.first_difference is None and not found.steps_off_plan
    return Verdict(False, True, difference, OTHER_ALGORITHM if is_repaired else None)


def _not_repeatable(difference: str, found: DeterministicCheck | None) -> Verdict:
    """Two plain trainings differ: what the comparison under deterministic algorithms says of the plan."""
    if found is None:
        return Verdict(None, False, difference, UNKNOWN)
    if not found.repeatable:
        operators = ", ".join(found.operators)
        cause = NO_DETERMINISTIC.format(operators=operators) if operators else NOT_ALGORITHMS
        return Verdict(None, False, difference, cause)
    if found.first_difference is not None:
        return Verdict(False, False, found.first_difference, is_deterministic=True)
    if found.steps_off_plan:
        return Verdict(None, False, difference, OTHER_OPS)
    return Verdict(True, False, difference, ALGORITHMS, is_deterministic=True)


def train_reference(factory: Callable[[], Workload], plan: Plan, steps: int, progress: Progress) -> Trained:
    """The training whose numbers a plan has to repeat: plain, or where that does not fit, with its saved tensors moved
    away, which computes the same with less memory.
    """
    from pooch.torchtools.device_memory import give_memory_back
    from pooch.torchtools.training_state import model_device

    workload = factory()
    device = model_device(workload.model)
    if fits_in_core(plan, workload):
        plain = unless_out_of_memory(lambda: train_steps(workload, None, steps, progress), device)
        if plain is not None:
            return plain
        del workload  # or two of them would live while the next one is built
        give_memory_back(device)
        workload = factory()
    return train_offloaded(workload, steps, progress)


def check_deterministically(
    factory: WorkloadFactory, plan: Plan, steps: int, device: torch.device, progress: Progress
) -> DeterministicCheck | None:
    """Compare planned with plain training under deterministic algorithms, in a process of its own; None where that
    could not be done.
    """
    from pooch.torchtools.device_memory import give_memory_back

    progress("comparing under deterministic algorithms")
    give_memory_back(device)  # what this process's allocator keeps, that process could not take
    with TemporaryDirectory(prefix="pooch-") as folder:
        plan.save(Path(folder) / "plan.json")
        job = {"workload": asdict(factory), "plan_path": str(Path(folder) / "plan.json"), "steps": steps}
        try:
            done = run_child("pooch.measure.checking_child", json.loads(json.dumps(job)), progress)
        except PoochError as error:
            progress(f"they cannot be compared under deterministic algorithms: {error}")
            return None
    if done is None:
        return None
    return DeterministicCheck(**{**done["done"], "operators": tuple(done["done"]["operators"])})


def compared(factory: Callable[[], Workload], plan: Plan, steps: int, progress: Progress) -> DeterministicCheck:
    """In the child: plain and planned training, and where they differ, plain training again; the algorithms are the
    caller's.
    """
    reference = train_reference(factory, plan, steps, progress)
    planned = train_steps(factory(), plan, steps, progress)
    difference = first_difference(reference, planned)
    again = None if difference is None else train_reference(factory, plan, steps, progress)
    is_repeatable = again is None or first_difference(reference, again) is None
    return DeterministicCheck(difference, is_repeatable, sum(step.left_plan for step in planned.steps), ())

"""Whether training under a plan gives the numbers of plain training, and if it does not, why.

Numbers are compared in the mode in which the user trains. If they differ, plain training is compared with itself. If
that differs too, or if a library may have chosen another algorithm, both trainings are compared once more under
deterministic algorithms. This happens in a child process, since cuBLAS reads its setting only when it is first used and
the user's plan is not made for that mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ground.errors import PoochError
from ...ground.progress import Progress
from ...ir import Plan
from ...workloads.loading import WorkloadFactory
from ..children import Child
from ..in_core import fits_in_core, unless_out_of_memory
from ..wire import WIRE
from .training import Trained, errors_in_one_line, first_difference, train_offloaded, train_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ...workloads import Workload

NOT_ALGORITHMS = (
    "they also differ under torch.use_deterministic_algorithms, so look for code that draws random numbers without a "
    "seed, reads the clock or changes its data"
)
NO_DETERMINISTIC = "no deterministic implementation: {operators}"
ALGORITHMS = "algorithms that are not deterministic: with torch.use_deterministic_algorithms(True) it is repeatable"
OTHER_OPS = "with torch.use_deterministic_algorithms(True) the step is not the planned one: profile with it"
OTHER_ALGORITHM = (
    "with deterministic algorithms they are, so a library chose another algorithm under the plan, as cuDNN does if a "
    "workspace does not fit: set torch.backends.cudnn.deterministic = True and benchmark = False"
)
UNKNOWN = "it could not be compared under deterministic algorithms"


@dataclass(frozen=True, slots=True)
class BitsVerdict:
    """Result of a comparison; fields as in `TrainingReport`.

    Attributes:
        bitwise_equal: None: not known, since plain training is not repeatable.
        repeatable: whether plain training gives the same numbers twice.
        first_difference: between planned and plain training, or between two plain ones if those differ.
        difference_cause: as far as it is known.
        compared_deterministically: `bitwise_equal` refers to training under deterministic algorithms.
    """

    bitwise_equal: bool | None
    repeatable: bool
    first_difference: str | None = None
    difference_cause: str | None = None
    compared_deterministically: bool = False


@dataclass(frozen=True, slots=True)
class DeterministicCheck:
    """The comparison under deterministic algorithms.

    Attributes:
        first_difference: between planned and plain training.
        repeatable: whether plain training gives the same numbers twice.
        steps_off_plan: number of steps that were not the planned one.
        operators: those without a deterministic implementation.
    """

    first_difference: str | None
    repeatable: bool
    steps_off_plan: int
    operators: tuple[str, ...]


WIRE.add(WorkloadFactory, DeterministicCheck)


def judge(
    factory: WorkloadFactory,
    plan: Plan,
    reference: Trained,
    planned: Trained,
    device: torch.device,
    progress: Progress,
) -> BitsVerdict:
    """Compare two trainings, and if they differ, find out why."""
    from ...torchtools.accelerators import has_streams

    difference, steps = first_difference(reference, planned), len(reference.steps)
    if difference is None:  # so plain training is repeatable
        return BitsVerdict(True, True)
    between_plain = first_difference(reference, train_reference(factory, plan, steps, progress))
    if between_plain is not None:
        return _not_repeatable(between_plain, check_deterministically(factory, plan, steps, device, progress))
    if not has_streams(device):
        return BitsVerdict(False, True, difference)
    found = check_deterministically(factory, plan, steps, device, progress)
    is_repaired = found is not None and found.first_difference is None and not found.steps_off_plan
    return BitsVerdict(False, True, difference, OTHER_ALGORITHM if is_repaired else None)


def _not_repeatable(difference: str, found: DeterministicCheck | None) -> BitsVerdict:
    """The verdict if two plain trainings differ, from the comparison under deterministic algorithms."""
    if found is None:
        return BitsVerdict(None, False, difference, UNKNOWN)
    if not found.repeatable:
        operators = ", ".join(found.operators)
        cause = NO_DETERMINISTIC.format(operators=operators) if operators else NOT_ALGORITHMS
        return BitsVerdict(None, False, difference, cause)
    if found.first_difference is not None:
        return BitsVerdict(False, False, found.first_difference, compared_deterministically=True)
    if found.steps_off_plan:
        return BitsVerdict(None, False, difference, OTHER_OPS)
    return BitsVerdict(True, False, difference, ALGORITHMS, compared_deterministically=True)


def train_reference(factory: Callable[[], Workload], plan: Plan, steps: int, progress: Progress) -> Trained:
    """The training whose numbers a plan has to reproduce.

    It is plain training, or, if that does not fit, training with its saved tensors moved off the device.
    """
    from ...torchtools.device_memory import give_memory_back
    from ...torchtools.training_state import model_device

    workload = factory()
    device = model_device(workload.model)
    if fits_in_core(plan, workload):
        plain = unless_out_of_memory(lambda: train_steps(workload, None, steps, progress), device)
        if plain is not None:
            return plain
        del workload  # or two would be alive while the next one is built
        give_memory_back(device)
        workload = factory()
    return train_offloaded(workload, steps, progress)


def check_deterministically(
    factory: WorkloadFactory, plan: Plan, steps: int, device: torch.device, progress: Progress
) -> DeterministicCheck | None:
    """Compare planned with plain training under deterministic algorithms in a child process; None if that fails."""
    from ...torchtools.device_memory import give_memory_back

    progress("comparing under deterministic algorithms")
    give_memory_back(device)  # or that process could not use what this one's allocator caches
    try:
        with Child("compare deterministically", imports_as_here=True, passes_on=True) as child:
            found: DeterministicCheck = child.ask(factory, plan, steps, progress=progress)
    except PoochError as error:
        progress(f"the trainings cannot be compared under deterministic algorithms: {error}")
        return None
    return found


def compared(factory: WorkloadFactory, plan: Plan, steps: int, progress: Progress) -> DeterministicCheck:
    """In the child process: compare plain with planned training, and if they differ, with plain training again."""
    from ...torchtools.determinism import deterministic_algorithms, use_deterministic_algorithms

    def build() -> Workload:
        workload = factory()
        use_deterministic_algorithms()  # also if the user's file turns them off
        return workload

    with deterministic_algorithms() as operators, errors_in_one_line():
        reference = train_reference(build, plan, steps, progress)
        planned = train_steps(build(), plan, steps, progress)
        difference = first_difference(reference, planned)
        again = None if difference is None else train_reference(build, plan, steps, progress)
        is_repeatable = again is None or first_difference(reference, again) is None
    steps_off_plan = sum(step.left_plan for step in planned.steps)
    return DeterministicCheck(difference, is_repeatable, steps_off_plan, tuple(operators))

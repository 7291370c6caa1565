"""Applying a plan to a model, after checking that it can be executed there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..ground.errors import PlanMismatch, UsageError
from ..ir import Plan
from ..ir.executable import check_executable
from ..ir.modelled_ranks import is_of_modelled_ranks
from ..ir.plan import GRAPH
from ..torchtools import accelerators, cuda_only
from ..torchtools.calls import compiled_part, refuse_taken
from ..torchtools.determinism import varies_now
from ..torchtools.tensors import model_signature
from ..torchtools.training_state import model_device
from .causes import Overrun
from .engines import make_engine
from .run import OnMismatch, Run, StepMemory
from .verification import Verify
from .watch import MEASURE_EVERY


def apply_plan(
    plan: Plan,
    model: torch.nn.Module,
    *,
    on_mismatch: OnMismatch = "warn",
    spill_directory: str | Path | None = None,
    check_copies: bool = True,
    measure_every: int | None = MEASURE_EVERY,
    on_overrun: Callable[[Overrun], bool] | None = None,
    memory: StepMemory | None = None,
    verify: Verify = "first",
) -> Run:
    """Apply a plan to a model.

    Args:
        plan: A plan made for this model.
        model: The model, in the state (training mode, shapes) in which it was profiled.
        on_mismatch: What to do when a step leaves the profiled path: "warn" once and go on without the plan, within the
            budget, or raise an "error".
        spill_directory: Directory of the CPU engine's spill file.
        check_copies: Whether to compare checksums of what is read back from the spill file with those of what was
            written.
        measure_every: On a CPU, measure the peak of steps 1, 2, 10, 100 and of every step whose number is a multiple of
            this. None or 0 measures none.
        on_overrun: Called with each measured peak over the budget; returns whether it was handled. Otherwise, and with
            None, a warning is given.
        memory: Where the memory of the steps comes from; the run closes it. None leaves it to PyTorch.
        verify: How closely replays are compared with what they replace, see `verification.py`.

    Returns:
        The run, whose `remove()` takes the plan off the model.

    Raises:
        UsageError: If the model is none, was compiled since, or is already under a plan; if parameters or state leave
            under the plan; or if it swaps on a device that shares the host's memory.
        PlanMismatch: If the plan was made for another model or device, or has replays that cannot be repeated exactly.
        InvalidSchedule: If the plan was altered so that it cannot be executed.
        TierError: If the swap tier cannot be set up.
    """
    if on_mismatch not in ("warn", "error"):
        raise UsageError(f"on_mismatch={on_mismatch!r}: choose 'warn' or 'error'")
    if measure_every is not None and (not isinstance(measure_every, int) or measure_every < 0):
        raise UsageError(f"measure_every={measure_every!r}: give a number of steps, or None to measure none")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"apply() takes a torch.nn.Module, not {type(model).__name__}: pooch.apply(plan, model)")
    if not any(op.name == GRAPH for op in plan.expected):
        refuse_compiled_since(model)
    refuse_taken(model, takes_compiled=True)
    device = model_device(model)
    if is_of_modelled_ranks(plan.model_signature):
        raise PlanMismatch(
            "the plan was made for one of several modelled ranks, so it cannot be applied: under torchrun, use "
            "pooch.auto or `pooch exec`, which plan for each rank"
        )
    if plan.model_signature != model_signature(model):
        raise PlanMismatch(
            f"the plan was made for another model ({plan.workload}): its parameters or buffers differ in name, shape "
            "or dtype; profile this model and plan again"
        )
    if plan.device_kind != device.type:
        raise PlanMismatch(f"the plan was made for {plan.device_kind}, the model is on {device.type}: profile it there")
    check_executable(plan)
    if plan.persistent is not None:
        raise UsageError(
            "the plan lets parameters, gradients or the optimizer's state leave, which pooch.apply does not do: train "
            "with pooch.auto(model, budget, optimizer), or plan with moves='activations'"
        )
    if plan.schedule.host_bytes and accelerators.shares_memory(device):
        raise UsageError(
            f"the plan swaps, and {accelerators.name_of(device)} shares the host's memory, so that a copy there frees "
            "nothing: profile there and plan again, which recomputes"
        )
    refuse_unrepeatable(plan, device)
    engine = make_engine(device, spill_directory, check_copies=check_copies)
    try:
        return Run(plan, model, engine, on_mismatch, measure_every or 0, on_overrun, memory, verify)
    except BaseException:  # such as Ctrl-C: nothing of a run that could not be made is left
        engine.close()
        raise


def refuse_compiled_since(model: torch.nn.Module) -> None:
    """Refuse a model that is compiled under a plan of one that was not.

    Raises:
        UsageError: If anything of it is compiled.
    """
    compiled = compiled_part(model)
    if compiled is not None:
        raise UsageError(
            f"{compiled} is compiled by torch.compile, and was not when the plan was made: profile and plan again"
        )


def refuse_unrepeatable(plan: Plan, device: torch.device) -> None:
    """Refuse a plan with replays that may compute other bits than the op did, under PyTorch's current settings.

    Ops for which this also depends on their arguments are checked when they run.

    Args:
        plan: The plan to check.
        device: The device that it is applied to.

    Raises:
        PlanMismatch: If the plan contains such a replay.
    """
    if not accelerators.has_streams(device):
        return
    replayed = {action.target - plan.first_slot for action in plan.schedule.actions if action.kind == "replay"}
    for fingerprint in {plan.expected[op].fingerprint for op in replayed}:
        # cuDNN's benchmark mode chooses algorithms for each thread anew, and replays run in autograd's threads.
        if cuda_only.chooses_algorithms_by_timing(device) and fingerprint.startswith("aten.convolution"):
            raise PlanMismatch(
                "the plan replays convolutions, and torch.backends.cudnn.benchmark may give a replay another "
                "algorithm: switch it off, or profile and plan with it on (convolutions are then not replayed)"
            )
        name, _, results = fingerprint.partition("(")
        dtype = getattr(torch, results.partition("[")[0], torch.float32)
        reason = varies_now("::".join(name.split(".")[:2]), dtype)
        if reason is not None:
            raise PlanMismatch(
                f"the plan replays an op that cannot be repeated exactly: {reason}; call that, or profile and plan "
                "again"
            )

"""A training step -> Profile: the link measured with the engine that will swap, then the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pooch.errors import UsageError
from pooch.ir import Device, Link, Profile
from pooch.progress import Progress, silent
from pooch.session.fake_profiling import fake_profile, fake_profile_of
from pooch.session.hook_costs import with_hook_costs

if TYPE_CHECKING:
    import torch

    from pooch.devices import DeviceModel
    from pooch.workloads import Workload

Mode = Literal["auto", "run", "offload", "fake"]


def profile(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 3,
    mode: Mode = "auto",
    device_model: DeviceModel | None = None,
    workload: str = "",
    batch_size: int = 0,
    progress: Progress = silent,
) -> Profile:
    """Measure one training step. Parameters, gradients, buffers, optimizer and random state stay as they were.

    Args:
        forward: () -> loss tensor (a scalar). It is run several times, forward and backward.
        model: whose `forward` the plan will be applied to.
        optimizer: its state counts as persistent bytes, also what it will only create at its first step.
        accumulate: gradients live through the step (else they appear in the backward pass and are freed after it).
        warmup, repeats: plain steps before, and timed steps of which the median counts.
        mode: "run" (plain), "offload" (saved tensors leave the device, for models that do not fit), "auto"
            (run, and offload after an out-of-memory), "fake" (nothing is run: sizes and lifetimes from fake tensors,
            op times from measuring each distinct op once by itself, or from `device_model`).
        device_model: of a device that need not be here (`pooch.devices.find_device`); implies "fake". The profile is
            marked as modelled.
        workload, batch_size: for the profile's reader.
        progress: called with what is being done.

    Raises:
        ProfileError: the forward raises, its loss cannot be differentiated, or the step changes from run to run.
        UsageError: an argument is of the wrong kind, or `device_model` goes with a mode that runs the step.
    """
    import torch

    from pooch.executor.engines import make_engine
    from pooch.executor.engines.measurement import measure_link, with_step_shares
    from pooch.profiler import ProfileOptions, profile_step
    from pooch.profiler.timing import time_step
    from pooch.torchtools.training_state import model_device, training_state_kept

    if not callable(forward):
        raise UsageError(
            f"forward is {type(forward).__name__}: give a function that takes nothing and returns the loss"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {type(model).__name__}: give a torch.nn.Module")
    if warmup < 0 or repeats < 1:
        raise UsageError(f"warmup={warmup}, repeats={repeats}: give at least 0 and 1")
    if _is_fake(mode, device_model):
        options = ProfileOptions(accumulate, workload=workload, batch_size=batch_size)
        return with_hook_costs(fake_profile(forward, model, optimizer, options, device_model, progress), progress)
    options = ProfileOptions(accumulate, warmup, repeats, mode, workload, batch_size)  # type: ignore[arg-type]
    device = model_device(model)
    engine = make_engine(device)
    try:
        progress("measuring the link to the swap tier")
        measured = profile_step(forward, model, optimizer, measure_link(engine, device), options, progress)
        measured = with_hook_costs(measured, progress)
        if measured.mode != "run":
            return measured  # the plain step does not fit, so copies cannot be timed beside it
        progress("timing steps with copies beside them")

        def time_plain_step() -> float:
            with training_state_kept(model, device):
                return time_step(forward, model, device)

        link = with_step_shares(measured.link, engine, device, time_plain_step)
        return replace(measured, link=link)
    finally:
        engine.close()


def _is_fake(mode: Mode, device_model: DeviceModel | None) -> bool:
    if device_model is None or mode in ("auto", "fake"):
        return mode == "fake" or device_model is not None
    raise UsageError(f"mode {mode!r} runs the step, and a device model runs nothing: give one or the other")


def profile_workload(
    workload: Workload | Callable[[], Workload],
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 3,
    mode: Mode = "auto",
    device_model: DeviceModel | None = None,
    link: Link | None = None,
    progress: Progress = silent,
) -> Profile:
    """`profile` for a workload, under its own name.

    Args:
        workload: a workload, or what builds one (a `WorkloadFactory`). In mode "fake" a factory builds it out of fake
            tensors, so that a model bigger than this machine needs no memory.
        accumulate, warmup, repeats, mode, device_model, progress: as `profile` takes them.
        link: of this device, where it was measured before; for a factory in mode "fake" alone, which runs no step
            that copies could be timed beside.

    Raises:
        ProfileError, UsageError, WorkloadError: as `profile` and the factory do.
    """
    from pooch.workloads import Workload

    if not isinstance(workload, Workload):
        if _is_fake(mode, device_model):
            from pooch.profiler import ProfileOptions

            made = fake_profile_of(workload, ProfileOptions(accumulate), device_model, progress, link)
            return with_hook_costs(made, progress)
        workload = workload()
    return profile(
        workload.forward,
        workload.model,
        workload.optimizer,
        accumulate=accumulate,
        warmup=warmup,
        repeats=repeats,
        mode=mode,
        device_model=device_model,
        workload=workload.name,
        batch_size=workload.batch_size,
        progress=progress,
    )


def measure_device_link(device: torch.device) -> Link:
    """Cost of transfers between a device and its swap tier, measured now."""
    from pooch.executor.engines import make_engine
    from pooch.executor.engines.measurement import measure_link

    engine = make_engine(device)
    try:
        return measure_link(engine, device)
    finally:
        engine.close()


def measure_devices(progress: Progress = silent) -> list[tuple[Device, Link]]:
    """Every device here, with its measured link."""
    import torch

    from pooch.profiler.profiler import describe_device

    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] + [torch.device("cpu")]
    found: list[tuple[Device, Link]] = []
    for device in devices:
        progress(f"measuring {device}")
        found.append((describe_device(device), measure_device_link(device)))
    return found

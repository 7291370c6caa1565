"""A training step -> Profile: the link measured with the engine that will swap, then the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pooch.api.fake_profiling import fake_profile, fake_profile_of
from pooch.api.hook_costs import with_hook_costs
from pooch.api.untouched import leaving_the_model_alone
from pooch.errors import ProfileError, UsageError
from pooch.ir import Device, Link, Profile
from pooch.progress import Progress, silent
from pooch.units import absolute_bytes

if TYPE_CHECKING:
    import torch

    from pooch.devices import DeviceModel
    from pooch.profiler import ProfileOptions
    from pooch.workloads import Workload

Mode = Literal["auto", "run", "offload", "fake"]


@leaving_the_model_alone
def profile(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 1,
    mode: Mode = "auto",
    memory_limit: int | str | None = None,
    device_model: DeviceModel | None = None,
    workload: str = "",
    batch_size: int = 0,
    progress: Progress = silent,
) -> Profile:
    """Measure one training step, and leave everything as it was.

    That is: parameters, gradients, buffers and the optimizer; the random states of Python, NumPy and PyTorch;
    attributes of the model's modules with what their lists, dictionaries and tensors hold; hooks, training modes and
    `requires_grad`. What `forward` changes elsewhere cannot be put back: variables that it closes over, metrics outside
    of the model, iterators over data. `forward` is called at most `warmup + 2 * repeats + 3` times on a CPU where the
    step fits, twice in mode "fake", and never more than `warmup + 2 * repeats + 12` times; the profile's notes say how
    often it was.

    A step that may not fit into what the device has left is never run plainly: its saved tensors leave the device
    while it is recorded, and where not even that fits, it is traced with fake tensors. The profile's notes say so.

    Args:
        forward: () -> loss tensor (a scalar). It is run several times, forward and backward, and should do the same
            each time: take the batch outside of it.
        model: that the plan will be applied to; not compiled, and under no plan.
        optimizer: its state counts as persistent bytes, also what it will only create at its first step. Wrappers such
            as Accelerate's and Lightning's are looked through.
        accumulate: gradients live through the step (else they appear in the backward pass and are freed after it).
        warmup: plain steps before anything is measured.
        repeats: timed plain steps, and as many with copies beside them. From three on their median counts.
        mode: "run" (plain), "offload" (saved tensors leave the device), "fake" (nothing is run: sizes and lifetimes
            from fake tensors, op times from measuring each distinct op once by itself, or from `device_model`), "auto"
            (the first of them that fits).
        memory_limit: most device bytes that the process may take while it is profiled, such as "16GiB"; None: what
            the device has left.
        device_model: of a device that need not be here (`pooch.devices.find_device`); implies "fake". The profile is
            marked as modelled.
        workload: name, for the profile's reader.
        batch_size: for the profile's reader.
        progress: called with what is being done.

    Raises:
        ProfileError: the forward raises, its loss cannot be differentiated, or the step changes from run to run.
        UsageError: the model is compiled or under a plan, an argument is of the wrong kind, or `device_model` goes with
            a mode that runs the step.
    """
    import torch

    from pooch.profiler import ProfileOptions
    from pooch.profiler.optimizers import unwrapped
    from pooch.torchtools.calls import refuse_taken
    from pooch.torchtools.device_memory import give_memory_back
    from pooch.torchtools.module_attributes import has_lazy_parameters
    from pooch.torchtools.out_of_memory import forgotten, is_out_of_memory
    from pooch.torchtools.training_state import model_device

    if not callable(forward):
        raise UsageError(
            f"forward is {type(forward).__name__}: give a function that takes nothing and returns the loss"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {type(model).__name__}: give a torch.nn.Module")
    refuse_taken(model)
    if has_lazy_parameters(model):
        raise UsageError("the model has lazy parameters, which have no shapes yet: call it once before profiling")
    if optimizer is not None:
        optimizer = unwrapped(optimizer)
    if warmup < 0 or repeats < 1:
        raise UsageError(f"warmup={warmup}, repeats={repeats}: give at least 0 and 1")
    most_bytes = None if memory_limit is None else absolute_bytes(memory_limit, "memory limit")
    real_mode: Any = "auto" if mode == "fake" else mode
    options = ProfileOptions(accumulate, warmup, repeats, real_mode, workload, batch_size, most_bytes)
    if not _is_fake(mode, device_model):
        try:
            return with_hook_costs(_measured(forward, model, optimizer, options, progress), progress)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forgotten(error)
            if mode != "auto":
                raise ProfileError(_too_large(mode, error)) from None
        progress("out of memory with saved tensors offloaded: tracing with fake tensors")
        give_memory_back(model_device(model))
    return with_hook_costs(fake_profile(forward, model, optimizer, options, device_model, progress), progress)


def _too_large(mode: str, error: BaseException) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    other = "offload, or fake" if mode == "run" else "fake"
    return f"memory ran out while the step was profiled in mode {mode!r} ({said}): profile it in mode {other}"


def _measured(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: ProfileOptions,
    progress: Progress,
) -> Profile:
    """Run the step on its device, whose link is measured before, and once more with copies beside it."""
    from pooch.executor.engines import make_engine
    from pooch.executor.engines.measurement import measure_link, with_step_shares
    from pooch.profiler import profile_step
    from pooch.profiler.timing import time_step
    from pooch.torchtools.training_state import model_device, training_state_kept

    device = model_device(model)
    engine = make_engine(device)
    try:
        progress("measuring the link to the swap tier")
        done = profile_step(forward, model, optimizer, measure_link(engine, device), options, progress)
        if not done.plain:  # the plain step may not fit, so copies cannot be timed beside it
            progress("timing copies beside compute")
            return replace(done.profile, link=measure_link(engine, device, shares=True))

        def time_plain_step(between: Callable[[], None]) -> tuple[float, float]:
            progress("timing a step with copies beside it")
            with training_state_kept(model, device):
                times = time_step(forward, model, device, between)
            return times.forward_ms, times.backward_ms

        alone = [(times.forward_ms, times.backward_ms) for times in done.plain]
        spare_bytes = _spare_bytes(done.profile, device, options)
        link = with_step_shares(done.profile.link, engine, device, alone, time_plain_step, spare_bytes)
        return replace(done.profile, link=link or measure_link(engine, device, shares=True))
    finally:
        engine.close()


def _spare_bytes(profile: Profile, device: torch.device, options: ProfileOptions) -> int:
    """Device bytes that a plain step leaves of what the process may take."""
    from pooch.torchtools.device_memory import room_bytes
    from pooch.torchtools.memory_trace import live_bytes

    room = room_bytes(device, live_bytes(device))
    limit = options.memory_limit_bytes
    return (room if limit is None else min(room, limit)) - profile.peak_bytes


def _is_fake(mode: Mode, device_model: DeviceModel | None) -> bool:
    if device_model is None or mode in ("auto", "fake"):
        return mode == "fake" or device_model is not None
    raise UsageError(f"mode {mode!r} runs the step, and a device model runs nothing: give one or the other")


def profile_workload(
    workload: Workload | Callable[[], Workload],
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 1,
    mode: Mode = "auto",
    memory_limit: int | str | None = None,
    device_model: DeviceModel | None = None,
    link: Link | None = None,
    progress: Progress = silent,
) -> Profile:
    """`profile` for a workload, under its own name.

    Args:
        workload: a workload, or what builds one (a `WorkloadFactory`). In mode "fake" a factory builds it out of fake
            tensors, so that a model bigger than this machine needs no memory.
        accumulate, warmup, repeats, mode, memory_limit, device_model, progress: as `profile` takes them.
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
        memory_limit=memory_limit,
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
        return measure_link(engine, device, shares=True)
    finally:
        engine.close()


def measure_devices(progress: Progress = silent) -> list[tuple[Device, Link]]:
    """Every device here, with its measured link."""
    import torch

    from pooch.profiler.hardware import describe_device
    from pooch.torchtools.accelerators import all_accelerators

    devices = [*all_accelerators(), torch.device("cpu")]
    found: list[tuple[Device, Link]] = []
    for device in devices:
        progress(f"measuring {device}")
        found.append((describe_device(device), measure_device_link(device)))
    return found

"""Mode "fake": profile a step without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..ground.progress import Progress
from ..ir import Link, Profile
from .device_links import measure_device_link
from .modelled_ranks import RanksOptions
from .split_profiling import with_fake_split

if TYPE_CHECKING:
    import torch

    from ..devices import DeviceModel
    from ..profiler import ProfileOptions
    from ..profiler.fake.profiler import FakeSetting
    from ..workloads import Workload


def fake_profile(
    workload: Workload,
    options: ProfileOptions,
    device_model: DeviceModel | None,
    ranks: RanksOptions | None,
    progress: Progress,
) -> Profile:
    """Profile a workload that exists; see `pooch.profile`."""
    from ..torchtools.training_state import model_device

    setting = _setting(model_device(workload.model), device_model, None, progress)
    profile = _profiled(workload, setting, options, progress, slices=ranks is None)
    return profile if ranks is None else ranks.one_of(profile, workload, device_model)


def fake_profile_of(
    builder: Callable[[], Workload],
    options: ProfileOptions,
    device_model: DeviceModel | None,
    link: Link | None,
    ranks: RanksOptions | None,
    progress: Progress,
) -> Profile:
    """Build a workload from fake tensors and profile it; see `profile_workload`."""
    import torch

    from ..profiler.fake.world import FakeWorld
    from ..torchtools.training_state import model_device

    builder, notes = _runnable(builder)
    progress("building with fake tensors")
    world = FakeWorld()
    with torch.device("cpu"):
        workload = world.build(builder)
    setting = replace(_setting(model_device(workload.model), device_model, link, progress), world=world)
    named = replace(options, workload=workload.name, batch_size=workload.batch_size)
    profile = _profiled(workload, setting, named, progress, slices=ranks is None)
    profile = replace(profile, notes=(*notes, *profile.notes))
    if ranks is None:
        return profile
    with world.entered():
        return ranks.one_of(profile, workload, device_model)


def _profiled(
    workload: Workload, setting: FakeSetting, options: ProfileOptions, progress: Progress, *, slices: bool
) -> Profile:
    """Profile the step, and if `slices`, once more with losses in slices, where it has such."""
    from ..profiler.fake.profiler import profile_fake_step

    def profiled(forward: Callable[[], torch.Tensor]) -> Profile:
        return profile_fake_step(forward, workload.model, workload.optimizer, setting, options, progress)

    profile = profiled(workload.forward)
    return with_fake_split(profile, workload, profiled, progress) if slices else profile


def _runnable(builder: Any) -> tuple[Any, tuple[str, ...]]:
    """The builder, for the CPU if this PyTorch has no support for its device, and a note that says so.

    PyTorch without CUDA cannot make CUDA tensors, not even fake ones.
    """
    import torch

    from ..torchtools.accelerators import is_available

    asked = getattr(builder, "device", None)
    if asked is None or is_available(torch.device(asked).type):
        return builder, ()
    note = "ops are those of the CPU: this PyTorch cannot make tensors for a GPU, where some layers run other ops"
    return replace(builder, device="cpu"), (note,)


def _setting(
    device: torch.device, device_model: DeviceModel | None, link: Link | None, progress: Progress
) -> FakeSetting:
    """Device, link and costs of the profile: those of the device model, or else measured here."""
    from ..profiler.fake.measured import MeasuredCosts
    from ..profiler.fake.modelled import ModelledCosts
    from ..profiler.fake.profiler import FakeSetting
    from ..profiler.fake.workspaces import configured_bytes, separate_bytes
    from ..profiler.hardware import describe_device
    from ..torchtools.cuda_only import blas_workspace_bytes, lt_workspace_bytes

    here = describe_device(device)
    if device_model is not None:
        software = here.software | {"ops of": here.kind}
        workspace_bytes = device_model.blas_workspace_bytes and configured_bytes(device_model.blas_workspace_bytes)
        modelled, costs = device_model.as_device(software), ModelledCosts(device_model)
        lt_bytes = separate_bytes() if workspace_bytes else 0
        return FakeSetting(modelled, device_model.as_link(), costs, None, workspace_bytes, lt_bytes)
    if link is None:
        progress("measuring the link to the swap tier")
        link = measure_device_link(device)
    workspace_bytes, lt_bytes = blas_workspace_bytes(device), lt_workspace_bytes(device)
    return FakeSetting(here, link, MeasuredCosts(device), None, workspace_bytes, lt_bytes)

"""Mode "fake": a step -> Profile without running it, for live objects or for a workload that is built fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pooch.ir import Link, Profile
from pooch.progress import Progress

if TYPE_CHECKING:
    import torch

    from pooch.devices import DeviceModel
    from pooch.profiler import ProfileOptions
    from pooch.profiler.fake import FakeSetting
    from pooch.workloads import Workload


def fake_profile(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: ProfileOptions,
    device_model: DeviceModel | None,
    progress: Progress,
) -> Profile:
    """Profile live objects; see `pooch.profile`."""
    from pooch.profiler.fake import profile_fake_step
    from pooch.torchtools.training_state import model_device

    setting = _priced(model_device(model), device_model, progress)
    return profile_fake_step(forward, model, optimizer, setting, options, progress)


def fake_profile_of(
    builder: Callable[[], Workload],
    options: ProfileOptions,
    device_model: DeviceModel | None,
    progress: Progress,
    link: Link | None = None,
) -> Profile:
    """Build a workload without memory, and profile it; see `profile_workload`."""
    import torch

    from pooch.profiler.fake import FakeWorld, profile_fake_step
    from pooch.torchtools.training_state import model_device

    builder, instead = _runnable(builder)
    progress("building with fake tensors")
    world = FakeWorld()
    with torch.device("cpu"):
        workload = world.build(builder)
    setting = replace(_priced(model_device(workload.model), device_model, progress, link), world=world)
    named = replace(options, workload=workload.name, batch_size=workload.batch_size)
    profile = profile_fake_step(workload.forward, workload.model, workload.optimizer, setting, named, progress)
    return replace(profile, notes=(*instead, *profile.notes))


def _runnable(builder: Any) -> tuple[Any, tuple[str, ...]]:
    """A PyTorch without CUDA makes no CUDA tensors, not even fake ones: the CPU's ops stand in for the card's."""
    import torch

    from pooch.torchtools.accelerators import is_available

    asked = getattr(builder, "device", None)
    if asked is None or is_available(torch.device(asked).type):
        return builder, ()
    note = "ops are those of the CPU: this PyTorch cannot make tensors for a GPU, where some layers run other ops"
    return replace(builder, device="cpu"), (note,)


def _priced(
    device: torch.device, device_model: DeviceModel | None, progress: Progress, link: Link | None = None
) -> FakeSetting:
    """What the profile is taken for: this device, measured, or one that is modelled."""
    from pooch.api.profiling import measure_device_link
    from pooch.profiler.fake import FakeSetting, MeasuredCosts, ModelledCosts
    from pooch.profiler.fake.workspaces import configured_bytes
    from pooch.profiler.hardware import describe_device
    from pooch.torchtools.cuda_only import blas_workspace_bytes

    here = describe_device(device)
    if device_model is not None:
        software = here.software | {"ops of": here.kind}
        workspace_bytes = device_model.blas_workspace_bytes and configured_bytes(device_model.blas_workspace_bytes)
        modelled, costs = device_model.as_device(software), ModelledCosts(device_model)
        return FakeSetting(modelled, device_model.as_link(), costs, blas_workspace_bytes=workspace_bytes)
    if link is None:
        progress("measuring the link to the swap tier")
        link = measure_device_link(device)
    return FakeSetting(here, link, MeasuredCosts(device), blas_workspace_bytes=blas_workspace_bytes(device))

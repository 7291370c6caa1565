"""Profiles one step with fake tensors: the passes in order, and what each of them contributes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...ground.errors import ProfileError
from ...ground.progress import Progress, silent
from ...ir import Device, Link, Profile
from ...torchtools import cuda_only
from ...torchtools.accelerators import granule_bytes
from ...torchtools.memory_trace import live_bytes
from ...torchtools.tensors import storage_bytes
from ...torchtools.training_state import model_device, random_state_kept
from ..assembly import assembled_profile
from ..outliving import persistent_tensors
from ..persistent import foreseen_state
from ..session import FIRST_DIFFERS, ProfileOptions, check_same_forward, is_same_forward, user_errors_named
from ..slots import StepAssembly
from ..step import Forward
from .costs import OpCosts
from .step import record_fake_releases, record_fake_step
from .workspaces import workspaces
from .world import FakeWorld, data_dependence


@dataclass(frozen=True)
class FakeSetting:
    """What a fake profile is made for.

    Attributes:
        device: the device that is named in the profile; it is modelled if the costs are.
        link: cost of transfers.
        costs: costs of operators.
        world: the world in which the model was built, or None for a live model, whose tensors are temporarily replaced
            by fake ones.
        blas_workspace_bytes: size of the workspace that cuBLAS keeps for each thread that calls it.
        lt_workspace_bytes: size of the one that cuBLASLt keeps beside it, for each thread that calls it.
    """

    device: Device
    link: Link
    costs: OpCosts
    world: FakeWorld | None = None
    blas_workspace_bytes: int = 0
    lt_workspace_bytes: int = 0


def profile_fake_step(
    forward: Forward,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    setting: FakeSetting,
    options: ProfileOptions,
    progress: Progress = silent,
) -> Profile:
    """Profiles one training step without running it.

    Args:
        forward: () -> loss tensor.
        model: the model that the plan will be applied to. A live model is left unchanged.
        optimizer: its state counts as persistent bytes, including state that only its first step will create.
        setting: what the profile is made for.
        options: how to profile.
        progress: called with a description of each pass.

    Raises:
        ProfileError: if the forward pass raises or reads the contents of tensors, or its loss cannot be differentiated.
    """
    return _FakeProfiling(forward, model, optimizer, setting, options, progress).profile()


@dataclass
class _FakeProfiling:
    """One session: what every pass needs."""

    forward: Forward
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    setting: FakeSetting
    options: ProfileOptions
    progress: Progress

    def profile(self) -> Profile:
        """Runs all passes and builds the profile."""
        setting, built, costs = self.setting, self.setting.world, self.setting.costs
        world = built or FakeWorld()
        granule = granule_bytes(setting.device.kind)
        gc.collect()  # garbage is not persistent
        cuda_only.forget_blas_workspaces()  # they are counted by what the step calls
        # Gradients are not persistent: the step creates its own.
        live = 0 if built else live_bytes(model_device(self.model)) - self._gradient_bytes()
        state = foreseen_state(self.optimizer, self.model)
        with world.inhabited_by(self.model):
            before = world.made_bytes()
            with self._pass(world, "forward pass with fake tensors, autograd keeping nothing"):
                released = record_fake_releases(self.forward, self.model, world, costs)
            made_bytes = 0 if built else world.made_bytes() - before
            with self._pass(world, "step with fake tensors"):
                live += world.live_bytes() if built else self._gradient_bytes()
                step = record_fake_step(self.forward, self.model, world, costs, granule)
            if not (is_same := is_same_forward(released, step.record.recorder)):
                with self._pass(world, "forward pass with fake tensors again, as the first one ran other ops"):
                    released = record_fake_releases(self.forward, self.model, world, costs)
                check_same_forward(released, step.record.recorder)
                live += made_bytes
            for value, other in zip(step.record.recorder.values, released.values, strict=True):
                value.released_after = other.released_after
            # This must happen within the world: storages that end with it were not released by the step.
            assembly = StepAssembly(step.record)
            taken = workspaces(assembly, setting.blas_workspace_bytes, setting.lt_workspace_bytes)
            backward = assembly.spans[assembly.forward_ops : -1]
            times_ms = [op.time_ms for op in assembly.recorder.ops]
            times_ms += [*(step.backward_times_ms[span.start_ns] for span in backward), 0.0]
            return assembled_profile(
                assembly,
                self.model,
                self.options,
                times_ms,
                live + state.to_come_bytes + taken.total_bytes,
                mode="fake",
                device=setting.device,
                link=setting.link,
                step_ms=sum(times_ms),
                time_factor=1.0,
                reserved_bytes=0,
                notes=(*state.notes, *costs.notes(), *taken.notes(), *([] if is_same else [FIRST_DIFFERS])),
                sizes="rounded" if granule > 1 else "requested",
                persistent=persistent_tensors(assembly, state.bytes_of, granule),
            )

    @contextmanager
    def _pass(self, world: FakeWorld, text: str) -> Iterator[None]:
        """Context manager for one pass, each time from the same state; errors of the user's model become one line."""
        self.progress(text)
        buffers = [(module, dict(module._buffers)) for module in self.model.modules()]
        for parameter in self.model.parameters():
            parameter.grad = None
            if self.options.accumulate and parameter.requires_grad:
                with world.entered():
                    parameter.grad = torch.zeros_like(parameter)
        try:
            with user_errors_named(), _data_dependence_named(), random_state_kept(torch.device("cpu")):
                yield
        finally:
            for module, names in buffers:
                module._buffers.update(names)
            for parameter in self.model.parameters():
                parameter.grad = None

    def _gradient_bytes(self) -> int:
        """Returns the bytes of the gradients that the model's parameters hold now."""
        return storage_bytes([p.grad for p in self.model.parameters() if p.grad is not None])


@contextmanager
def _data_dependence_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = data_dependence(error)
        if message is None:
            raise
        raise ProfileError(message) from error

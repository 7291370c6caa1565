"""A profile from fake tensors: the passes, in order, and what each contributes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pooch.errors import ProfileError
from pooch.ir import Device, Link, Profile
from pooch.profiler.assembly import StepAssembly, assemble_ops, assemble_values
from pooch.profiler.fake.costs import OpCosts
from pooch.profiler.fake.step import FakeStep, record_fake_releases, record_fake_step
from pooch.profiler.fake.workspaces import blas_workspaces, told
from pooch.profiler.fake.world import FakeWorld, data_dependence
from pooch.profiler.persistent import foreseen_state_bytes
from pooch.profiler.profiler import ProfileOptions, check_same_forward, user_errors_named
from pooch.progress import Progress
from pooch.torchtools import cuda_only
from pooch.torchtools.accelerators import granule_bytes
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.signature import model_signature
from pooch.torchtools.tensors import storage_bytes
from pooch.torchtools.training_state import model_device, random_state_kept

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class FakeSetting:
    """What a fake profile is taken for.

    Attributes:
        device: named in the profile; modelled where the costs are.
        link: cost of transfers.
        costs: of operators.
        world: in which the model was built; None for a live model, which is exchanged for fakes meanwhile.
        blas_workspace_bytes: what the library of matrix products takes for itself in each thread that calls it.
    """

    device: Device
    link: Link
    costs: OpCosts
    world: FakeWorld | None = None
    blas_workspace_bytes: int = 0


def profile_fake_step(
    forward: Forward,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    setting: FakeSetting,
    options: ProfileOptions,
    progress: Progress = lambda text: None,
) -> Profile:
    """Profile one training step without running it.

    Args:
        forward: () -> loss tensor.
        model: whose `forward` the plan will be applied to. A live one is left as it was.
        optimizer: its state counts as persistent bytes, also what it will only create at its first step.
        progress: called with what is being done.

    Raises:
        ProfileError: the forward raises, reads contents of tensors, or its loss cannot be differentiated.
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
        """All passes, then the assembly."""
        built, costs = self.setting.world, self.setting.costs
        world = built or FakeWorld()
        gc.collect()  # garbage is not persistent
        cuda_only.forget_blas_workspaces()  # they are counted by what the step calls
        live = 0 if built else live_bytes(model_device(self.model)) - self._gradient_bytes()  # the step makes its own
        signature = model_signature(self.model)
        with world.inhabited_by(self.model):
            with self._pass(world, "forward pass with fake tensors, autograd keeping nothing"):
                released = record_fake_releases(self.forward, self.model, world, costs)
            with self._pass(world, "step with fake tensors"):
                live += world.live_bytes() if built else self._gradient_bytes()
                step = record_fake_step(self.forward, self.model, world, costs, self._granularity_bytes)
            state, notes = foreseen_state_bytes(self.optimizer, self.model)
            assembly = StepAssembly(step.record, released)
            check_same_forward(released, [assembly])
            # Within the world still: what ends with it was not let go of by the step.
            each_bytes, count = self.setting.blas_workspace_bytes, blas_workspaces(assembly)
            notes = [*notes, *costs.notes(), *told(count, each_bytes)]
            return self._make(assembly, step, live + state + count * each_bytes, signature, tuple(notes))

    @contextmanager
    def _pass(self, world: FakeWorld, text: str) -> Iterator[None]:
        """One pass, from the same state each time; errors of the user's model become one line."""
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
        """Bytes of the gradients that the model's parameters hold now."""
        return storage_bytes([p.grad for p in self.model.parameters() if p.grad is not None])

    @property
    def _granularity_bytes(self) -> int:
        return granule_bytes(self.setting.device.kind)

    def _make(
        self, assembly: StepAssembly, step: FakeStep, persistent: int, signature: str, notes: tuple[str, ...]
    ) -> Profile:
        facts = assemble_values(assembly)
        points = facts.in_core_points + persistent
        forward_ms = [op.time_ms for op in assembly.recorder.ops]
        backward_ms = [step.backward_times_ms[span.start_ns] for span in assembly.spans[assembly.forward_ops : -1]]
        times = [*forward_ms, *backward_ms, 0.0]
        begin, end = assembly.recorder.model_extent()
        return Profile(
            workload=self.options.workload or type(self.model).__name__,
            mode="fake",
            device=self.setting.device,
            link=self.setting.link,
            ops=assemble_ops(assembly, points.tolist(), times, facts.hooked_bytes),
            values=facts.values,
            anchors=facts.anchors,
            forward_ops=assembly.forward_ops,
            model_begin=begin,
            model_end=end,
            persistent_bytes=persistent,
            step_ms=sum(times),
            peak_bytes=int(points.max()),
            reserved_bytes=0,
            time_factor=1.0,
            model_signature=signature,
            batch_size=self.options.batch_size,
            notes=notes,
            sizes="rounded" if self._granularity_bytes > 1 else "requested",
        )


@contextmanager
def _data_dependence_named() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        told = data_dependence(error)
        if told is None:
            raise
        raise ProfileError(told) from error

"""Profiling one step: the passes, in order, and what each contributes."""

from __future__ import annotations

import gc
import os
import platform
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import psutil
import torch

from pooch.errors import PoochError, ProfileError
from pooch.ir import Device, Link, Profile
from pooch.profiler.assembly import StepAssembly, StepFacts, assemble_ops, assemble_values
from pooch.profiler.cuda_times import cuda_slot_times_ms
from pooch.profiler.offload import OffloadStore
from pooch.profiler.persistent import foreseen_state_bytes
from pooch.profiler.release import record_releases
from pooch.profiler.step import StepRecord, record_step
from pooch.profiler.timing import median_times_ms, slot_times_ms, time_step
from pooch.progress import Progress
from pooch.torchtools.memory_trace import live_bytes
from pooch.torchtools.out_of_memory import is_out_of_memory
from pooch.torchtools.signature import model_signature
from pooch.torchtools.tensors import has_plain_storage, storage_key
from pooch.torchtools.training_state import model_device, training_state_kept

CUDA_GRANULE_BYTES = 512  # the caching allocator hands out multiples of this
Mode = Literal["run", "offload", "auto"]
Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to profile.

    Attributes:
        accumulate: gradients live through the step (else they appear in the backward pass).
        warmup, repeats: plain steps before, and timed steps of which the median counts.
        mode: "run" (plain), "offload" (saved tensors leave the device), "auto" (run, offload after an out-of-memory).
        workload, batch_size: for the profile's reader.
    """

    accumulate: bool = False
    warmup: int = 1
    repeats: int = 3
    mode: Mode = "auto"
    workload: str = ""
    batch_size: int = 0


def profile_step(
    forward: Forward,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    link: Link,
    options: ProfileOptions,
    progress: Progress = lambda text: None,
) -> Profile:
    """Profile one training step; parameters, gradients, buffers, optimizer and random state stay as they were.

    Args:
        forward: () -> loss tensor.
        model: whose `forward` the plan will be applied to.
        optimizer: its state counts as persistent bytes, also what it will only create at its first step.
        link: cost of transfers, measured beforehand.
        progress: called with what is being done.

    Raises:
        ProfileError: the forward raises, the loss cannot be differentiated, or the step changes from run to run.
    """
    if options.mode not in ("run", "offload", "auto"):
        raise ProfileError(f"unknown profiling mode {options.mode!r}: choose run, offload or auto")
    device = model_device(model)
    session = _Profiling(forward, model, optimizer, device, options, progress)
    if options.mode == "offload":
        return session.profile(link, "offload")
    try:
        return session.profile(link, "run")
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        if options.mode != "auto" or not is_out_of_memory(error):
            raise
    progress("out of memory in-core: profiling with saved tensors offloaded")
    return session.profile(link, "offload")


@contextmanager
def user_errors_named() -> Iterator[None]:
    """Errors of the user's model become one line; errors of ours and out-of-memory pass."""
    try:
        yield
    except PoochError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise ProfileError(f"the step raised {type(error).__name__}: {first_line}") from error


@dataclass
class _Profiling:
    """One profiling session: what every pass needs."""

    forward: Forward
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    device: torch.device
    options: ProfileOptions
    progress: Progress

    def _pass(self, text: str, run: Callable[[], Any]) -> Any:
        """One pass over the step, from the same training state each time."""
        self.progress(text)
        with user_errors_named(), training_state_kept(self.model, self.device):
            if self.options.accumulate:
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            return run()

    def profile(self, link: Link, mode: Literal["run", "offload"]) -> Profile:
        """All passes, then the assembly."""
        # Warm-up comes first: wrappers such as DDP arrange their buckets in the first steps that they see.
        plain_ms = self._time_plain_steps() if mode == "run" else []
        released = self._pass(
            "forward pass without autograd's memory", lambda: record_releases(self.forward, self.model)
        )
        persistent, notes = self._persistent_bytes()
        if self.device.type == "cuda":  # the reserved peak is to be that of the recorded steps alone
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        records = [self._record(mode, number) for number in range(max(1, min(2, self.options.repeats)))]
        assemblies = [StepAssembly(record, released) for record in records]
        check_same_forward(released, assemblies)
        facts = assemble_values(assemblies[0])
        times = self._op_times(assemblies, notes)
        step_ms = statistics.median(plain_ms) if plain_ms else sum(times)
        factor = step_ms / sum(times)
        points = facts.in_core_points + persistent
        return self._make(
            link, mode, assemblies[0], facts, points, [t * factor for t in times], persistent, step_ms, factor, notes
        )

    def _time_plain_steps(self) -> list[float]:
        for number in range(self.options.warmup):
            self._pass(f"warm-up {number + 1}", lambda: time_step(self.forward, self.model, self.device))
        return [
            self._pass(f"timed step {number + 1}", lambda: time_step(self.forward, self.model, self.device))
            for number in range(max(1, self.options.repeats))
        ]

    def _persistent_bytes(self) -> tuple[int, list[str]]:
        gc.collect()  # as before every recorded step: garbage is not persistent
        aside = self._gradient_bytes()  # put aside for the while: the step makes its own
        live = self._pass("counting persistent bytes", lambda: live_bytes(self.device)) - aside
        to_come, notes = foreseen_state_bytes(self.optimizer, self.model)
        return live + to_come, notes

    def _gradient_bytes(self) -> int:
        """Device bytes of the gradients that the user's model holds now."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and p.grad.device == self.device]
        sizes = {storage_key(g): g.untyped_storage().nbytes() for g in gradients if has_plain_storage(g)}
        granule = CUDA_GRANULE_BYTES if self.device.type == "cuda" else 1
        return sum(-(-size // granule) * granule for size in sizes.values())

    def _record(self, mode: str, number: int) -> StepRecord:
        store = OffloadStore() if mode == "offload" else None
        record: StepRecord = self._pass(
            f"recorded step {number + 1}", lambda: record_step(self.forward, self.model, self.device, store)
        )
        return record

    def _op_times(self, assemblies: list[StepAssembly], notes: list[str]) -> list[float]:
        if self.device.type == "cuda":
            times = self._pass("timing kernels", lambda: cuda_slot_times_ms(self.forward, self.model, assemblies[0]))
            if times is not None:
                return list(times)
            notes.append("kernels could not be timed on the device: op times are those of launching them")
        return median_times_ms([slot_times_ms(assembly) for assembly in assemblies])

    def _make(
        self,
        link: Link,
        mode: Literal["run", "offload"],
        assembly: StepAssembly,
        facts: StepFacts,
        points: numpy.ndarray,
        times: list[float],
        persistent: int,
        step_ms: float,
        factor: float,
        notes: list[str],
    ) -> Profile:
        recorder = assembly.recorder
        begin = max(0, recorder.model_begin)
        return Profile(
            workload=self.options.workload or type(self.model).__name__,
            mode=mode,
            device=describe_device(self.device),
            link=link,
            ops=assemble_ops(assembly, points.tolist(), times),
            values=facts.values,
            anchors=facts.anchors,
            forward_ops=assembly.forward_ops,
            model_begin=begin,
            model_end=recorder.model_end if recorder.model_end >= 0 else assembly.forward_ops,
            persistent_bytes=persistent,
            step_ms=step_ms,
            peak_bytes=int(points.max()),
            reserved_bytes=torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0,
            time_factor=factor,
            model_signature=model_signature(self.model),
            batch_size=self.options.batch_size,
            notes=tuple(notes),
        )


def check_same_forward(released: Any, assemblies: list[StepAssembly]) -> None:
    """Refuse a step whose forward pass is not the same each time.

    Raises:
        ProfileError: so it is.
    """
    expected = [op.fingerprint for op in released.ops]
    for assembly in assemblies:
        actual = [op.fingerprint for op in assembly.recorder.ops]
        if actual != expected or len(assembly.recorder.values) != len(released.values):
            where = next(
                (i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), len(expected)
            )
            raise ProfileError(
                f"the forward pass changes from run to run (first at op {where}): profile a step that does the same "
                f"each time"
            )


def describe_device(device: torch.device) -> Device:
    """Name, memory and software versions of a device."""
    software = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        software["cuda"] = str(torch.version.cuda)
        return Device("cuda", properties.name, properties.total_memory, False, software)
    software["threads"] = str(torch.get_num_threads())
    return Device("cpu", _processor_name(), psutil.virtual_memory().total, False, software)


def _processor_name() -> str:
    try:
        with Path("/proc/cpuinfo").open() as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = ""
    return f"{name or platform.processor() or platform.machine()} ({os.cpu_count()} cores)"

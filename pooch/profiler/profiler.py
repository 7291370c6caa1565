"""Profiling one step: the passes, in order, and what each contributes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pooch.errors import PoochError, ProfileError
from pooch.ir import Link, Profile
from pooch.process_limits import is_limited
from pooch.profiler.assembly import StepAssembly, assemble_ops, assemble_values
from pooch.profiler.device_times import device_slot_times_ms
from pooch.profiler.fitting import expected_peak
from pooch.profiler.hardware import describe_device
from pooch.profiler.host_times import host_times_ms
from pooch.profiler.offload import OffloadStore, saved_tensors_offloaded
from pooch.profiler.outliers import are_worth_a_run, outliers, sibling_kinds
from pooch.profiler.persistent import foreseen_state_bytes
from pooch.profiler.recorder import ForwardRecorder
from pooch.profiler.release import record_releases
from pooch.profiler.step import StepRecord, record_step
from pooch.profiler.timing import StepTimes, shortest_ms, slot_times_ms, time_step, typical
from pooch.progress import Progress
from pooch.torchtools import accelerators
from pooch.torchtools.device_memory import give_memory_back, return_large_blocks, room_bytes
from pooch.torchtools.memory_trace import earlier_objects_exempt, live_bytes
from pooch.torchtools.out_of_memory import forgotten, is_out_of_memory
from pooch.torchtools.requested_sizes import allocated_as_requested
from pooch.torchtools.signature import model_signature
from pooch.torchtools.tensors import has_plain_storage, storage_key
from pooch.torchtools.training_state import model_device, training_state_kept
from pooch.units import format_bytes

IN_CORE_MODELLED = "the in-core time is modelled: the sum of op times"
Mode = Literal["run", "offload", "auto"]
Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to profile.

    Attributes:
        accumulate: gradients live through the step (else they appear in the backward pass).
        warmup: plain steps before anything is measured.
        repeats: timed plain steps.
        mode: "run" (plain), "offload" (saved tensors leave the device), "auto" (plain where that is sure to fit).
        workload: name, for the profile's reader.
        batch_size: for the profile's reader.
        memory_limit_bytes: most device bytes that the process may take; None: what the device has left.
    """

    accumulate: bool = False
    warmup: int = 1
    repeats: int = 1
    mode: Mode = "auto"
    workload: str = ""
    batch_size: int = 0
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A profile, and the plain steps that were timed for it; none where the step may not fit."""

    profile: Profile
    plain: tuple[StepTimes, ...]


def profile_step(
    forward: Forward,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    link: Link,
    options: ProfileOptions,
    progress: Progress = lambda text: None,
) -> ProfiledStep:
    """Profile one training step; parameters, gradients, buffers, optimizer and random state stay as they were.

    In mode "auto" a forward pass in which autograd keeps nothing tells first what a plain step would need. If that may
    be more than the device has left, no plain step is run: saved tensors leave the device while the step is recorded.

    Args:
        forward: () -> loss tensor.
        model: that the plan will be applied to.
        optimizer: its state counts as persistent bytes, also what it will only create at its first step.
        link: cost of transfers, measured beforehand.
        options: how to profile.
        progress: called with what is being done.

    Raises:
        ProfileError: the forward raises, the loss cannot be differentiated, or the step changes from run to run.
        torch.OutOfMemoryError, RuntimeError, MemoryError: not even a step with its saved tensors away fits.
    """
    if options.mode not in ("run", "offload", "auto"):
        raise ProfileError(f"unknown profiling mode {options.mode!r}: choose run, offload or auto")
    return _Profiling(forward, model, optimizer, model_device(model), options, link, progress).profile()


@dataclass(frozen=True, slots=True)
class Persistent:
    """Bytes that live before the step: what does now, and the optimizer's state that its first step will create."""

    live_bytes: int
    to_come_bytes: int
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Both."""
        return self.live_bytes + self.to_come_bytes


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step on the axis of slots, and the time of each slot in ms."""

    assembly: StepAssembly
    times_ms: tuple[float, ...]
    notes: tuple[str, ...]


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
    link: Link
    progress: Progress

    def profile(self) -> ProfiledStep:
        """Plainly, or with saved tensors away from the device."""
        if is_limited():
            return_large_blocks()
        if _has_other_ranks():
            self._arrange_wrappers()
        released = self._pass(
            "forward pass without autograd's memory", lambda: record_releases(self.forward, self.model)
        )
        persistent = self._persistent_bytes()
        with earlier_objects_exempt():
            return self._profile(released, persistent)

    def _profile(self, released: ForwardRecorder, persistent: Persistent) -> ProfiledStep:
        if self._runs_plainly(released, persistent):
            try:
                return self._profile_plainly(released, persistent)
            except (RuntimeError, MemoryError) as error:
                if self.options.mode == "run" or not is_out_of_memory(error):
                    raise
                forgotten(error)
            give_memory_back(self.device)
        return self._profile_offloaded(released, persistent)

    def _arrange_wrappers(self) -> None:
        """Wrappers such as DDP arrange their buckets in the first whole step that they see."""
        self._first_step_offloaded("first step of a wrapped model")

    def _first_step_offloaded(self, text: str) -> None:
        with saved_tensors_offloaded(self.model):
            self._pass(text, lambda: time_step(self.forward, self.model, self.device))

    def _with_workspaces(self, persistent: Persistent) -> Persistent:
        """What lives before every step but the first: cuBLAS takes a workspace in each thread that first calls it, and
        keeps it. The backward pass runs in a thread of its own.
        """
        return self._persistent_bytes() if accelerators.has_streams(self.device) else persistent

    def _runs_plainly(self, released: ForwardRecorder, persistent: Persistent) -> bool:
        if self.options.mode != "auto":
            return self.options.mode == "run"
        expected = expected_peak(released, self.model, persistent.live_bytes, self.options.accumulate)
        return expected.most_bytes <= self._room_bytes(persistent)

    def _room_bytes(self, persistent: Persistent) -> int:
        """Device bytes that the process's tensors may take during a step."""
        room = room_bytes(self.device, persistent.live_bytes)
        limit_bytes = self.options.memory_limit_bytes
        return room if limit_bytes is None else min(room, limit_bytes)

    def _profile_plainly(self, released: ForwardRecorder, persistent: Persistent) -> ProfiledStep:
        has_streams = accelerators.has_streams(self.device)
        for number in range(max(self.options.warmup, int(has_streams))):
            self._time_plain_step(f"warm-up {number + 1}")
        persistent = self._with_workspaces(persistent)
        recorded = self._recorded("run", released)
        plain = tuple(self._time_plain_step(f"timed step {n + 1}") for n in range(max(1, self.options.repeats)))
        profile = self._make("run", recorded, persistent, typical(plain).step_ms)
        return ProfiledStep(self._with_host_times(profile, recorded.assembly, typical(plain)), plain)

    def _with_host_times(self, profile: Profile, assembly: StepAssembly, plain: StepTimes) -> Profile:
        if not accelerators.has_streams(self.device):
            return profile
        times_ms = [op.time_ms for op in profile.ops]
        host_ms = host_times_ms(slot_times_ms(assembly), assembly.forward_ops, plain, times_ms)
        return replace(profile, ops=tuple(replace(op, host_ms=ms) for op, ms in zip(profile.ops, host_ms, strict=True)))

    def _profile_offloaded(self, released: ForwardRecorder, persistent: Persistent) -> ProfiledStep:
        if accelerators.has_streams(self.device):
            self._first_step_offloaded("first step with saved tensors away")
        persistent = self._with_workspaces(persistent)
        recorded = self._recorded("offload", released)
        step_ms = sum(recorded.times_ms)  # the plain step is not run, so nothing says how far recording slows ops down
        profile = self._make("offload", recorded, persistent, step_ms)
        left = format_bytes(max(0, self._room_bytes(persistent)))
        asked = "saved tensors were kept off the device"
        if self.options.mode == "auto":
            asked = f"the step may not fit in-core ({format_bytes(profile.peak_bytes)} in {left}), so {asked}"
        return ProfiledStep(replace(profile, notes=(*profile.notes, f"{asked}; {IN_CORE_MODELLED}")), ())

    def _time_plain_step(self, text: str) -> StepTimes:
        times: StepTimes = self._pass(text, lambda: time_step(self.forward, self.model, self.device))
        return times

    def _recorded(self, mode: str, released: ForwardRecorder) -> RecordedStep:
        """The step with the time of each op; recorded once more where some ops were disturbed."""
        if accelerators.has_streams(self.device):  # the reserved peak is to be that of the recorded steps alone
            accelerators.empty_cache(self.device)
            accelerators.reset_peaks(self.device)
        assembly = self._record(mode, "recorded step", released)
        times_ms, notes = self._op_times(mode, assembly)
        disturbed = {} if _has_other_ranks() else outliers(sibling_kinds(assembly), times_ms)
        if are_worth_a_run(disturbed, times_ms):
            again = self._record(mode, f"recorded step again, for {len(disturbed)} op times out of line", released)
            times_ms = shortest_ms(times_ms, self._op_times(mode, again)[0])
        return RecordedStep(assembly, tuple(times_ms), notes)

    def _record(self, mode: str, text: str, released: ForwardRecorder) -> StepAssembly:
        store = OffloadStore() if mode == "offload" else None
        record: StepRecord = self._pass(text, lambda: record_step(self.forward, self.model, self.device, store))
        assembly = StepAssembly(record, released)
        check_same_forward(released, [assembly])
        return assembly

    def _op_times(self, mode: str, assembly: StepAssembly) -> tuple[list[float], tuple[str, ...]]:
        """Time of each slot in ms, and what a reader should know of it."""
        if accelerators.has_streams(self.device):
            saving = saved_tensors_offloaded(self.model) if mode == "offload" else nullcontext()
            with saving:
                times = self._pass("timing kernels", lambda: device_slot_times_ms(self.forward, self.model, assembly))
            if times is not None:
                return list(times), ()
            told = "kernels could not be timed on the device: op times are those of launching them"
            return slot_times_ms(assembly), (told,)
        return slot_times_ms(assembly), ()

    def _pass(self, text: str, run: Callable[[], Any]) -> Any:
        """One pass over the step, from the same training state each time."""
        self.progress(text)
        with user_errors_named(), training_state_kept(self.model, self.device):
            if self.options.accumulate:
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            return run()

    def _persistent_bytes(self) -> Persistent:
        gc.collect()  # as before every recorded step: garbage is not persistent
        aside = self._gradient_bytes()  # put aside for the while: the step makes its own
        live = self._pass("counting persistent bytes", self._live_bytes) - aside
        to_come, notes = foreseen_state_bytes(self.optimizer, self.model)
        return Persistent(live, to_come, tuple(notes))

    def _live_bytes(self) -> int:
        has_streams = accelerators.has_streams(self.device)
        return allocated_as_requested(self.device) if has_streams else live_bytes(self.device)

    def _gradient_bytes(self) -> int:
        """Device bytes of the gradients that the user's model holds now."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None and p.grad.device == self.device]
        sizes = {storage_key(g): g.untyped_storage().nbytes() for g in gradients if has_plain_storage(g)}
        granule = accelerators.granule_bytes(self.device.type)
        return sum(-(-size // granule) * granule for size in sizes.values())

    def _reserved_bytes(self) -> int:
        return accelerators.peak_reserved_bytes(self.device) if accelerators.has_streams(self.device) else 0

    def _make(
        self,
        mode: Literal["run", "offload"],
        recorded: RecordedStep,
        persistent: Persistent,
        step_ms: float,
    ) -> Profile:
        assembly = recorded.assembly
        facts = assemble_values(assembly)
        points = facts.in_core_points + persistent.total_bytes
        factor = step_ms / sum(recorded.times_ms)
        times_ms = [time_ms * factor for time_ms in recorded.times_ms]
        begin, end = assembly.recorder.model_extent()
        return Profile(
            workload=self.options.workload or type(self.model).__name__,
            mode=mode,
            device=describe_device(self.device),
            link=self.link,
            ops=assemble_ops(assembly, points.tolist(), times_ms, facts.hooked_bytes),
            values=facts.values,
            anchors=facts.anchors,
            forward_ops=assembly.forward_ops,
            model_begin=begin,
            model_end=end,
            persistent_bytes=persistent.total_bytes,
            step_ms=step_ms,
            peak_bytes=int(points.max()),
            reserved_bytes=self._reserved_bytes(),
            time_factor=factor,
            model_signature=model_signature(self.model),
            batch_size=self.options.batch_size,
            notes=(*persistent.notes, *recorded.notes),
            sizes="allocated" if accelerators.has_streams(self.device) else "requested",
        )


def _has_other_ranks() -> bool:
    """Whether the step may run collectives: then all ranks have to run it equally often, whatever each one measures."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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

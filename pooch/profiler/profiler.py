"""Profiles one step: the passes in order, and what each of them contributes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ..executor.evictor import Evictor
from ..ground.errors import ProfileError
from ..ground.process_limits import is_limited
from ..ground.progress import Progress, silent
from ..ground.units import format_bytes
from ..ir import Link, Profile
from ..torchtools import accelerators
from ..torchtools.accelerators import granule_bytes
from ..torchtools.calls import compiled_part
from ..torchtools.device_memory import give_memory_back, room_bytes
from ..torchtools.graph_gaps.partition import GAPS
from ..torchtools.malloc import return_large_blocks
from ..torchtools.memory_trace import earlier_objects_exempt, live_bytes
from ..torchtools.out_of_memory import forgotten, is_out_of_memory
from ..torchtools.ranks import Ranks, is_distributed, will_arrange_buckets
from ..torchtools.requested_sizes import allocated_as_requested
from ..torchtools.training_state import model_device, training_state_kept
from .assembly import assembled_profile
from .device_times import device_slot_times_ms
from .hardware import describe_device
from .outliving import persistent_tensors
from .persistent import ForeseenState, foreseen_state, gradient_bytes
from .pressure import EVERYTHING_STAYS, NOTHING_STAYS, evicting, saved_tensors_away, steps_under
from .recorder import ForwardRecorder
from .session import FIRST_DIFFERS, ProfileOptions, check_same_forward, is_same_forward, user_errors_named
from .slots import StepAssembly
from .step import Forward, record_step
from .times import (
    StepTimes,
    are_worth_a_run,
    host_times_ms,
    outliers,
    sibling_kinds,
    slot_times_ms,
    spread_notes,
    time_step,
    typical,
)

IN_CORE_MODELLED = "the in-core time is modelled: the sum of op times"
MOST_FIRST_STEPS = 3  # of a wrapped model: those of a static graph in DDP
_SPARE_SHARE = 1 / 8  # of what the device has left: not all of it is memory of tensors, nor free in one piece
_RecordingMode = Literal["run", "offload"]


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A profile, and the times of its plain steps (none if the step may not fit)."""

    profile: Profile
    plain: tuple[StepTimes, ...]


def profile_step(
    forward: Forward,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    link: Link,
    options: ProfileOptions,
    progress: Progress = silent,
    ranks: Ranks | None = None,
) -> ProfiledStep:
    """Profiles one training step; parameters, gradients, buffers, optimizer and random state are left unchanged.

    The first pass is recorded under an evictor with the budget that the mode names: in "auto", what the device has left
    less a share, so that what does not fit leaves. It tells whether the step fits, and that the next one does the same.
    Plain steps are run only if it fits.

    Args:
        forward: () -> loss tensor.
        model: the model that the plan will be applied to.
        optimizer: its state counts as persistent bytes, including state that only its first step will create.
        link: cost of transfers, measured beforehand.
        options: how to profile.
        progress: called with a description of each pass.
        ranks: the ranks that profile in lockstep. They run plain steps if all of them can.

    Raises:
        ProfileError: if the forward pass raises, the loss cannot be differentiated, or the step changes from run to
            run.
        torch.OutOfMemoryError, RuntimeError, MemoryError: if the step does not fit even without its saved tensors.
    """
    if options.mode not in ("run", "offload", "auto"):
        raise ProfileError(f"unknown profiling mode {options.mode!r}: choose run, offload or auto")
    return _Profiling(forward, model, optimizer, model_device(model), options, link, progress, ranks).profile()


@dataclass(frozen=True, slots=True)
class _Persistent:
    """Bytes that are live before the step, and the optimizer's state, part of which its first step may create."""

    live_bytes: int
    state: ForeseenState


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
    ranks: Ranks | None = None
    _evictor: Evictor = field(init=False)

    def __post_init__(self) -> None:
        self.has_streams = accelerators.has_streams(self.device)

    def profile(self) -> ProfiledStep:
        """Profiles the step within the first budget in which it does not run out of memory."""
        if is_limited():
            return_large_blocks()
        if is_distributed():
            self._first_steps_of_wrappers()
        live = live_bytes(self.device) if self.options.mode == "auto" else 0
        *larger, least = self._budgets(live)
        for budget_bytes in larger:
            try:
                return self._profile_within(budget_bytes, live)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                forgotten(error)
            give_memory_back(self.device)
        return self._profile_within(least, live)

    def _budgets(self, live: int) -> tuple[int, ...]:
        """Returns what the recorded steps, and then plain ones, may take in device bytes; `live` are there now."""
        if self.options.mode != "auto":
            return (EVERYTHING_STAYS if self.options.mode == "run" else NOTHING_STAYS,)
        budget_bytes = live + int((1 - _SPARE_SHARE) * (self._room_bytes(live) - live))
        return (budget_bytes, NOTHING_STAYS) if self.ranks is None else (budget_bytes,)

    def _room_bytes(self, live: int) -> int:
        room = room_bytes(self.device, live)
        limit_bytes = self.options.memory_limit_bytes
        return room if limit_bytes is None else min(room, limit_bytes)

    def _profile_within(self, budget_bytes: int, live: int) -> ProfiledStep:
        """Records the step for the first time, which sets up kernels and tells whether plain steps fit the budget."""
        if compiled_part(self.model) is not None:
            with GAPS.wanted():
                self._time_step("step that compiles")
        with evicting(self.device, budget_bytes, live) as self._evictor:
            self._evictor.speed.start_from(self.link)
            with earlier_objects_exempt():
                assembly = self._record("first recorded step")
                first, rise_bytes = assembly.recorder, int(assembly.measured_points.max())
                del assembly
            persistent = self._persistent_bytes()
            fits = persistent.live_bytes + rise_bytes <= budget_bytes
            if self.ranks is not None:
                fits = bool(self.ranks.least("fits", fits))
            with earlier_objects_exempt():
                return self._profile_plainly(first, persistent) if fits else self._profile_offloaded(first, persistent)

    def _profile_plainly(self, first: ForwardRecorder, persistent: _Persistent) -> ProfiledStep:
        self._evictor.set_budget(EVERYTHING_STAYS)
        warmup, repeats = max(self.options.warmup, int(self.has_streams)), max(1, self.options.repeats)
        for number in range(warmup):
            self._time_step(f"warm-up step {number + 1} of {warmup}")
        if self.has_streams:  # a plain step may leave more behind than one that is recorded
            persistent = self._persistent_bytes()
        assembly, recorded_ms, notes = self._recorded("run", first)
        plain = tuple(self._time_step(f"timed step {number + 1} of {repeats}") for number in range(repeats))
        notes = (*notes, *spread_notes([times.step_ms for times in plain]))
        profile = self._make("run", assembly, recorded_ms, persistent, notes, typical(plain).step_ms)
        return ProfiledStep(self._with_host_times(profile, assembly, typical(plain)), plain)

    def _with_host_times(self, profile: Profile, assembly: StepAssembly, plain: StepTimes) -> Profile:
        if not self.has_streams:
            return profile
        times_ms = [op.time_ms for op in profile.ops]
        host_ms = host_times_ms(slot_times_ms(assembly), assembly.forward_ops, plain, times_ms)
        return replace(profile, ops=tuple(replace(op, host_ms=ms) for op, ms in zip(profile.ops, host_ms, strict=True)))

    def _profile_offloaded(self, first: ForwardRecorder, persistent: _Persistent) -> ProfiledStep:
        assembly, times_ms, notes = self._recorded("offload", first)
        # No plain step was run, so there is nothing that tells how much recording slowed the ops down.
        profile = self._make("offload", assembly, times_ms, persistent, notes, sum(times_ms))
        reason = "saved tensors were kept off the device"
        if self.options.mode == "auto":
            left = format_bytes(max(0, self._room_bytes(persistent.live_bytes)))
            reason = f"the step may not fit in-core ({format_bytes(profile.peak_bytes)} in {left}), so {reason}"
        return ProfiledStep(replace(profile, notes=(*profile.notes, f"{reason}; {IN_CORE_MODELLED}")), ())

    def _first_steps_of_wrappers(self) -> None:
        """Wrappers such as DDP arrange their buckets in or after the first whole step, or the second one."""
        for number in range(MOST_FIRST_STEPS):
            if number == 0 or any(map(will_arrange_buckets, self.model.modules())):
                with saved_tensors_away(self.device):
                    self._time_step(f"step {number + 1} of a wrapped model, which arranges its buckets")

    def _time_step(self, text: str) -> StepTimes:
        times: StepTimes = self._pass(text, lambda: time_step(self.forward, self.model, self.device))
        return times

    def _recorded(
        self, mode: _RecordingMode, first: ForwardRecorder
    ) -> tuple[StepAssembly, list[float], tuple[str, ...]]:
        """Records the step, and once more if some ops were disturbed.

        Returns:
            The recorded step, the duration of each slot's op in ms, and remarks for the reader of the profile.
        """
        if self.has_streams:  # the reserved peak must be that of the recorded steps alone
            accelerators.empty_cache(self.device)
            accelerators.reset_peaks(self.device)
        assembly = self._record("recorded step")
        is_same = is_same_forward(first, assembly.recorder)
        if self.ranks is not None:
            is_same = bool(self.ranks.least("same", is_same))
        if not is_same:
            first = assembly.recorder
            assembly = self._record("recorded step again, as the first one ran other ops", first)
        times_ms, notes = self._op_times(mode, assembly)
        notes = notes if is_same else (*notes, FIRST_DIFFERS)
        # All ranks must run collectives equally often, whatever each of them measures.
        disturbed = {} if is_distributed() else outliers(sibling_kinds(assembly), times_ms)
        if are_worth_a_run(disturbed, times_ms):
            again = self._record(f"recorded step again, for {len(disturbed)} op times out of line", first)
            again_ms, _ = self._op_times(mode, again)
            if len(again_ms) == len(times_ms):
                times_ms = [min(pair) for pair in zip(times_ms, again_ms, strict=True)]
        return assembly, times_ms, notes

    def _record(self, text: str, first: ForwardRecorder | None = None) -> StepAssembly:
        record = self._pass(text, lambda: record_step(self.forward, self.model, self._evictor))
        if first is not None:
            check_same_forward(first, record.recorder)
        return StepAssembly(record)

    def _op_times(self, mode: _RecordingMode, assembly: StepAssembly) -> tuple[list[float], tuple[str, ...]]:
        """Returns the duration of each slot's op in ms, and remarks for the reader of the profile."""
        if not self.has_streams:
            return slot_times_ms(assembly), ()
        with steps_under(self._evictor) if mode == "offload" else nullcontext():
            times = self._pass("timing kernels", lambda: device_slot_times_ms(self.forward, self.model, assembly))
        if times is not None:
            return times, ()
        note = "kernels could not be timed on the device: op times are those of launching them"
        return slot_times_ms(assembly), (note,)

    def _pass(self, text: str, run: Callable[[], Any]) -> Any:
        """Runs one pass over the step, each time from the same training state."""
        self.progress(text)
        with user_errors_named(), training_state_kept(self.model, self.device):
            if self.options.accumulate:
                for parameter in self.model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            return run()

    def _persistent_bytes(self) -> _Persistent:
        gc.collect()  # as before every recorded step: garbage is not persistent
        gradients = gradient_bytes(self.model, self.device)  # not persistent: the step creates its own
        count = allocated_as_requested if self.has_streams else live_bytes
        live = self._pass("counting persistent bytes", lambda: count(self.device)) - gradients
        return _Persistent(live, foreseen_state(self.optimizer, self.model))

    def _make(
        self,
        mode: _RecordingMode,
        assembly: StepAssembly,
        recorded_ms: list[float],
        persistent: _Persistent,
        notes: tuple[str, ...],
        step_ms: float,
    ) -> Profile:
        """Builds the profile, with op times scaled so that they add up to a plain step."""
        factor = step_ms / sum(recorded_ms)
        return assembled_profile(
            assembly,
            self.model,
            self.options,
            [time_ms * factor for time_ms in recorded_ms],
            persistent.live_bytes + persistent.state.to_come_bytes,
            mode=mode,
            device=describe_device(self.device),
            link=self.link,
            step_ms=step_ms,
            time_factor=factor,
            reserved_bytes=accelerators.peak_reserved_bytes(self.device) if self.has_streams else 0,
            notes=(*persistent.state.notes, *notes),
            sizes="allocated" if self.has_streams else "requested",
            persistent=persistent_tensors(assembly, persistent.state.bytes_of, granule_bytes(self.device.type)),
        )

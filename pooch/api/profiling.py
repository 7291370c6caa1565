"""A training step -> Profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ..ground.errors import ProfileError, UsageError, first_line
from ..ground.progress import Progress, silent
from ..ground.units import plural
from ..ir import Link, Profile
from ..workloads import Workload
from .budgets import parse_budget
from .fake_profiling import fake_profile, fake_profile_of
from .hook_costs import with_hook_costs
from .measured_profiling import measured_profile
from .modelled_ranks import RanksOptions
from .recompute import AllowRecompute, check_allowed, made_again_within

if TYPE_CHECKING:
    import torch

    from ..devices import DeviceModel
    from ..profiler import ProfileOptions

Mode = Literal["auto", "run", "offload", "fake"]
_CALLS_PARTS = (
    "forward calls parts of the model, or model.forward, but never the model itself: plan with region='step', and "
    "train with `with run.step():`"
)


def profile(
    forward: Callable[[], torch.Tensor],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 1,
    mode: Mode = "auto",
    memory_limit: float | str | None = None,
    allow_recompute: AllowRecompute = "exact",
    device_model: DeviceModel | None = None,
    ranks: RanksOptions | None = None,
    workload: str = "",
    batch_size: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Measure one training step without changing the training state.

    Profiling restores parameters, gradients, buffers and the optimizer; the random states of Python, NumPy and PyTorch;
    attributes of the model's modules with the contents of their lists, dictionaries and tensors; hooks, training modes
    and `requires_grad`. It cannot restore what `forward` changes elsewhere: variables that it closes over, metrics
    outside the model, iterators over data. It calls `forward` at most `warmup + 2 * repeats + 3` times on a CPU if the
    step fits, twice in mode "fake", and never more than `warmup + 2 * repeats + 12` times; with a loss that can run in
    slices, six times more, and once more if the first pass runs other ops than the next one, as where it makes a mask
    that later ones read: the profile is that of later steps. The profile's notes give the number.

    The step is recorded under a budget, which `mode` chooses. What does not fit into the memory that the device has
    left leaves it meanwhile, and such a step is not run plainly; if it does not fit even so, it is traced with fake
    tensors. The notes say so.

    Args:
        forward: () -> loss tensor (a scalar). It is called several times and should do the same each time: load the
            batch outside of it.
        model: the model that the plan will be applied to; not under a plan, and in mode "fake" not compiled.
        optimizer: its state counts as persistent bytes, including state that its first step will create. Wrappers such
            as those of Accelerate and Lightning are unwrapped.
        accumulate: gradients live throughout the step. Otherwise they are created in the backward pass and freed after
            it.
        warmup: number of plain steps before the measurement.
        repeats: number of timed plain steps, and of steps with copies beside them. From three on, the median counts.
        mode: "run" (plainly), "offload" (all saved tensors leave the device, and there are no plain steps), "fake"
            (nothing is run: sizes and lifetimes come from fake tensors, op times from running each distinct op alone or
            from `device_model`), or "auto" (plainly if that fits, else what does not fit leaves, else "fake").
        memory_limit: limit on the device bytes of the process while it is profiled, such as "16GiB". None: what the
            device has left.
        allow_recompute: "rounding" has graphs of a compiled model make values again, as `memory_limit` asks for it,
            which may change the last digits of what they compute; as `pooch.auto` takes it.
        device_model: model of a device that need not be present (`pooch.devices.find_device`); implies mode "fake". The
            profile is marked as modelled.
        ranks: several of these devices, among which the model is divided; the profile is that of one of them. They are
            modelled too, and plans for such a profile answer what would fit, but cannot be applied.
        workload: name for the reader of the profile.
        batch_size: for the reader of the profile.
        progress: called with what is being done. None: nothing is.

    Raises:
        ProfileError: `forward` raises, its loss cannot be differentiated, or the step differs from run to run.
        RankError: the model is data parallel or sharded, and another rank has failed. All ranks profile at the same
            time, with the same options.
        UsageError: the model is under a plan, or compiled in mode "fake"; `forward` uses nothing of it; an argument is
            invalid; `allow_recompute="rounding"` is given without `memory_limit`; or `device_model` is given with a
            mode that runs the step.
    """
    return profile_workload(
        Workload(model, forward, optimizer, workload, batch_size),
        accumulate=accumulate,
        warmup=warmup,
        repeats=repeats,
        mode=mode,
        memory_limit=memory_limit,
        allow_recompute=allow_recompute,
        device_model=device_model,
        ranks=ranks,
        progress=progress or silent,
    )


def profile_workload(
    workload: Workload | Callable[[], Workload],
    *,
    accumulate: bool = False,
    warmup: int = 1,
    repeats: int = 1,
    mode: Mode = "auto",
    memory_limit: float | str | None = None,
    allow_recompute: AllowRecompute = "exact",
    device_model: DeviceModel | None = None,
    link: Link | None = None,
    ranks: RanksOptions | None = None,
    progress: Progress = silent,
) -> Profile:
    """`profile` for a workload, or for what builds one (a `WorkloadFactory`), with the same arguments.

    In mode "fake", a factory builds the workload from fake tensors, so that a model larger than this machine needs no
    memory. Only then, `link` can be the link of this device, if it was measured before.

    Raises:
        ProfileError: as `profile`.
        UsageError: as `profile`, or the factory's.
        WorkloadError: the factory's.
    """
    from ..profiler import ProfileOptions
    from ..torchtools.malloc import trim_freed_memory

    is_fake = mode == "fake" or device_model is not None
    if is_fake and mode not in ("auto", "fake"):
        raise UsageError(f"mode {mode!r} runs the step, and a device model runs nothing: give one or the other")
    if ranks is not None:
        ranks.check(device_model, accumulate=accumulate)
    if not isinstance(workload, Workload):
        if is_fake:
            made = fake_profile_of(workload, ProfileOptions(accumulate), device_model, link, ranks, progress)
            return with_hook_costs(made, progress)
        workload = workload()
    _check(workload, warmup, repeats, takes_compiled=not is_fake)
    most_bytes = None if memory_limit is None else parse_budget(memory_limit, None, name="memory limit")
    real_mode: Any = "auto" if is_fake else mode
    options = ProfileOptions(accumulate, warmup, repeats, real_mode, workload.name, workload.batch_size, most_bytes)
    check_allowed(allow_recompute)
    if allow_recompute == "rounding" and most_bytes is None:
        raise UsageError(
            'allow_recompute="rounding" needs a budget: give it as memory_limit, and plan for the same one'
        )
    room_bytes = most_bytes if allow_recompute == "rounding" else None
    with made_again_within(room_bytes, workload.model) as again, _unchanged(workload, is_fake) as (workload, calls):
        made = _profiled(workload, options, mode, device_model, is_fake, ranks, progress)
    is_called = _calls_model(made, workload.model)
    trim_freed_memory()  # the C library would keep much of what the plain steps took, and the records of the step
    made_again = [str(each) for each in again if each.graphs]
    notes = (*made.notes, *made_again, f"the forward pass ran {plural(len(calls), 'time')} to profile the step")
    return replace(made, notes=notes if is_called else (*notes, _CALLS_PARTS))


def _check(workload: Workload, warmup: int, repeats: int, *, takes_compiled: bool) -> None:
    import torch

    from ..torchtools.calls import refuse_taken
    from ..torchtools.module_attributes import has_lazy_parameters

    forward: object = workload.forward
    model: object = workload.model
    if isinstance(forward, torch.nn.Module) and not isinstance(model, torch.nn.Module):
        raise UsageError("the function comes first, then the model: pooch.profile(forward, model)")
    if not callable(forward):
        kind = type(forward).__name__
        raise UsageError(f"forward is {kind}: give a function that takes no arguments and returns the loss")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model is {type(model).__name__}: give a torch.nn.Module")
    refuse_taken(model, takes_compiled=takes_compiled)
    if has_lazy_parameters(model):
        raise UsageError("the model has lazy parameters, which have no shapes yet: call it once before profiling")
    if warmup < 0 or repeats < 1:
        raise UsageError(f"warmup={warmup}, repeats={repeats}: give at least 0 and 1")


@contextmanager
def _unchanged(workload: Workload, is_fake: bool) -> Iterator[tuple[Workload, list[None]]]:
    """Restore what the step changes in each run beside what is restored after each run.

    Yields the workload, whose forward adds each call to the list.

    Args:
        workload: The step.
        is_fake: Whether nothing is run, so that no parameter changes.
    """
    from ..profiler.optimizers import unwrapped
    from ..torchtools.module_attributes import attributes_kept
    from ..torchtools.training_state import model_device, random_state_kept, untrained_parameters_kept

    calls: list[None] = []

    def counted() -> torch.Tensor:
        calls.append(None)
        return workload.forward()

    optimizer = None if workload.optimizer is None else unwrapped(workload.optimizer)
    kept = nullcontext() if is_fake else untrained_parameters_kept(workload.model)
    with attributes_kept(workload.model), kept, random_state_kept(model_device(workload.model)):
        yield replace(workload, forward=counted, optimizer=optimizer), calls


def _profiled(
    workload: Workload,
    options: ProfileOptions,
    mode: Mode,
    device_model: DeviceModel | None,
    is_fake: bool,
    modelled: RanksOptions | None,
    progress: Progress,
) -> Profile:
    from ..torchtools.device_memory import give_memory_back
    from ..torchtools.out_of_memory import forgotten, is_out_of_memory
    from ..torchtools.ranks import Ranks, has_collectives
    from ..torchtools.training_state import model_device

    if not is_fake:
        ranks = Ranks("profile") if has_collectives(workload.model) else None
        try:
            with nullcontext() if ranks is None else ranks.in_lockstep():
                return with_hook_costs(measured_profile(workload, options, progress, ranks), progress)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            forgotten(error)
            if ranks is not None:
                raise ProfileError(
                    f"{ranks.name} ran out of memory while profiling in mode {mode!r} ({first_line(error)}): use mode "
                    f"{'fake' if mode == 'offload' else 'offload'} in all ranks"
                ) from None
            if mode != "auto":
                raise ProfileError(_too_large(mode, error)) from None
        progress("out of memory with saved tensors offloaded: tracing with fake tensors")
        give_memory_back(model_device(workload.model))
    return with_hook_costs(fake_profile(workload, options, device_model, modelled, progress), progress)


def _too_large(mode: Mode, error: BaseException) -> str:
    other = "offload, or fake" if mode == "run" else "fake"
    return f"out of memory while profiling in mode {mode!r} ({first_line(error)}): use mode {other}"


def _calls_model(profile: Profile, model: torch.nn.Module) -> bool:
    """Whether the step calls the model itself, rather than parts of it.

    Args:
        profile: of the step.
        model: that was given with it.

    Raises:
        UsageError: the step uses nothing of the model, so that it must be another one.
    """
    if profile.model_begin < profile.model_end:
        return True
    if not _uses_any_of(profile) and next(model.parameters(), None) is not None:
        raise UsageError(
            f"forward uses nothing of this model ({type(model).__name__}): give the model that forward calls"
        )
    return False


def _uses_any_of(profile: Profile) -> bool:
    """Whether an op of the forward pass is called by a module of the model, or reads a parameter or buffer of it."""
    forward = profile.ops[: profile.forward_ops]
    owned = {value.id for value in profile.values if value.role in ("parameter", "buffer", "transient")}
    return any(op.module or not owned.isdisjoint(op.reads) for op in forward)

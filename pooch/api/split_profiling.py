"""The same step with calls that can run in slices doing so: found, verified and profiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..ground.errors import PoochError, first_line
from ..ground.progress import Progress
from ..ir import Op, Profile, Split

if TYPE_CHECKING:
    import torch

    from ..profiler import ProfileOptions
    from ..profiler.step import Forward
    from ..torchtools.split import LossCall, SplitCalls
    from ..torchtools.split.calls import Watcher
    from ..workloads import Workload

SMALLEST_INPUT_BYTES: Final = 4 << 20  # below that, slices free less than other tensors of the step
SMALLEST_SHARE: Final = 0.01  # of the in-core peak
SPLIT_OP: Final = "pooch_split.cross_entropy.default"
SOFTMAX_OP: Final = "aten._log_softmax.default"  # part of a cross entropy, as large as its logits


def with_split(profile: Profile, workload: Workload, options: ProfileOptions, progress: Progress) -> Profile:
    """Add the profile of the step in slices, if it has calls that are worth it and give the same bits.

    Where the profile has a large softmax, that takes a forward pass in which every such call is run both ways, and if
    one is found, the passes of a profile without warm-up. If a call cannot be sliced or the step fails in slices, a
    note says why, and the step stays whole.
    """
    from ..torchtools.ranks import is_distributed

    if is_distributed():
        return profile  # all ranks would have to find the same, and to run the passes equally often
    if not _may_have_calls(profile):
        return profile
    from ..profiler import profile_step

    finding = _Finding(profile, workload.model, _difference)

    def made(split: SplitCalls) -> Profile | None:
        _find(finding, workload, progress)
        if not finding.calls:
            return None
        progress("profiling the step in slices")
        mode: Any = profile.mode
        chosen = replace(options, warmup=0, repeats=1, mode=mode)
        forward = _watched(workload.forward, split, split)
        found = profile_step(forward, workload.model, workload.optimizer, profile.link, chosen, progress).profile
        return _with_times_of(found, profile)

    return _with_variant(profile, finding, made)


def with_fake_split(
    profile: Profile, workload: Workload, profiled: Callable[[Forward], Profile], progress: Progress
) -> Profile:
    """The same in mode "fake": calls are found while the step in slices is recorded.

    A modelled device has no bits to compare. On this one, a call is compared on random numbers of its shapes.

    Args:
        profile: of the step.
        workload: that was profiled.
        profiled: makes the profile of another forward pass in the same way.
        progress: called with what is being done.
    """
    from ..torchtools.ranks import is_distributed

    if is_distributed() or not _may_have_calls(profile):
        return profile
    modelled = profile.device.modelled
    if profile.device.has_streams and not modelled:
        return profile  # the time that the host takes to issue ops is known for the step whole
    finding = _Finding(profile, workload.model, None if modelled else _difference_of_random)

    def made(split: SplitCalls) -> Profile | None:
        def watch(plain: Callable[..., torch.Tensor], arguments: Any, named: Any) -> torch.Tensor:
            finding.look(arguments, named)
            return split(plain, arguments, named)

        progress("profiling the step in slices")
        found = profiled(_watched(workload.forward, watch, split))
        return found if finding.calls else None

    return _with_variant(profile, finding, made)


def _with_variant(profile: Profile, finding: _Finding, made: Callable[[SplitCalls], Profile | None]) -> Profile:
    """Add the step in slices that is made, or the note that says why there is none."""
    from ..torchtools.out_of_memory import forgotten, is_out_of_memory
    from ..torchtools.split import SplitCalls

    split = SplitCalls(finding.calls)
    try:
        variant = made(split)
        if variant is not None:
            variant = replace(variant, splits=tuple(_splits(profile, variant, finding.calls, split.made)))
    except (PoochError, RuntimeError, MemoryError) as error:
        reason = "memory runs out" if is_out_of_memory(error) else first_line(error)
        forgotten(error)
        note = f"the loss is not run in slices: the step does not run that way ({reason})"
        return replace(profile, notes=(*profile.notes, note))
    return replace(profile, split=variant, notes=(*profile.notes, *finding.notes))


def _watched(forward: Forward, watcher: Watcher, split: SplitCalls) -> Forward:
    from ..torchtools.split import watching_losses

    def watched() -> torch.Tensor:
        split.made.clear()
        with watching_losses(watcher):
            return forward()

    return watched


@dataclass(frozen=True, slots=True)
class _Call:
    rows: int
    slices: int
    input_bytes: int
    compared: bool


class _Finding:
    """Finds calls that are large enough, can run in slices, and give the same bits.

    Args:
        profile: of the step.
        model: on whose device the calls are.
        difference: tells what differs in slices, or None. None: nothing is compared.
    """

    def __init__(
        self, profile: Profile, model: torch.nn.Module, difference: Callable[[LossCall], str | None] | None
    ) -> None:
        from ..torchtools.training_state import model_device

        self._device, self._least_bytes, self._difference = model_device(model), _least_bytes(profile), difference
        self.calls: dict[str, _Call] = {}
        self.notes: dict[str, None] = {}
        self._compared: set[str] = set()

    def look(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Look at one call."""
        import torch

        from ..torchtools.split import splittable

        logits = arguments[0] if arguments else named.get("input")
        if not isinstance(logits, torch.Tensor) or logits.nbytes < self._least_bytes or logits.device != self._device:
            return
        call = splittable(arguments, named)
        if isinstance(call, str):
            self.notes[f"the loss is not run in slices: {call}"] = None
        elif call.fingerprint not in self._compared:
            self._compared.add(call.fingerprint)
            difference = None if self._difference is None else self._difference(call)
            if difference is None:
                slices = -(-call.logits.shape[0] // call.rows)
                self.calls[call.fingerprint] = _Call(
                    call.rows, slices, call.logits.nbytes, self._difference is not None
                )
            else:
                self.notes[f"the loss is not run in slices: {difference} would have other bits"] = None


def _find(finding: _Finding, workload: Workload, progress: Progress) -> None:
    """Run a forward pass in which each call that is large enough is tried both ways."""
    import torch

    from ..profiler.session import user_errors_named
    from ..torchtools.split import watching_losses
    from ..torchtools.training_state import model_device, training_state_kept

    def watch(plain: Callable[..., torch.Tensor], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> torch.Tensor:
        finding.look(arguments, named)
        return plain(*arguments, **named)

    progress("comparing the loss whole and in slices")
    kept = training_state_kept(workload.model, model_device(workload.model))
    with user_errors_named(), kept, torch.no_grad(), watching_losses(watch):
        workload.forward()


def _difference(call: LossCall) -> str | None:
    from ..torchtools import split

    return split.difference_from_plain(
        call.logits, call.target, call.weight, call.reduction, call.ignore_index, call.rows
    )


def _difference_of_random(call: LossCall) -> str | None:
    """As for a call whose tensors have contents."""
    from ..torchtools.split import on_random_numbers

    with on_random_numbers(call) as made:
        return _difference(made)


def _least_bytes(profile: Profile) -> int:
    return max(SMALLEST_INPUT_BYTES, round(SMALLEST_SHARE * profile.peak_bytes))


def _may_have_calls(profile: Profile) -> bool:
    """Whether the recorded step makes a softmax as large as the logits of a call that is worth it."""
    made = (profile.values[value] for op in profile.ops if op.name == SOFTMAX_OP for value in op.writes)
    return any(value.size_bytes >= _least_bytes(profile) for value in made)


def _with_times_of(made: Profile, plain: Profile) -> Profile:
    """The profile in slices, with the plain one's times for all ops that both have, so that noise decides nothing."""
    ops = list(made.ops)
    for here, there in _common(made, plain):
        ops[here] = replace(ops[here], time_ms=plain.ops[there].time_ms, host_ms=plain.ops[there].host_ms)
    return replace(made, ops=tuple(ops), step_ms=sum(op.time_ms for op in ops))


def _common(made: Profile, plain: Profile) -> list[tuple[int, int]]:
    """The ops that two profiles of a step have at the beginning and at the end of each pass, as pairs of indices."""
    pairs = []
    ranges = ((0, made.forward_ops, 0, plain.forward_ops),
              (made.forward_ops, len(made.ops), plain.forward_ops, len(plain.ops)))  # fmt: skip
    for begin, end, plain_begin, plain_end in ranges:
        here, there = made.ops[begin:end], plain.ops[plain_begin:plain_end]
        first = _equal(here, there)
        last = min(_equal(here[::-1], there[::-1]), len(here) - first, len(there) - first)
        pairs += [(begin + number, plain_begin + number) for number in range(first)]
        pairs += [(end - number, plain_end - number) for number in range(last, 0, -1)]
    return pairs


def _equal(first: Sequence[Op], second: Sequence[Op]) -> int:
    """How many ops are the same from the beginning on."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if (one.name, one.fingerprint, one.module) != (other.name, other.fingerprint, other.module):
            return number
    return min(len(first), len(second))


def _splits(plain: Profile, made: Profile, calls: Mapping[str, _Call], fingerprints: Sequence[str]) -> list[Split]:
    ops = [op for op in made.ops if op.name == SPLIT_OP]
    if not ops or len(ops) != len(fingerprints):
        raise PoochError("its calls are not the ones that were compared")
    shared = _common(made, plain)
    same, plain_same = {here for here, _ in shared}, {there for _, there in shared}
    own = [op for op in made.ops if op.index not in same]
    replaced = [op for op in plain.ops if op.index not in plain_same]
    found = []
    for op, fingerprint in zip(ops, fingerprints, strict=True):
        call = calls[fingerprint]
        label = f"{op.module}.cross_entropy" if op.module else "cross_entropy"
        found.append(
            Split(
                op.index,
                label,
                fingerprint,
                call.rows,
                call.slices,
                call.input_bytes,
                max((each.peak_bytes for each in replaced), default=0),
                max((each.peak_bytes for each in own), default=0),
                sum(each.time_ms for each in replaced),
                sum(each.time_ms for each in own),
                compared=call.compared,
            )
        )
    return found

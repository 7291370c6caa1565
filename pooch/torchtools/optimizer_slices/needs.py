"""What a step of an optimizer takes, found by a step of a copy of it on small parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..tensors import find_tensors, has_plain_storage, storage_of
from ..training_state import RandomStates
from .diversion import Step
from .small_copies import Sample, set_gradients, small_copy
from .trial import no_hooks_seen

_FEW = 2  # parameters of a kind, and then twice as many: what grows with them is there for all of them at once
_LONGEST = 16  # side of a small parameter that has the proportions of a large one
_LEAST_BYTES = 9  # what has fewer is a count or a rate, of whatever size the parameter is

_WeakReference: Any = StorageWeakRef  # which has no types

_Kind = tuple[int, int]  # of parameters that are stepped alike: number of the group, and of dimensions


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What stepping parameters takes beside them and their gradients, for each of their bytes.

    Attributes:
        state: State that a first step makes, by the number of a parameter's group and of its dimensions.
        alone: Temporary tensors in the step of a parameter.
        beside: Those of each other parameter that is stepped together with it: 0 if they come one after the other.
    """

    state: Mapping[_Kind, float]
    alone: float
    beside: float

    def temporary_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Return how many bytes of temporary tensors there are at once where parameters are stepped together."""
        sizes = [parameter.nbytes for parameter in parameters]
        largest_bytes = max(sizes, default=0)
        return int(self.alone * largest_bytes + self.beside * (sum(sizes) - largest_bytes))


def needs_of(optimizer: Optimizer, plain: Step) -> StepNeeds | None:
    """Find what a first step of an optimizer takes. None: its copy could not make one.

    Args:
        optimizer: The optimizer, of which nothing is read but settings and shapes.
        plain: The step that its class defines.
    """
    few, more = (
        [_samples_of(group["params"], count) for group in optimizer.param_groups] for count in (_FEW, 2 * _FEW)
    )
    devices = {sample.device for group in few for sample in group} | {torch.device("cpu")}
    if len(devices) > 2 or not any(few):
        return None
    states = {device: RandomStates.of(device) for device in devices}
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _found(small_copy(optimizer, few), small_copy(optimizer, more), plain, few, more)
    except Exception:  # noqa: BLE001
        return None
    finally:
        for device, state in states.items():
            state.restore(device)


def _samples_of(parameters: Sequence[torch.Tensor], count: int) -> tuple[Sample, ...]:
    """Return samples in the proportions of the largest parameter of each number of dimensions."""
    largest: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.nbytes > getattr(largest.get(parameter.dim()), "nbytes", 0):
            largest[parameter.dim()] = parameter
    return tuple(_sample(each) for each in largest.values() for _ in range(count))


def _sample(parameter: torch.Tensor) -> Sample:
    divisor = max(1, *parameter.shape) / _LONGEST if parameter.dim() else 1
    shape = tuple(max(1, round(size / divisor)) if divisor > 1 else size for size in parameter.shape)
    return Sample(shape, parameter.dtype, parameter.device, type(parameter), True)


def _found(few: Optimizer, more: Optimizer, plain: Step, *samples: Sequence[Sequence[Sample]]) -> StepNeeds:
    with no_hooks_seen(few, more):
        few_bytes, more_bytes = (
            _temporary_bytes(copy, each, plain) for copy, each in zip((few, more), samples, strict=True)
        )
    state: dict[_Kind, float] = {}
    for index, group in enumerate(few.param_groups):
        for parameter in group["params"]:
            made_bytes = sum(map(_long_bytes, find_tensors(few.state.get(parameter, {}))))
            kind = index, parameter.dim()
            state[kind] = max(state.get(kind, 0.0), made_bytes / parameter.nbytes)
    sizes = [parameter.nbytes for group in few.param_groups for parameter in group["params"]]
    beside = max(0, more_bytes - few_bytes) / sum(sizes)  # twice as many of them
    alone = few_bytes / max(sizes) - beside * (sum(sizes) / max(sizes) - 1)
    return StepNeeds(state, max(0.0, alone), beside)


def _temporary_bytes(copy: Optimizer, samples: Sequence[Sequence[Sample]], plain: Step) -> int:
    """Return how many bytes there were at once in a step that are not there after it."""
    set_gradients(copy, samples, 0)
    with _Making() as making:
        plain(copy)
        making.look()
    return int(making.peak_bytes - making.live_bytes)


class _Making(TorchDispatchMode):
    """Counts the bytes that ops make and nobody has let go of yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: dict[int, tuple[Any, int]] = {}
        self.live_bytes = self.peak_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {storage_of(each)._cdata for each in find_tensors([args, kwargs]) if has_plain_storage(each)}
        for tensor in find_tensors(found):
            if has_plain_storage(tensor) and storage_of(tensor)._cdata not in given:
                storage = storage_of(tensor)
                self._made[storage._cdata] = _WeakReference(storage), _long_bytes(tensor)
        self.look()
        return found

    def look(self) -> None:
        """Count what there is now."""
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        self.live_bytes = sum(size_bytes for _, size_bytes in self._made.values())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _long_bytes(tensor: torch.Tensor) -> int:
    size_bytes: int = storage_of(tensor).nbytes() if has_plain_storage(tensor) else tensor.nbytes
    return size_bytes if size_bytes >= _LEAST_BYTES else 0

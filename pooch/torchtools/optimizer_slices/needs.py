"""What a step of an optimizer takes, found by a step of a copy of it on small parameters."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from ..mode_stacks import UnnotedMode
from ..tensors import find_tensors, has_plain_storage, storage_of
from ..training_state import RandomStates
from .diversion import Step
from .small_copies import Sample, set_gradients, small_copy
from .trial import switches
from .unseen import steps_unseen

_FEW = 2  # parameters of a kind, and then twice as many: what grows with them is there for all of them at once
_LONGEST = 16  # side of a small parameter that has the proportions of a large one
_GROWING = 1.5  # times as much state for each byte of a parameter with twice the side; less is due to rounded sides
_LEAST_BYTES = 9  # what has fewer is a count or a rate, of whatever size the parameter is

_WeakReference: Any = StorageWeakRef  # which has no types

_Kind = tuple[int, int]  # of parameters that are stepped alike: number of the group, and of dimensions


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """What stepping parameters takes beside them and their gradients, for each of their bytes.

    Attributes:
        state: State that a first step makes, by the number of a parameter's group and of its dimensions: a factor, and
            one that is multiplied by the longest side, which matrices have that mix the numbers of a side.
        alone: Temporary tensors in the step of a parameter.
        beside: Those of each other parameter that is stepped together with it: 0 if they come one after the other.
        kept: What it keeps elsewhere than in its state, as in lists of its own.
        asks: Whether it asks its `state` for that of each parameter which has none.
    """

    state: Mapping[_Kind, tuple[float, float]]
    alone: float
    beside: float
    kept: float = 0.0
    asks: bool = True

    def state_bytes(self, parameter: torch.Tensor, group_index: int, default: float) -> float:
        """Return how many bytes of state there are for a parameter.

        Args:
            parameter: The parameter.
            group_index: The number of its group.
            default: What is thought of parameters of which there was none like it.
        """
        factor, by_side = self.state.get((group_index, parameter.dim()), (default, 0.0))
        return float(parameter.nbytes * (factor + by_side * max(1, *parameter.shape, 1)))

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
    few, more, small = (
        [_samples_of(group["params"], count, longest) for group in optimizer.param_groups]
        for count, longest in ((_FEW, _LONGEST), (2 * _FEW, _LONGEST), (_FEW, _LONGEST // 2))
    )
    devices = {sample.device for group in few for sample in group} | {torch.device("cpu")}
    if len(devices) > 2 or not any(few):
        return None
    states = {device: RandomStates.of(device) for device in devices}
    try:
        with _disable_current_modes(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _found(*(_Stepped(optimizer, plain, samples) for samples in (few, more, small)))
    except Exception:  # noqa: BLE001
        return None
    finally:
        for device, state in states.items():
            state.restore(device)


class KnownNeeds:
    """What the steps of one optimizer take, looked for once for each choice of settings that are on.

    Args:
        plain: The step that its class defines.
    """

    def __init__(self, plain: Step) -> None:
        self._plain = plain
        self._found: dict[object, StepNeeds | None] = {}

    def of(self, optimizer: Optimizer) -> StepNeeds | None:
        """Return what its step takes now. None: nobody knows."""
        key = switches(optimizer.param_groups)
        if key not in self._found:
            self._found[key] = needs_of(optimizer, self._plain)
        return self._found[key]


def _samples_of(parameters: Sequence[torch.Tensor], count: int, longest: int) -> tuple[Sample, ...]:
    """Return samples in the proportions of the largest parameter of each number of dimensions.

    Args:
        parameters: The parameters.
        count: How many there are to be of each.
        longest: Their longest side.
    """
    largest: dict[int, torch.Tensor] = {}
    for parameter in parameters:
        if parameter.requires_grad and parameter.nbytes > getattr(largest.get(parameter.dim()), "nbytes", 0):
            largest[parameter.dim()] = parameter
    return tuple(_sample(each, longest) for each in largest.values() for _ in range(count))


def _sample(parameter: torch.Tensor, longest: int) -> Sample:
    divisor = max(1, *parameter.shape) / longest if parameter.dim() else 1
    shape = tuple(max(1, round(size / divisor)) if divisor > 1 else size for size in parameter.shape)
    return Sample(shape, parameter.dtype, parameter.device, type(parameter), True)


class _Stepped:
    """A copy of an optimizer that has made a step.

    Args:
        optimizer: The optimizer.
        plain: The step that its class defines.
        samples: What the parameters of the copy are like.

    Attributes:
        temporary_bytes: How many bytes there were at once in the step that are not there after it.
        sizes: The bytes of the parameters.
        state: How many bytes of state there are for each of a parameter's, by its kind, and its longest side.
        kept_bytes: How many bytes it has made and holds elsewhere.
        asks: As in `StepNeeds`.
    """

    def __init__(self, optimizer: Optimizer, plain: Step, samples: Sequence[Sequence[Sample]]) -> None:
        copy = small_copy(optimizer, samples)
        set_gradients(copy, samples, 0)
        asked: list[dict[str, Any]] = []

        def asks() -> dict[str, Any]:
            asked.append({})
            return asked[-1]

        copy.state = defaultdict(asks)
        with steps_unseen(copy), _Making() as making:
            plain(copy)
            making.look()
        self.temporary_bytes = int(making.peak_bytes - making.live_bytes)
        self.sizes = [parameter.nbytes for group in copy.param_groups for parameter in group["params"]]
        self.state: dict[_Kind, tuple[float, int]] = {}
        self.kept_bytes = making.live_bytes
        for index, group in enumerate(copy.param_groups):
            for parameter in group["params"]:
                made_bytes = sum(map(_long_bytes, find_tensors(copy.state.get(parameter, {}))))
                self.kept_bytes -= made_bytes
                self.state[index, parameter.dim()] = made_bytes / parameter.nbytes, max(1, *parameter.shape, 1)
        self.asks = len(asked) >= len(self.sizes)


def _found(few: _Stepped, more: _Stepped, small: _Stepped) -> StepNeeds:
    state: dict[_Kind, tuple[float, float]] = {}
    for kind, (factor, side) in few.state.items():
        small_factor, small_side = small.state[kind]
        is_growing = side > small_side and factor > _GROWING * small_factor
        by_side = (factor - small_factor) / (side - small_side) if is_growing else 0.0
        state[kind] = factor - by_side * side, by_side
    largest_bytes, all_bytes = max(few.sizes), sum(few.sizes)
    beside = max(0, more.temporary_bytes - few.temporary_bytes) / all_bytes  # twice as many of them
    alone = few.temporary_bytes / largest_bytes - beside * (all_bytes / largest_bytes - 1)
    return StepNeeds(state, max(0.0, alone), beside, max(0, few.kept_bytes) / all_bytes, few.asks)


class _Making(UnnotedMode):
    """Counts the bytes that ops make and nobody has let go of yet."""

    def __init__(self) -> None:
        super().__init__()
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

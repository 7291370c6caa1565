"""Recording calls of ops, and replaying them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import PlanMismatch
from ..torchtools.accelerators import drawing_from, random_snapshot
from ..torchtools.effects import StorageMap, argument_keys, new_tensors, written_tensors
from ..torchtools.operators import OperatorFacts, operator_facts, reads_statistics
from ..torchtools.tensors import (
    Geometry,
    describe,
    has_plain_storage,
    map_tensors,
    result_tensors,
    storage_key,
    version_of,
)

# Returns the storage of a value of the step. The flag says that the op will write into it.
Resolve = Callable[[int, bool], torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class MadeArgument:
    """A tensor argument on a value that the step produced."""

    value: int
    geometry: Geometry
    written: bool


@dataclass(frozen=True, slots=True)
class OuterArgument:
    """A tensor argument from before the step, or one that FSDP gathers, which must not change until the replay."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True, slots=True)
class ScratchArgument:
    """Running statistics that the op updates without reading them. A replay updates a scratch copy instead."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an op: its arguments with tensors replaced, and the state that it depends on."""

    func: Any
    args: Any
    kwargs: Any
    grad_enabled: bool
    random_state: bytes | torch.Generator | None
    device: torch.device | None


def record_call(
    func: Any,
    facts: OperatorFacts,
    args: Any,
    kwargs: Any,
    values: StorageMap,
    device: torch.device,
    gathered: frozenset[int] = frozenset(),
) -> RecordedCall:
    """Record a call before it runs.

    Args:
        func: The operator.
        facts: What is known about the operator.
        args: Positional arguments.
        kwargs: Keyword arguments.
        values: Maps storages to the values that the step produced in them.
        device: The device whose random state is recorded.
        gathered: Values in storages that FSDP fills and empties, which a replay reads there.
    """
    written = written_tensors(facts, args, kwargs)
    scratch = () if reads_statistics(facts, func, args) else facts.statistics

    def replaced(tensor: torch.Tensor, is_scratch: bool) -> object:
        if is_scratch:
            return ScratchArgument(tensor.shape, tensor.dtype, tensor.device)
        value = values.get(storage_key(tensor)) if has_plain_storage(tensor) else None
        if value is None or value < 0 or value in gathered:
            return OuterArgument(tensor, version_of(tensor))
        return MadeArgument(value, Geometry.of(tensor), storage_key(tensor) in written)

    recorded = tuple(map_tensors(partial(replaced, is_scratch=i in scratch), a) for i, a in enumerate(args))
    named = map_tensors(partial(replaced, is_scratch=False), kwargs)
    state = random_snapshot(device) if facts.random else None
    return RecordedCall(func, recorded, named, torch.is_grad_enabled(), state, device)


def find_made(call: RecordedCall) -> list[MadeArgument]:
    """Return the arguments of a call that the step itself produced."""
    return [argument for argument in tensor_arguments(call) if isinstance(argument, MadeArgument)]


def is_emptied(call: RecordedCall) -> bool:
    """Whether the program has emptied the storage of an argument, as FSDP does with gathered parameters."""
    outer = (argument.tensor for argument in tensor_arguments(call) if isinstance(argument, OuterArgument))
    return any(_has_no_memory(tensor) for tensor in outer)


def tensor_arguments(call: RecordedCall) -> list[MadeArgument | OuterArgument]:
    """Return the tensor arguments of a call, apart from scratch copies."""
    found: list[MadeArgument | OuterArgument] = []
    stack: list[Any] = [call.args, call.kwargs]
    while stack:
        item = stack.pop()
        if isinstance(item, (MadeArgument, OuterArgument)):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return found


def replay_call(call: RecordedCall, resolve: Resolve) -> list[torch.UntypedStorage]:
    """Run an op again, below autograd and under the random state that it had.

    Args:
        call: The recorded call.
        resolve: Returns the storages of arguments that the step produced.

    Returns:
        The storages of its new values, in the order in which the profile lists what the op writes.

    Raises:
        RuntimeError: If an argument from outside of the step was changed in place since the forward pass.
        PlanMismatch: If the program has emptied the storage of one.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def resolve_once(value: int, written: bool) -> torch.UntypedStorage:
        """Arguments that share a storage share it in the replay too, as in `rows[1:].add_(rows[:-1])`."""
        if value not in storages:
            storages[value] = resolve(value, written)
        return storages[value]

    args, kwargs = _rebuild(call.args, resolve_once), _rebuild(call.kwargs, resolve_once)
    storages.clear()
    facts = operator_facts(call.func)
    written, keys = written_tensors(facts, args, kwargs), argument_keys(args, kwargs)
    result = _call_below_autograd(call, args, kwargs)
    return [tensor.untyped_storage() for tensor in new_tensors(written, result_tensors(result), keys)]


def _call_below_autograd(call: RecordedCall, args: Any, kwargs: Any) -> Any:
    drawing: Any = nullcontext()
    if call.random_state is not None and call.device is not None:
        drawing = drawing_from(call.device, call.random_state)
    # If the backward pass runs inside of a mode (rarely), that mode must not see the replays.
    modes = torch._C._len_torch_dispatch_stack() > 0
    aside: Any = torch.utils._python_dispatch._disable_current_modes() if modes else nullcontext()
    # Recorded arguments are cast already, and autocast, which runs before autograd, would cast them again.
    uncast = torch._C._DisableAutocast()
    with torch._C._AutoDispatchBelowAutograd(), uncast, torch.set_grad_enabled(call.grad_enabled), aside, drawing:
        return call.func(*args, **kwargs)


def _rebuild(arguments: Any, resolve: Resolve) -> Any:
    if isinstance(arguments, MadeArgument):
        return arguments.geometry.on(resolve(arguments.value, arguments.written))
    if isinstance(arguments, OuterArgument):
        return _outer_tensor(arguments)
    if isinstance(arguments, ScratchArgument):
        return torch.zeros(arguments.size, dtype=arguments.dtype, device=arguments.device)
    if isinstance(arguments, (list, tuple)):
        rebuilt = [_rebuild(item, resolve) for item in arguments]
        return rebuilt if isinstance(arguments, list) else tuple(rebuilt)
    if isinstance(arguments, dict):
        return {key: _rebuild(item, resolve) for key, item in arguments.items()}
    return arguments


def _outer_tensor(argument: OuterArgument) -> torch.Tensor:
    if version_of(argument.tensor) != argument.version:
        raise RuntimeError(
            "one of the variables needed for recomputing an activation has been modified by an inplace operation: "
            f"[{argument.tensor.type()} {list(argument.tensor.shape)}] is at version {argument.tensor._version}; "
            f"expected version {argument.version} instead"
        )
    if _has_no_memory(argument.tensor):
        raise PlanMismatch(
            f"a replay needs a tensor {describe(argument.tensor)} whose storage is empty, such as a parameter that "
            "FSDP has not gathered: the backward pass runs in another order than when it was profiled, so profile and "
            "plan this step again"
        )
    return argument.tensor


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor has elements and its storage has none."""
    return has_plain_storage(tensor) and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0

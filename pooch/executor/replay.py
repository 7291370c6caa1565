"""Recording calls of ops, and replaying them.

A recipe carries all that the result of an op depends on: its arguments, the state of each generator that it draws from,
and the settings of PyTorch. Whether that was enough is not believed but checked, see `verification.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..torchtools.accelerators import called_drawing_from, random_snapshot
from ..torchtools.effects import StorageMap, argument_keys, new_tensors, written_tensors
from ..torchtools.operators import OperatorFacts, is_foreign, operator_facts, reads_statistics
from ..torchtools.outside import has_no_memory, refuse
from ..torchtools.ranges import replay_range
from ..torchtools.settings import Settings, settings_within, under_settings
from ..torchtools.tensors import (
    Geometry,
    find_tensors,
    has_plain_storage,
    map_tensors,
    result_tensors,
    storage_key,
    storage_of,
    version_of,
)
from ..torchtools.watch import copied_storage, with_homes

# Returns the storage of a value of the step. The flag says that the op will write into it.
Resolve = Callable[[int, bool], torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class MadeArgument:
    """A tensor argument on a value that the step produced."""

    value: int
    geometry: Geometry
    written: bool


_MOST_PRESERVED_BYTES = 16 * 2**20  # of a storage from outside that is copied because an op is about to change it


@dataclass(slots=True)
class OuterArgument:
    """A tensor argument from before the step, or one that FSDP gathers, which must not change until the replay.

    Attributes:
        tensor: The program's tensor. It may be given other data (`tensor.data = ...`) until then.
        alias: A tensor on the storage that it had, which is what the op read; after `preserve`, on a copy of it.
        version: Of the tensor when the op read it.
        is_preserved: Whether the alias is a copy, so that the tensor may change.
    """

    tensor: torch.Tensor
    alias: torch.Tensor
    version: int
    is_preserved: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OuterArgument:
        """Return what a recipe holds of a tensor.

        Of one without contents, which may be made in the step itself, the history would hold the step's hooks.
        """
        alias = tensor.detach() if has_plain_storage(tensor) or type(tensor) is FakeTensor else tensor
        if type(tensor) is FakeTensor or tensor.is_meta:
            return cls(alias, alias, version_of(alias))
        return cls(tensor, alias, version_of(tensor))

    def has_moved(self) -> bool:
        """Whether the op would read other contents now, as far as PyTorch knows."""
        if self.is_preserved or version_of(self.tensor) == self.version:
            return False
        return not has_plain_storage(self.tensor) or storage_key(self.tensor) == storage_key(self.alias)


def preserve(arguments: list[OuterArgument]) -> None:
    """Copy the storage of some arguments on one storage, which an op is about to change without the recipes' knowledge.

    Running statistics and other buffers are small. What is large stays, and its replay is refused if it changes.
    """
    ahead = [each for each in arguments if not each.is_preserved]
    if not ahead or storage_of(ahead[0].alias).nbytes() > _MOST_PRESERVED_BYTES:
        return
    copied = copied_storage(storage_of(ahead[0].alias))
    for each in ahead:
        each.alias, each.is_preserved = Geometry.of(each.alias).on(copied), True


@dataclass(frozen=True, slots=True)
class OwnGenerator:
    """A generator argument: a copy of its state before the op drew from it."""

    snapshot: torch.Generator


@dataclass(frozen=True, slots=True)
class ScratchArgument:
    """Running statistics that the op updates without reading them. A replay updates a scratch copy instead."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of an op: its arguments with tensors and generators replaced, and the state that it depends on.

    Attributes:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        grad_enabled: Whether gradients were enabled.
        settings: PyTorch's settings.
        draws: The default generators that it may draw from, by device, with their states before it ran.

    The native watch records calls of its own, which have `func`, `settings` and `reads_outside` as well.
    """

    func: Any
    args: Any
    kwargs: Any
    grad_enabled: bool
    settings: Settings
    draws: tuple[tuple[torch.device, bytes | torch.Generator], ...] = ()

    @property
    def reads_outside(self) -> bool:
        """Whether it reads a tensor from outside of the step."""
        return bool(outer_arguments(self))


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
        device: The device of the model, whose default generator an op draws from that names no other.
        gathered: Values in storages that FSDP fills and empties, which a replay reads there.
    """
    written = written_tensors(facts, args, kwargs)
    scratch = () if reads_statistics(facts, func, args) else facts.statistics

    def replaced(tensor: torch.Tensor, is_scratch: bool) -> object:
        if is_scratch:
            return ScratchArgument(tensor.shape, tensor.dtype, tensor.device)
        value = values.get(storage_key(tensor)) if has_plain_storage(tensor) else None
        if value is None or value < 0 or value in gathered:
            return OuterArgument.of(tensor)
        return MadeArgument(value, Geometry.of(tensor), storage_key(tensor) in written)

    recorded = tuple(map_tensors(partial(replaced, is_scratch=i in scratch), a) for i, a in enumerate(args))
    named = map_tensors(partial(replaced, is_scratch=False), kwargs)
    draws: tuple[tuple[torch.device, bytes | torch.Generator], ...] = ()
    if facts.random or is_foreign(func):
        own = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        recorded = tuple(map(_without_generator, recorded))
        named = {name: _without_generator(each) for name, each in named.items()}
        if not own:
            draws = tuple((each, random_snapshot(each)) for each in _drawn_from(func, args, kwargs, device))
    return RecordedCall(func, recorded, named, torch.is_grad_enabled(), settings_within(func, facts), draws)


def _without_generator(argument: Any) -> Any:
    return OwnGenerator(argument.clone_state()) if isinstance(argument, torch.Generator) else argument


def _drawn_from(func: Any, args: Any, kwargs: Any, device: torch.device) -> list[torch.device]:
    """Return the devices whose default generators an op may draw from."""
    asked = kwargs.get("device")
    named = [] if asked is None else [torch.device(asked)]
    here = named or [tensor.device for tensor in find_tensors((args, kwargs))][:1] or [device]
    if is_foreign(func):
        here += [torch.device("cpu"), device]
    return list(dict.fromkeys(here))


def is_emptied(call: RecordedCall) -> bool:
    """Whether the program has emptied the storage of an argument, as FSDP does with gathered parameters."""
    return any(has_no_memory(argument.alias) for argument in outer_arguments(call))


def outer_arguments(call: RecordedCall) -> list[OuterArgument]:
    """Return the arguments of a call from outside of the step."""
    return [argument for argument in tensor_arguments(call) if isinstance(argument, OuterArgument)]


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


def replay_call(call: Any, resolve: Resolve) -> list[torch.UntypedStorage]:
    """Run an op again, below autograd and under the random state that it had.

    Args:
        call: The recorded call, one of the native watch or a `RecordedCall`.
        resolve: Returns the storages of arguments that the step produced.

    Returns:
        The storages of its new values, in the order in which the profile lists what the op writes.

    Raises:
        ReplayDiffers: If an argument from outside of the step was changed in place since the forward pass.
        PlanMismatch: If the program has emptied the storage of one.
    """
    with replay_range(call):
        return _replay_recorded(call, resolve) if isinstance(call, RecordedCall) else _replay_native(call, resolve)


def _replay_recorded(call: RecordedCall, resolve: Resolve) -> list[torch.UntypedStorage]:
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
    return [storage_of(tensor) for tensor in new_tensors(written, result_tensors(result), keys)]


def _replay_native(call: Any, resolve: Resolve) -> list[torch.UntypedStorage]:
    if call.is_as_then:
        return call.replay(resolve)  # type: ignore[no-any-return]
    with under_settings(call.settings):
        return call.replay(resolve)  # type: ignore[no-any-return]


def _call_below_autograd(call: RecordedCall, args: Any, kwargs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        if torch._C._len_torch_dispatch_stack() == 0:
            return _call_as_then(call, args, kwargs)
        # If the backward pass runs inside of a mode (rarely), that mode must not see the replays.
        with torch.utils._python_dispatch._disable_current_modes():
            return _call_as_then(call, args, kwargs)


def _call_as_then(call: RecordedCall, args: Any, kwargs: Any) -> Any:
    # The settings say whether autocast casts here. It has run for an op that it has cast, and is off then.
    with under_settings(call.settings):
        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(call.grad_enabled)
            return _drawn(call.draws, partial(with_homes, partial(call.func, *args, **kwargs)))
        finally:
            torch._C._set_grad_enabled(before)  # a single call into C, before which no Ctrl-C can come


def _drawn(draws: Sequence[tuple[torch.device, bytes | torch.Generator]], function: Callable[[], Any]) -> Any:
    """Call a function with the generators that it draws from as they were then."""
    if not draws:
        return function()
    device, snapshot = draws[0]
    return called_drawing_from(device, snapshot, partial(_drawn, draws[1:], function))


def _rebuild(arguments: Any, resolve: Resolve) -> Any:
    if isinstance(arguments, MadeArgument):
        return arguments.geometry.on(resolve(arguments.value, arguments.written))
    if isinstance(arguments, OuterArgument):
        return _outer_tensor(arguments)
    if isinstance(arguments, ScratchArgument):
        return torch.zeros(arguments.size, dtype=arguments.dtype, device=arguments.device)
    if isinstance(arguments, OwnGenerator):
        return arguments.snapshot.clone_state()
    if isinstance(arguments, (list, tuple)):
        rebuilt = [_rebuild(item, resolve) for item in arguments]
        return rebuilt if isinstance(arguments, list) else tuple(rebuilt)
    if isinstance(arguments, dict):
        return {key: _rebuild(item, resolve) for key, item in arguments.items()}
    return arguments


def _outer_tensor(argument: OuterArgument) -> torch.Tensor:
    if argument.has_moved():
        refuse(argument.tensor, argument.version)
    if has_no_memory(argument.alias):
        refuse(argument.alias, argument.version)
    return argument.alias

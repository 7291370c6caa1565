"""A step of an optimizer on some parameters, of which everything happens or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

import torch

from ..machine.persistent import PersistentPlace, PersistentValue
from ..machine.values import Place
from ..torchtools.optimizer_slices import Load, StepNeeds
from ..torchtools.tensors import find_tensors, tensor_bytes
from .evictor import Evictor
from .rooms import Rooms

MOMENTS = 2  # times the size of a parameter: what its state is thought to take where that is not known
MOST_MOMENTS = 3  # of those that are known
TEMPORARIES = 2  # times the size of its parameters: what a slice needs beside what it changes
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NBYTES, _SIZE_BYTES, _IS_ONLY_HERE = attrgetter("nbytes"), attrgetter("size_bytes"), attrgetter("is_only_here")
_SLICES_AT_ONCE = 3  # one computes, one is copied out, and one comes
_FEWEST_THAT_MOVE = 4
_TWO_MOMENTS = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.SparseAdam,
)


def known_moments(optimizer: torch.optim.Optimizer) -> int | None:
    """How many numbers of state PyTorch's own optimizers make for each number of a parameter. None: it is not known."""
    groups, kind = optimizer.param_groups, type(optimizer)
    if kind in _TWO_MOMENTS:
        return 3 if any(group.get("amsgrad") for group in groups) else 2
    if kind is torch.optim.SGD:
        return int(any(group["momentum"] for group in groups))
    if kind is torch.optim.RMSprop:
        return 1 + any(group["momentum"] for group in groups) + any(group["centered"] for group in groups)
    if kind in (torch.optim.ASGD, torch.optim.Muon):
        return 1
    return 2 if kind in (torch.optim.Adadelta, torch.optim.Rprop) else None


def stepping_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> int:
    """How much stepping some parameters takes beside what is there: temporary tensors, and the state to come."""
    parameters = list(parameters)
    return TEMPORARIES * sum([each.nbytes for each in parameters]) + _coming_bytes(optimizer, parameters)


def _coming_bytes(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> int:
    """How much state is to come of some parameters."""
    state = optimizer.state
    if all(map(state.get, parameters)):
        return 0
    new = sum([each.nbytes for each in parameters if not state.get(each)])
    moments = known_moments(optimizer)
    return (MOMENTS if moments is None else moments) * new


def loads(
    optimizer: torch.optim.Optimizer,
    slices: Sequence[Sequence[torch.Tensor]],
    values_in: Callable[[Any], Mapping[int, PersistentValue]],
    needs: StepNeeds | None,
    free_bytes: int,
    least_bytes: int,
) -> list[Load]:
    """What each of some slices of a step takes of what is free.

    Where all that is stepped is here, nothing but temporary tensors takes room. Else there is room for the slice that
    computes beside those that come and leave meanwhile, and so many slices that most copies are made meanwhile.

    Args:
        optimizer: The optimizer.
        slices: The parameters of each.
        values_in: Gives the values that may leave of tensors in lists and tuples.
        needs: What is known of temporary tensors, or None.
        free_bytes: What is free.
        least_bytes: So much may be moved together in any case, if it is free.
    """
    alone, beside = (0.0, float(TEMPORARIES)) if needs is None else (needs.alone, needs.beside)
    state = optimizer.state
    largest_bytes = max([parameter.nbytes for parameters in slices for parameter in parameters], default=0)
    room_bytes = free_bytes - alone * largest_bytes
    taken: list[tuple[bool, float, int]] = []
    for parameters in slices:
        changed = values_in([(parameter, state.get(parameter)) for parameter in parameters]).values()
        read = values_in([parameter.grad for parameter in parameters]).values()
        taken_bytes = beside * sum(map(_NBYTES, parameters)) + _coming_bytes(optimizer, parameters)
        away_bytes = sum([value.size_bytes for value in read if value.storage is None])
        moves = away_bytes > 0 or not all(map(_IS_ONLY_HERE, changed))
        taken.append((moves, taken_bytes, away_bytes + sum(map(_SIZE_BYTES, changed))))
    if room_bytes <= 0:
        return [Load(moves, math.inf, math.inf) for moves, _, _ in taken]
    moved_bytes = sum([size_bytes for moves, _, size_bytes in taken if moves])
    moving_bytes = min(room_bytes / _SLICES_AT_ONCE, max(moved_bytes / _FEWEST_THAT_MOVE, least_bytes))
    return [
        Load(moves, taken_bytes / room_bytes, (taken_bytes + size_bytes) / moving_bytes)
        for moves, taken_bytes, size_bytes in taken
    ]


class Slice:
    """Some parameters with their state, while an optimizer steps them.

    The tier has a copy of each of them as it was, and keeps it until the slice ends. What is too small to leave is
    copied here, and so is what has not left, where there is room for that. If all of it fits, nothing of it leaves
    meanwhile. Else, as where a single parameter is too large, what each op needs comes, and leaves after it.

    Args:
        evictor: Makes the moves.
        optimizer: The optimizer.
        parameters: The parameters.
        values: Those of them, and of their state, that may leave, by their keys.
        here: The keys of those of which there is no copy in the tier, nor one under way.
        rooms: The room of values in the tier.
        room_bytes: What the slice and such copies may take.
        least_bytes: What is smaller is copied here in any case.
        keys_of: Gives the key of each tensor's storage, or None where it has no plain memory.
    """

    def __init__(
        self,
        evictor: Evictor,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        values: Mapping[int, PersistentValue],
        here: Set[int],
        rooms: Rooms,
        room_bytes: int,
        least_bytes: int,
        keys_of: Callable[[list[torch.Tensor]], list[int | None]],
    ) -> None:
        self._evictor, self._optimizer, self._parameters = evictor, optimizer, parameters
        self._rooms, self._all = rooms, list(values.values())
        self._values: list[PersistentValue] = []
        self._can_undo: list[tuple[PersistentValue, PersistentPlace]] = []
        self._stepping_bytes = stepping_bytes(optimizer, parameters)
        room_bytes -= sum([each.size_bytes for each in self._all]) + self._stepping_bytes
        self._fits = room_bytes >= 0
        have_room = set[int]()
        for key, value in values.items():
            if key in here and value.size_bytes <= room_bytes:
                room_bytes -= value.size_bytes
                have_room.add(key)
            else:
                self._values.append(value)
        self._copies: list[tuple[Sequence[torch.Tensor], Iterable[torch.Tensor]]] = []
        self._states: dict[torch.Tensor, Any] = {}
        self._is_undoable = self._copy(have_room, values.keys() - have_room, room_bytes, least_bytes, keys_of)
        if not self._is_undoable:
            self._values = []
            self._copies.clear()

    def _copy(
        self,
        have_room: Set[int],
        in_tier: Set[int],
        room_bytes: int,
        least_bytes: int,
        keys_of: Callable[[list[torch.Tensor]], list[int | None]],
    ) -> bool:
        """Copy here what is not copied to the tier, and return whether there is room for that."""
        tensors: list[torch.Tensor] = []
        alike: dict[object, list[torch.Tensor]] = {}  # of what is small, by what makes tensors fit into one
        for parameter in self._parameters:
            state = self._optimizer.state.get(parameter)
            self._states[parameter] = _nesting_of(state)
            tensors += (parameter, *find_tensors(state))
        for tensor, key in zip(tensors, keys_of(tensors), strict=True):
            if key in in_tier:
                continue
            if key not in have_room:
                size_bytes = tensor.nbytes if tensor.layout is torch.strided else tensor_bytes(tensor)
                room_bytes -= size_bytes
                if room_bytes < 0 and size_bytes >= least_bytes:
                    return False
            if key not in have_room and type(tensor) in _PLAIN and tensor.layout is torch.strided:
                alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(tensor)
            else:
                self._copies.append(([tensor], [tensor.detach().clone()]))
        with torch.no_grad():  # there may be hundreds of counts and biases
            self._copies += [(tensors, torch.stack(tensors)) for tensors in alike.values()]
        return True

    def begin(self, bring_back: Callable[[Iterable[PersistentValue]], None]) -> None:
        """Have a copy of all be in the tier, and all be there and stay, if it fits.

        Args:
            bring_back: Brings values back.
        """
        if self._fits:
            self._bring_in(bring_back)
        for value in self._values:
            self._start_out(value)
            if not self._fits:
                self._evictor.store.finish_out(value, self._evictor.stats)
        for value in self._values:
            if value.ticket is not None:
                self._evictor.store.finish_out(value, self._evictor.stats)
            place = value.place
            if value.is_copied and isinstance(place, PersistentPlace):
                place.keep(self._rooms.take_spare)
                self._can_undo.append((value, place))
        if self._fits:
            self._evictor.look(self._stepping_bytes)

    def _bring_in(self, bring_back: Callable[[Iterable[PersistentValue]], None]) -> None:
        away = [value for value in self._all if value.is_away]
        for value in self._all:
            value.is_busy = True
        away_bytes = sum([value.size_bytes for value in away])
        self._evictor.look(away_bytes + self._stepping_bytes)
        for value in away:
            self._evictor.store.start_in(value, self._evictor.stats)
        bring_back([value for value in self._all if value.ticket is not None or value.storage is None])

    def _start_out(self, value: PersistentValue) -> None:
        """Start to copy a value to the tier unless it is there."""
        store, stats = self._evictor.store, self._evictor.stats
        if value.ticket is not None:
            store.finish_out(value, stats)
        if value.is_pinned:
            value.is_copied = False  # nothing tells what was written to it
        if not value.is_copied and value.place is not None:
            store.start_out(value, value.place, stats)

    def end(self) -> None:
        """Let values leave again, and the copies go."""
        for value in self._all:
            value.is_busy = False
        for value, place in self._can_undo:
            self._give_back(value, place.keep_no_longer())

    def _give_back(self, value: PersistentValue, place: Place | None) -> None:
        if place is not None:
            self._rooms.give_back(value.size_bytes, place)

    def undo(self) -> bool:
        """Have all be as before, and return whether that can be: not if there was no room for a copy of everything."""
        are_all = self._is_undoable and len(self._can_undo) == len(self._values)
        if not (are_all and all(place.is_keeping for _, place in self._can_undo)):
            self.end()
            return False
        store, stats = self._evictor.store, self._evictor.stats
        for value in self._all:
            value.is_busy = False
        for value, place in self._can_undo:
            store.finish_out(value, stats)
            if value.state == "returning":
                store.drop(value)
            self._give_back(value, place.keep_no_longer(is_reverted=True))
            value.place, value.spare, value.is_copied = place, None, True
            value.revert()
        with torch.no_grad():
            for tensors, copies in self._copies:
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
        for parameter, state in self._states.items():
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state
        return True


def _nesting_of(state: Any) -> Any:
    """Return the same lists and dictionaries once more, with what is in them."""
    if isinstance(state, dict):
        return {name: _nesting_of(held) if isinstance(held, (dict, list)) else held for name, held in state.items()}
    return [_nesting_of(held) for held in state] if isinstance(state, list) else state

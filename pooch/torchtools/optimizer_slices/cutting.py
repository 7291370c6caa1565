"""Cuts the parameters of an optimizer into slices of so many bytes, in the order of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..tensors import find_tensors, tensor_bytes
from .shadow import Part

_SMALL_SHARE = 0.1
Stepped = Sequence[list[torch.Tensor]]  # of each group, those with a gradient


def with_gradients(groups: Sequence[dict[str, Any]]) -> Stepped:
    """Returns the parameters of each group that have a gradient, which are those that a step changes."""
    return [[parameter for parameter in group["params"] if parameter.grad is not None] for group in groups]


@dataclass(frozen=True, slots=True)
class Load:
    """What stepping some parameters together takes. More than 1: they are a slice by themselves.

    Attributes:
        moves: Whether anything of it has to come before, so that there are copies by which the step can be undone.
        share: Of the room for a slice of which nothing moves.
        moving_share: Of the room for one of which something does.
    """

    moves: bool
    share: float
    moving_share: float

    def __add__(self, other: Load) -> Load:
        return Load(self.moves or other.moves, self.share + other.share, self.moving_share + other.moving_share)

    @property
    def has_room(self) -> bool:
        """Whether there is room for it."""
        return (self.moving_share if self.moves else self.share) <= 1


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive parameters of one group among those with a gradient. It does not keep them alive."""

    group_index: int
    start: int
    stop: int


class Cutter:
    """Cuts, and remembers how it was cut until the parameters, their gradients or their state are others.

    Args:
        slice_bytes: parameters, gradients and state of a slice have at most so many bytes together. A parameter that
            has more is a slice by itself.
    """

    def __init__(self, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._has_guessed = False  # whether slices were cut before the bytes of all states were known
        self._identities: list[list[int]] = []
        self._slices: list[list[_Span]] = []
        self._first_bytes: list[float] = []  # of the first parameter in each slice, which stands for the others
        self._state_ratios: dict[int, float] = {}  # state per byte of a parameter, of each group: until it has a state

    def remembers(self, stepped: Stepped, state: Mapping[torch.Tensor, Any]) -> bool:
        """Returns whether the slices are those of the step before."""
        if self._identities != _identities(stepped):
            return False
        return self._bytes_of_firsts(stepped, state) == self._first_bytes

    def again(self, stepped: Stepped) -> list[list[Part]]:
        """Returns the slices that are remembered."""
        return [_parts(spans, stepped) for spans in self._slices]

    def guesses_nothing(self, stepped: Stepped, state: Mapping[torch.Tensor, Any]) -> bool:
        """Returns whether new slices do not depend on the state that comes to be while they are stepped."""
        unknown = chain(*(parameters for index, parameters in enumerate(stepped) if index not in self._state_ratios))
        return all(map(state.get, unknown))

    def anew(self, stepped: Stepped, state: Mapping[torch.Tensor, Any]) -> Iterator[list[Part]]:
        """Yields new slices. It counts on each of them being stepped before the next one is asked for, if it guesses.

        Args:
            stepped: the parameters that a step changes.
            state: of each parameter, as in the optimizer. In its first step it comes to be slice by slice.
        """
        slices = []
        self._has_guessed = False
        for spans in self._cut(stepped, state):
            slices.append(spans)
            yield _parts(spans, stepped)
        self._slices, self._identities = slices, [] if self._has_guessed else _identities(stepped)
        self._first_bytes = self._bytes_of_firsts(stepped, state)

    def _cut(self, stepped: Stepped, state: Mapping[torch.Tensor, Any]) -> Iterator[list[_Span]]:
        spans: list[_Span] = []
        filled_bytes = 0.0
        for group_index, parameters in enumerate(stepped):
            start = 0
            for position, parameter in enumerate(parameters):
                for_itself = group_index not in self._state_ratios and not state.get(parameter)
                size_bytes = self._bytes_of(parameter, state, group_index)
                if filled_bytes and (for_itself or filled_bytes + size_bytes > self._slice_bytes):
                    yield [*spans, *_span(group_index, start, position)]
                    spans, start, filled_bytes = [], position, 0.0
                filled_bytes += size_bytes
                if for_itself:  # its state is not known before its step, nor is that of its group
                    yield [_Span(group_index, position, position + 1)]
                    start, filled_bytes, self._has_guessed = position + 1, 0.0, True
                    self._state_ratios[group_index] = _state_bytes(state.get(parameter)) / max(1, parameter.nbytes)
            spans += _span(group_index, start, len(parameters))
        if spans:
            yield spans

    def _bytes_of_firsts(self, stepped: Stepped, state: Mapping[torch.Tensor, Any]) -> list[float]:
        firsts = [spans[0] for spans in self._slices]
        return [self._bytes_of(stepped[each.group_index][each.start], state, each.group_index) for each in firsts]

    def _bytes_of(self, parameter: torch.Tensor, state: Mapping[torch.Tensor, Any], group_index: int) -> float:
        """Bytes of a parameter, its gradient and its state, or what its state will probably have."""
        gradient_bytes = 0 if parameter.grad is None else tensor_bytes(parameter.grad)
        own = state.get(parameter)
        state_bytes = _state_bytes(own) if own else self._state_ratios.get(group_index, 0.0) * parameter.nbytes
        return parameter.nbytes + gradient_bytes + state_bytes


def joined(slices: Sequence[list[Part]], loads: Sequence[Load]) -> list[list[Part]]:
    """Returns as few slices as there is room for, each of some that follow one another.

    What does not move is only put to what does where it is small, as copies are made of it then.

    Args:
        slices: the slices, of which nothing else knows: they are put together in place.
        loads: what each of them takes.
    """
    found: list[list[Part]] = []
    last: Load | None = None
    for parts, load in zip(slices, loads, strict=True):
        if last is not None and _are_alike(last, load) and (last + load).has_room:
            _join(found[-1], parts)
            last += load
        else:
            found.append(parts)
            last = load
    return found


def _are_alike(one: Load, other: Load) -> bool:
    still = other if one.moves else one
    return one.moves == other.moves or still.moving_share <= _SMALL_SHARE


def _join(first: list[Part], then: list[Part]) -> None:
    """Add to a slice the one that follows it. There is one part of each group."""
    is_same_group = first[-1].group_index == then[0].group_index
    if is_same_group:
        first[-1].parameters.extend(then[0].parameters)
    first.extend(then[is_same_group:])


def _identities(stepped: Stepped) -> list[list[int]]:
    return [list(map(id, parameters)) for parameters in stepped]


def _state_bytes(state: Any) -> int:
    size_bytes = 0
    for each in state.values() if isinstance(state, dict) else (state,):
        is_plain = type(each) is torch.Tensor and each.layout is torch.strided  # as most are, and each step asks
        size_bytes += each.nbytes if is_plain else sum(map(tensor_bytes, find_tensors(each)))
    return size_bytes


def _span(group_index: int, start: int, stop: int) -> list[_Span]:
    return [_Span(group_index, start, stop)] if stop > start else []


def _parts(spans: Sequence[_Span], stepped: Stepped) -> list[Part]:
    return [Part(each.group_index, stepped[each.group_index][each.start : each.stop]) for each in spans]

"""A stand-in for an optimizer that has only some of its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .diversion import Step
from .small_copies import same

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one group that are stepped together."""

    group_index: int
    parameters: list[torch.Tensor]


class Shadow:
    """Shares everything with an optimizer, its state above all, but for the parameters in its groups.

    The groups of the optimizer itself are never touched: whoever looks at it in the middle of a step, or after an
    exception at whatever point, sees all parameters.

    A step may set attributes and entries of groups, as one that counts does. Each slice begins with what there was
    before the first one, and all of them have to set the same, which the optimizer is given after the last one.

    Args:
        optimizer: the optimizer.
        all_groups: whether groups without a parameter in the slice are there as well, empty. An optimizer may count on
            the place of a group.
        arguments: what its step is given beside itself.

    Attributes:
        differing: the names of attributes and entries of groups that slices have set differently.
    """

    def __init__(self, optimizer: Optimizer, all_groups: bool, arguments: Mapping[str, Any] | None = None) -> None:
        self._optimizer, self._all_groups, self._arguments = optimizer, all_groups, arguments or {}
        self._shadow: Optimizer = object.__new__(type(optimizer))
        self._attributes = dict(vars(optimizer))
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._set_attributes: dict[str, Any] | None = None  # by the slices so far
        self._set_entries: dict[int, dict[str, Any]] = {}  # likewise, by the index of the group
        self.differing = set[str]()

    def step(self, plain: Step, parts: Sequence[Part]) -> None:
        """Step some parameters.

        Args:
            plain: the step of the optimizer's class.
            parts: the parameters, at most one part of each group.
        """
        shown = {part.group_index: {**self._groups[part.group_index], "params": part.parameters} for part in parts}
        stepped = set(shown)
        if self._all_groups:
            shown = {index: shown.get(index) or {**group, "params": []} for index, group in enumerate(self._groups)}
        attributes = vars(self._shadow)
        attributes.clear()
        attributes.update(self._attributes, param_groups=list(shown.values()))
        plain(self._shadow, **self._arguments)
        self._set_attributes = self._agreed(self._set_attributes, _news(attributes, self._attributes, "param_groups"))
        for index, group in shown.items():
            entries = _news(group, self._groups[index], "params")
            if entries or index in stepped:  # some pass over a group that is empty
                self._set_entries[index] = self._agreed(self._set_entries.get(index), entries)

    def _agreed(self, before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
        """Return what a slice has set, and note what an earlier one has set differently."""
        if before is not None:
            self.differing |= {name for name in before.keys() | now.keys() if not _are_same(before, now, name)}
        return now

    def finish(self) -> set[str]:
        """Give the optimizer what its step has set, and return the names of that."""
        vars(self._optimizer).update(self._set_attributes or {})
        for index, entries in self._set_entries.items():
            self._optimizer.param_groups[index].update(entries)
        return {name for each in (self._set_attributes or {}, *self._set_entries.values()) for name in each}


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    return name in one and name in other and same(one[name], other[name])


def _news(now: Mapping[str, Any], before: Mapping[str, Any], without: str) -> dict[str, Any]:
    return {name: value for name, value in now.items() if before.get(name, _ABSENT) is not value and name != without}

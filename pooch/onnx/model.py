"""The model that a graph becomes: a module for each node, called in the file's order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .operation import Operation


@dataclass(frozen=True)
class Step:
    """One call: the operation, the values that it reads (None: absent) and makes, and those read for the last time."""

    operation: Operation
    reads: tuple[str | None, ...]
    makes: tuple[str, ...]
    last_reads: tuple[str, ...]


class Scope(nn.Module):
    """A module that only holds others, so that names form the tree that they had in the exported model."""


class OnnxModel(nn.Module):
    """Runs a graph's nodes in their order.

    Attributes:
        input_names, output_names: as in the file.
        outputs_like: the outputs as tensors without memory, for their shapes and types.
        source, source_digest: the file that it came from.
        stored: {name in the file: path of the parameter or buffer here} of what training changes.
    """

    def __init__(
        self, input_names: Sequence[str], output_names: Sequence[str], source: Path, source_digest: str
    ) -> None:
        super().__init__()
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.source, self.source_digest = source, source_digest
        self.outputs_like: list[torch.Tensor] = []
        self.stored: dict[str, str] = {}
        self._steps: list[Step] = []
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._scopes: dict[tuple[str, ...], tuple[nn.Module, str]] = {(): (self, "")}

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The output, or a tuple of them where there are several."""
        values = dict(zip(self.input_names, inputs, strict=True))
        for step in self._steps:
            made = step.operation(*[self._value(values, name) for name in step.reads])
            for name in step.last_reads:  # as Python's locals would, so that memory is what it was in the source
                values.pop(name, None)
            results = made if isinstance(made, tuple | list) else (made,)
            values.update((name, result) for name, result in zip(step.makes, results, strict=False) if name)
            del made, results
        outputs = tuple(self._value(values, name) for name in self.output_names)
        found = [output for output in outputs if output is not None]
        return found[0] if len(found) == 1 else tuple(found)

    def _value(self, values: dict[str, torch.Tensor], name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        if name in values:
            return values[name]
        owner, attribute = self._owners[name]
        found: torch.Tensor = getattr(owner, attribute)
        return found

    def store(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Take in a tensor of the file.

        Args:
            name: of the tensor in the file.
            tensor: its contents.
            kind: "parameter", "statistics" (a buffer that training changes) or "constant".
        """
        parts = path_of(name)
        scope, prefix = self._scope(parts[:-1])
        attribute = _free_name(scope, parts[-1])
        if kind == "parameter":
            scope.register_parameter(attribute, nn.Parameter(tensor))
        else:
            scope.register_buffer(attribute, tensor, persistent=kind == "statistics")
        self._owners[name] = (scope, attribute)
        if kind != "constant":
            self.stored[name] = prefix + attribute

    def has_stored(self, name: str) -> bool:
        """Whether a value is a parameter, statistics or a constant."""
        return name in self._owners

    def add(self, step: Step) -> None:
        """Append a call; the operation becomes a submodule at the path that its node has."""
        scope, _ = self._scope(step.operation.node.path)
        scope.add_module(_free_name(scope, _identifier(step.operation.node.name)), step.operation)
        self._steps.append(step)

    def _scope(self, parts: tuple[str, ...]) -> tuple[nn.Module, str]:
        """The module for a path, made where it is missing, and what stands before the names of its own things."""
        if parts not in self._scopes:
            outer, prefix = self._scope(parts[:-1])
            name = _free_name(outer, parts[-1])
            outer.add_module(name, scope := Scope())
            self._scopes[parts] = scope, f"{prefix}{name}."
        return self._scopes[parts]


def path_of(name: str) -> tuple[str, ...]:
    """A name of the file as names of attributes: letters, digits and _ alone, since it is a stranger's text."""
    return tuple(_identifier(part) for part in re.split(r"[./]", name) if part) or ("value",)


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII)[:80] or "_"


def _free_name(scope: nn.Module, wanted: str) -> str:
    """The name, or the next one that is free: not a module's own attribute, not taken."""
    name, number = wanted, 1
    while hasattr(scope, name):
        number += 1
        name = f"{wanted}_{number}"
    return name

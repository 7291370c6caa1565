"""The model built from a graph: a module for each node, called in the order of the file."""

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
    """One call of an operation.

    Attributes:
        operation: to call.
        reads: names of its inputs; None for an absent one.
        makes: names of its outputs; "" for one that is not held.
        last_reads: names of the inputs that are read for the last time.
    """

    operation: Operation
    reads: tuple[str | None, ...]
    makes: tuple[str, ...]
    last_reads: tuple[str, ...]


class Scope(nn.Module):
    """A module that only holds others, to reproduce the tree of names in the exported model."""


class OnnxModel(nn.Module):
    """Runs a graph's nodes in their order.

    Attributes:
        input_names: as in the file.
        output_names: as in the file.
        outputs_like: the outputs as meta tensors, for their shapes and types.
        source: path of the file.
        source_digest: digest of the file.
        stored: {name in the file: path of the parameter or buffer here} for everything that training changes.
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
        """Return the output, or a tuple if there are several."""
        values = dict(zip(self.input_names, inputs, strict=True))
        for step in self._steps:
            made = step.operation(*[self._value(values, name) for name in step.reads])
            for name in step.last_reads:  # as Python's locals would be, so that memory is as in the source
                values.pop(name, None)
            results = made if isinstance(made, tuple) else (made,)
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
        """Store a tensor of the file.

        Args:
            name: its name in the file.
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
        """Append a call; its operation becomes a submodule at the path of its node."""
        scope, _ = self._scope(step.operation.node.path)
        scope.add_module(_free_name(scope, _identifier(step.operation.node.name)), step.operation)
        self._steps.append(step)

    def _scope(self, parts: tuple[str, ...]) -> tuple[nn.Module, str]:
        """Return the module for a path, creating it if necessary, and the prefix of the names in it."""
        if parts not in self._scopes:
            outer, prefix = self._scope(parts[:-1])
            name = _free_name(outer, parts[-1])
            outer.add_module(name, scope := Scope())
            self._scopes[parts] = scope, f"{prefix}{name}."
        return self._scopes[parts]


def path_of(name: str) -> tuple[str, ...]:
    """Split a name of the file into attribute names of letters, digits and _ alone, since files are not trusted."""
    return tuple(_identifier(part) for part in re.split(r"[./]", name) if part) or ("value",)


def _identifier(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII)[:80] or "_"


def _free_name(scope: nn.Module, wanted: str) -> str:
    """Return the name, or a numbered variant if the module has such an attribute already."""
    name, number = wanted, 1
    while hasattr(scope, name):
        number += 1
        name = f"{wanted}_{number}"
    return name

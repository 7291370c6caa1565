"""A node of an ONNX graph as a module, so that ops in a profile carry the name of their layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .registry import Operator

ABSENT = ""  # how ONNX writes an omitted input or output


@dataclass(frozen=True)
class Node:
    """A node as described in the file.

    Attributes:
        kind: name of the operator.
        name: name of the node, or one derived from its first output.
        opset: version of the default domain.
        inputs: names of values; "" for an omitted one.
        outputs: names of values; "" for an omitted one.
        attributes: numbers, strings, lists of these, and tensors.
        path: names of the modules that the node came from, according to the exporter.
        read_outputs: positions of the outputs that are read.
        origin: the PyTorch operator from which it was exported; "" if the file does not name it.
    """

    kind: str
    name: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    read_outputs: frozenset[int] = frozenset()
    origin: str = ""


class HostNumbers:
    """The contents of a known input as plain numbers.

    Reading them is not an op of the step, and works even if tensors have no contents (mode "fake").

    Args:
        tensor: a real tensor.

    Attributes:
        dtype: of the tensor.
        dim: number of its dimensions.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.dim = tensor.dtype, tensor.dim()
        self._numbers: list[Any] = tensor.reshape(-1).tolist()

    def numel(self) -> int:
        """Return the number of elements."""
        return len(self._numbers)

    def tolist(self) -> list[Any]:
        """Return all elements as a flat list."""
        return list(self._numbers)

    def item(self) -> Any:
        """Return the first element."""
        return self._numbers[0]


class Operation(nn.Module):
    """Runs one node.

    Args:
        node: as described in the file.
        operator: how the node runs.
        known: the known inputs by position, as `HostNumbers` or Python numbers.
        mode: how batch norms and dropouts behave: "exported" (as in the file), "train" or "eval".
    """

    def __init__(self, node: Node, operator: Operator, known: Mapping[int, Any], mode: str) -> None:
        super().__init__()
        self.node = node
        self._operator = operator
        self._known = dict(known)
        self._mode = mode
        self._read_attributes: set[str] = set()

    def forward(self, *tensors: torch.Tensor | None) -> Any:
        """Return the output, or a tuple of outputs.

        Args:
            tensors: the inputs that are not known, in their order; None for an absent one.
        """
        arguments: list[Any] = list(tensors)
        for position in sorted(self._known):
            arguments.insert(position, self._known[position])
        return self._operator.run(self, *arguments)

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return self.node.opset

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default."""
        self._read_attributes.add(name)
        return self.node.attributes.get(name, default)

    def unread(self) -> list[str]:
        """Return the attributes of the node that make a difference and that no call has read."""
        return sorted(self.node.attributes.keys() - self._read_attributes - self._operator.ignores)

    def reads(self, output: int) -> bool:
        """Return whether an output is read."""
        return output in self.node.read_outputs

    def trains(self, as_exported: bool) -> bool:
        """Return whether a batch norm or dropout currently behaves as in training."""
        wanted = {"train": True, "eval": False}.get(self._mode, as_exported)
        return self.training and wanted

    def axes(self, rank: int, given: HostNumbers | None = None) -> list[int] | None:
        """Return the axes from an input or an attribute as nonnegative numbers; None if there is neither."""
        raw = self.get("axes") if given is None else integers(given)
        return None if raw is None else [axis % rank if rank else 0 for axis in raw]

    def extra_repr(self) -> str:
        """Return the name of the operator, for `repr`."""
        return self.node.kind


def integers(values: HostNumbers | Sequence[int]) -> list[int]:
    """Convert a known input to a list of ints."""
    return [int(each) for each in (values.tolist() if isinstance(values, HostNumbers) else values)]


def number(value: HostNumbers | None, default: float) -> float:
    """Convert a known input of one element to a float."""
    return default if value is None else float(value.item())

"""One node of an ONNX graph as a module, so that ops of a profile carry the name of the layer that they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .registry import Operator

ABSENT = ""  # how ONNX writes an input or output that is left out


@dataclass(frozen=True)
class Node:
    """What the file says of a node.

    Attributes:
        kind: the operator's name. name: the node's own, or one made from its first output.
        opset: version of the default domain.
        attributes: numbers, texts, lists of them, and tensors.
        inputs, outputs: names of values; "" where one is left out.
        path: names of the modules that the exporter says it came from.
        read_outputs: positions of the outputs that somebody reads.
        origin: PyTorch's operator that it was exported from, "" where the file does not say.
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
    """The contents of an input that is known already, as plain numbers: to read them is no op of the step, and works
    where tensors have no contents (mode "fake").

    Args:
        tensor: a real one.

    Attributes:
        dtype: of the tensor.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._numbers: list[Any] = tensor.reshape(-1).tolist()

    def numel(self) -> int:
        """How many there are."""
        return len(self._numbers)

    def tolist(self) -> list[Any]:
        """All of them, in a row."""
        return list(self._numbers)

    def item(self) -> Any:
        """The first one."""
        return self._numbers[0]


class Operation(nn.Module):
    """Runs one node.

    Args:
        node: what the file says.
        operator: how its kind runs.
        known: inputs that are known already, by position: `HostNumbers`, or Python numbers.
        mode: "exported", "train" or "eval": whether the file decides how batch norms and dropouts behave.
    """

    def __init__(self, node: Node, operator: Operator, known: Mapping[int, Any], mode: str) -> None:
        super().__init__()
        self.node = node
        self._operator = operator
        self._known = dict(known)
        self._mode = mode

    def forward(self, *tensors: torch.Tensor | None) -> Any:
        """Its outputs: a tensor, or a tuple of them.

        Args:
            tensors: the inputs that are not known already, in their order; None for an absent one.
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
        """An attribute, or the default."""
        return self.node.attributes.get(name, default)

    def reads(self, output: int) -> bool:
        """Whether anybody reads this output."""
        return output in self.node.read_outputs

    def trains(self, as_exported: bool) -> bool:
        """Whether a batch norm or dropout behaves as in training now."""
        wanted = {"train": True, "eval": False}.get(self._mode, as_exported)
        return self.training and wanted

    def axes(self, rank: int, given: HostNumbers | None = None) -> list[int] | None:
        """Axes from an input or from the attribute, none negative; None where neither is there."""
        raw = self.get("axes") if given is None else integers(given)
        return None if raw is None else [axis % rank if rank else 0 for axis in raw]

    def extra_repr(self) -> str:
        """For people: the operator."""
        return self.node.kind


def integers(values: HostNumbers | Sequence[int]) -> list[int]:
    """A known input as a list of ints."""
    return [int(each) for each in (values.tolist() if isinstance(values, HostNumbers) else values)]


def number(value: HostNumbers | None, default: float) -> float:
    """A known input of one element."""
    return default if value is None else float(value.item())


def product(values: Sequence[int]) -> int:
    """Of a shape."""
    return math.prod(values)

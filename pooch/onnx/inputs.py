"""Random data of the right shape, type and range for each input."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import torch

from .dimensions import InputShape

_KEEPS_VALUES = {
    "Identity",
    "Cast",
    "Reshape",
    "Unsqueeze",
    "Squeeze",
    "Expand",
    "Flatten",
    "Transpose",
    "Slice",
    "Split",
}


def random_inputs(graph: onnx.GraphProto, shapes: Sequence[InputShape], seed: int) -> tuple[torch.Tensor, ...]:
    """Make standard normal numbers for floats, valid indices for inputs that index a table, ones for other integers.

    An integer that is not an index is nearly always a mask, hence ones.
    """
    generator = torch.Generator().manual_seed(seed)
    bounds = index_bounds(graph)
    made = []
    for shape in shapes:
        if shape.dtype.is_floating_point:
            made.append(torch.randn(shape.sizes, generator=generator).to(shape.dtype))
        elif shape.name in bounds:
            made.append(torch.randint(bounds[shape.name], shape.sizes, generator=generator).to(shape.dtype))
        else:
            made.append(torch.ones(shape.sizes, dtype=shape.dtype))
    return tuple(made)


def index_bounds(graph: onnx.GraphProto) -> dict[str, int]:
    """Return {value: rows of the smallest table that it indexes}, followed through operators that keep values."""
    shapes = {stored.name: list(stored.dims) for stored in graph.initializer}
    bounds: dict[str, int] = {}
    for node in reversed(graph.node):
        if node.op_type == "Gather" and node.input[0] in shapes:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            _lower(bounds, node.input[1], shapes[node.input[0]][axis])
        elif node.op_type in _KEEPS_VALUES:
            for output in node.output:
                if output in bounds:
                    _lower(bounds, node.input[0], bounds[output])
    return bounds


def _lower(bounds: dict[str, int], name: str, bound: int) -> None:
    bounds[name] = min(bound, bounds.get(name, bound))

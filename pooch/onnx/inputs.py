"""Random data of the right shape, type and range for each input."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
import psutil
import torch

from ..ground.errors import WorkloadError
from ..ground.units import format_bytes
from .dimensions import InputShape
from .trainable import MOVES

MOST_FAKE_BYTES = 1 << 60  # of inputs without contents, as everywhere in a profile


def random_inputs(graph: onnx.GraphProto, shapes: Sequence[InputShape], seed: int) -> tuple[torch.Tensor, ...]:
    """Make standard normal numbers for floats, valid indices for inputs that index a table, ones for other integers.

    An integer that is not an index is nearly always a mask, hence ones.

    Raises:
        WorkloadError: they are larger than the memory of this machine, in a file or by its open dimensions.
    """
    _check_size(shapes)
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


def _check_size(shapes: Sequence[InputShape]) -> None:
    size_bytes = sum(math.prod(shape.sizes) * shape.dtype.itemsize for shape in shapes)
    is_fake = torch._C._len_torch_dispatch_stack() > 0  # these take no memory
    if size_bytes > (MOST_FAKE_BYTES if is_fake else psutil.virtual_memory().total):
        raise WorkloadError(
            f"its inputs take {format_bytes(size_bytes)}, more than there is memory: give smaller dimensions"
        )


def index_bounds(graph: onnx.GraphProto) -> dict[str, int]:
    """Return {value: rows of the smallest table that it indexes}, followed through operators that keep values."""
    shapes = {stored.name: list(stored.dims) for stored in graph.initializer}
    bounds: dict[str, int] = {}
    for node in reversed(graph.node):
        if node.op_type == "Gather" and node.input[0] in shapes:
            axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
            _lower(bounds, node.input[1], shapes[node.input[0]][axis])
        elif node.op_type in MOVES:
            for output in node.output:
                if output in bounds:
                    _lower(bounds, node.input[0], bounds[output])
    return bounds


def _lower(bounds: dict[str, int], name: str, bound: int) -> None:
    bounds[name] = min(bound, bounds.get(name, bound))

"""Decides which stored tensors are trained.

PyTorch's exporter marks parameters and buffers. Weights that it transposed or merged have no such mark, nor do any in
the files of other exporters; for these, the use of a tensor decides.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable

import numpy
import onnx

from .functions import all_nodes

FLOATS = {
    onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16,
}  # fmt: skip
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"

# Operator: positions at which a stored tensor is always a weight.
_WEIGHTS: dict[str, set[int]] = {
    "Conv": {1, 2}, "ConvTranspose": {1, 2}, "Gemm": {0, 1, 2}, "MatMul": {0, 1}, "Gather": {0}, "PRelu": {1},
    "LSTM": {1, 2, 3}, "GRU": {1, 2, 3}, "RNN": {1, 2, 3}, "Einsum": {0, 1},
}  # fmt: skip
# Positions at which it is a weight in files without marks. In files with marks, the exporter filled it in.
_LIKELY: dict[str, set[int]] = {
    "BatchNormalization": {1, 2}, "InstanceNormalization": {1, 2}, "LayerNormalization": {1, 2},
    "GroupNormalization": {1, 2}, "RMSNormalization": {1},
    "Add": {0, 1}, "Sub": {0, 1}, "Mul": {0, 1}, "Div": {0, 1},
}  # fmt: skip
# Operators that only move data, or convert it.
MOVES = {"Transpose", "Reshape", "Identity", "Cast", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split", "Flatten"}
_STATISTICS = {"BatchNormalization": {3, 4}}


def trained_names(graph: onnx.GraphProto, freeze: str = "") -> set[str]:
    """Return the names of the initializers that are parameters.

    Args:
        graph: graph of the file.
        freeze: a pattern such as `encoder.*` of names that are not trained.
    """
    marks = _marks(graph)
    places = _places(graph)
    chosen = set()
    for stored in graph.initializer:
        if stored.data_type not in FLOATS or (freeze and fnmatch.fnmatchcase(stored.name, freeze)):
            continue
        mark = marks.get(stored.name)
        if mark == "PARAMETER" or (mark is None and _by_place(stored, places[stored.name], bool(marks))):
            chosen.add(stored.name)
    return chosen - running_statistics(graph)


def running_statistics(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the initializers that batch norms use as mean and variance."""
    return {
        node.input[position]
        for node in all_nodes(graph.node)
        for position in _STATISTICS.get(node.op_type, ())
        if position < len(node.input)
    }


def _marks(graph: onnx.GraphProto) -> dict[str, str]:
    """Return {name: PARAMETER, BUFFER, ...} as written by PyTorch's exporter."""
    stored = {tensor.name for tensor in graph.initializer}
    found: dict[str, str] = {}
    for value in graph.value_info:
        for entry in value.metadata_props:
            if entry.key == _KIND and value.name in stored:
                found[value.name] = entry.value
    return found


def _places(graph: onnx.GraphProto) -> dict[str, set[tuple[str, int]]]:
    """Return {value: operators and positions that use it}, followed through operators that only move data."""
    places: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for node in reversed(list(all_nodes(graph.node))):
        for position, name in enumerate(node.input):
            if node.op_type in MOVES and position == 0:
                for output in node.output:
                    places[name] |= places[output]
            elif name:
                places[name].add((node.op_type, position))
    return places


def _by_place(stored: onnx.TensorProto, places: Iterable[tuple[str, int]], has_marks: bool) -> bool:
    places = list(places)
    if any(position in _WEIGHTS.get(kind, ()) for kind, position in places):
        return True
    likely = any(position in _LIKELY.get(kind, ()) for kind, position in places)
    if has_marks or not likely or not stored.dims:  # a single number is an epsilon or a scale
        return False
    # A mask holds minus infinity or the lowest float; a weight does not.
    values = onnx.numpy_helper.to_array(stored).astype("float32")
    return bool(numpy.isfinite(values).all() and (values > numpy.finfo("float32").min / 2).all() and values.size > 1)

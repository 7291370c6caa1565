"""The shapes to train at: fixed by the file, or given by --batch-size and --set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import torch

from ..ground.errors import UsageError, WorkloadError
from .registry import UnsupportedVariant
from .types import torch_type


@dataclass(frozen=True, slots=True)
class InputShape:
    """An input of the graph.

    Attributes:
        name: in the file.
        dtype: of its elements.
        sizes: of its dimensions.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]


def input_shapes(
    graph: onnx.GraphProto, batch_size: int | None, settings: Mapping[str, object]
) -> tuple[InputShape, ...]:
    """Return the shapes of all inputs that are not initializers, with every size known.

    Args:
        graph: graph of the file.
        batch_size: size of the first dimension of the inputs if the file leaves it open. None: 1.
        settings: sizes of the other open dimensions, by name.

    Raises:
        UsageError: an open dimension is not given, a given one is unknown, or the batch size is fixed in the file.
        WorkloadError: an input is not a tensor, or has an unsupported type.
    """
    stored = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in stored]
    resolved = _Sizes(batch_size, settings)
    shapes = tuple(_shape(value, resolved) for value in inputs)
    resolved.refuse_unknown()
    if batch_size is not None and shapes and not any(s.sizes and s.sizes[0] == batch_size for s in shapes):
        fixed = next((s.sizes[0] for s in shapes if s.sizes), 0)
        raise UsageError(
            f"the model's batch size is fixed at {fixed}: leave --batch-size out, or export it with a dynamic batch"
        )
    return shapes


class _Sizes:
    """Looks up the sizes of open dimensions, and collects their names."""

    def __init__(self, batch_size: int | None, settings: Mapping[str, object]) -> None:
        self._batch_size, self._settings = batch_size, settings
        self._open: list[str] = []
        self._missing: list[str] = []
        self._batch_name = ""

    def of(self, dimension: onnx.TensorShapeProto.Dimension, value: str, axis: int) -> int:
        """Return the size of a dimension."""
        if dimension.HasField("dim_value") and dimension.dim_value > 0:
            return int(dimension.dim_value)
        name = _key(dimension.dim_param or f"{value}_{axis}")
        given = self._settings.get(name)
        self._open.append(name)
        if given is not None:
            if not isinstance(given, int) or isinstance(given, bool) or given <= 0:
                raise UsageError(
                    f"the size {name}={given} is not a positive integer: write --set {name}=16, for example"
                )
            return given
        if axis == 0 and self._batch_name in ("", name):
            self._batch_name = name
        if name == self._batch_name or axis == 0:
            return self._batch_size or 1
        self._missing.append(name)
        return 1

    def refuse_unknown(self) -> None:
        """Check that every open dimension has a size, and every setting a dimension."""
        if self._missing:
            names = ", ".join(dict.fromkeys(self._missing))
            example = " ".join(f"--set {name}=16" for name in dict.fromkeys(self._missing))
            raise UsageError(f"the model leaves these dimensions open: {names}: give {example}, for example")
        unknown = [name for name in self._settings if name not in self._open]
        if unknown:
            names = ", ".join(dict.fromkeys(self._open)) or "none"
            raise UsageError(
                f"the model has no open dimension or setting {unknown[0]!r}: its open dimensions are {names}"
            )


def _key(text: str) -> str:
    """Return a dimension's name as `--set` takes it."""
    cleaned = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "dimension"
    return f"d{cleaned}" if cleaned[0].isdigit() else cleaned


def _shape(value: onnx.ValueInfoProto, sizes: _Sizes) -> InputShape:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise WorkloadError(
            f"the input {value.name!r} is not a tensor of known rank: export the model with tensors as inputs"
        )
    try:
        dtype = torch_type(tensor.elem_type)
    except UnsupportedVariant as error:
        raise WorkloadError(
            f"the input {value.name!r} has {error}, which cannot be trained: export another type"
        ) from error
    name = _key(value.name)
    return InputShape(value.name, dtype, tuple(sizes.of(d, name, axis) for axis, d in enumerate(tensor.shape.dim)))

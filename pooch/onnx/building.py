"""Builds a model at fixed shapes from a checked graph.

Every node runs once during the build: on meta tensors if its inputs are data, and for real if all of its inputs are
known. Known results are folded, which removes the shape arithmetic that exporters write (Shape, Gather, Concat,
Reshape), and a node that cannot run is reported here by name.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx
import torch
import torch.utils._python_dispatch

from ..ground.errors import WorkloadError
from ..ground.wording import error_text
from .dimensions import InputShape
from .functions import all_nodes
from .model import OnnxModel, Step, path_of
from .operation import ABSENT, HostNumbers, Node, Operation
from .reading import digest_of
from .registry import BRANCH, OPERATORS, UnsupportedVariant
from .trainable import running_statistics
from .types import tensor_of

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
# What nodes compute from constants alone is computed during the build. Two numbers in a file can ask for any amount.
MOST_FOLDED_ELEMENTS = 1 << 27
_FOLDED_FOR_EACH_STORED = 8
_MOST_HOST_NUMBERS = 1 << 20  # elements of shapes, axes and pads

Value = torch.Tensor | list[torch.Tensor]  # a list: a sequence in the sense of ONNX


def build_model(
    graph: onnx.GraphProto, opset: int, shapes: Sequence[InputShape], trained: set[str], mode: str, path: Path
) -> OnnxModel:
    """Build a trainable module from a graph.

    Args:
        graph: graph of the file.
        opset: version of the operators.
        shapes: shapes of all inputs, with every size known.
        trained: names of the initializers that become parameters.
        mode: how batch norms and dropouts behave: "exported", "train" or "eval".
        path: path of the file, for messages and for writing the model back.

    Raises:
        WorkloadError: a node cannot run; the message names it.
    """
    outputs = [value.name for value in graph.output]
    model = OnnxModel([shape.name for shape in shapes], outputs, path.resolve(), digest_of(path))
    is_fake = torch._C._len_torch_dispatch_stack() > 0
    with torch.utils._python_dispatch._disable_current_modes() if is_fake else nullcontext():
        builder = _Builder(model, graph, trained, mode, path)  # folding needs contents, which fake tensors lack
        builder.take_inputs(shapes)
        for node in _nodes(graph, opset, path):
            builder.take(node)
        builder.finish()
    if is_fake:
        _copy_stored(model)
    return model


def _copy_stored(model: OnnxModel) -> None:
    """Copy the stored tensors under the active modes, so that the copies are fake if the modes make fake tensors."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.clone()


class _Builder:
    """Keeps the values seen so far: `_known` with their contents, `_data` as meta tensors."""

    def __init__(self, model: OnnxModel, graph: onnx.GraphProto, trained: set[str], mode: str, path: Path) -> None:
        self._model, self._mode, self._path = model, mode, path
        self._known: dict[str, Value] = {}
        self._data: dict[str, Value] = {}
        self._steps: list[Step] = []
        self._renamed: dict[str, str] = {}  # what is made in the branches that are being taken
        self._branches = 0
        stored_elements = sum(math.prod(stored.dims) for stored in graph.initializer)
        self._foldable_elements = max(MOST_FOLDED_ELEMENTS, _FOLDED_FOR_EACH_STORED * stored_elements)
        statistics = running_statistics(graph)
        for stored in graph.initializer:
            tensor = self._tensor(stored)
            if stored.name in trained or stored.name in statistics:
                kind = "parameter" if stored.name in trained else "statistics"
                model.store(stored.name, tensor, kind)
                self._data[stored.name] = torch.empty_like(tensor, device="meta")
            else:
                self._known[stored.name] = tensor

    def _tensor(self, stored: onnx.TensorProto) -> torch.Tensor:
        try:
            return tensor_of(stored)
        except UnsupportedVariant as error:
            raise WorkloadError(
                f"{self._path}: the initializer {stored.name!r} has {error}: store another type"
            ) from error

    def take_inputs(self, shapes: Sequence[InputShape]) -> None:
        """Add the graph's inputs, as meta tensors."""
        for shape in shapes:
            self._data[shape.name] = torch.empty(shape.sizes, dtype=shape.dtype, device="meta")

    def take(self, node: Node) -> None:
        """Add a node: its results become known, or it becomes a step."""
        if node.kind == BRANCH:
            self._take_branch(node)
            return
        operator = OPERATORS[node.kind]
        present = {position for position, name in enumerate(node.inputs) if name != ABSENT}
        needed = present if operator.contents is None else present & operator.contents
        is_known = operator.folds and all(node.inputs[position] in self._known for position in needed)
        known = {
            position: self._argument(node, position)
            for position, name in enumerate(node.inputs)
            if position in operator.host or self._as_number(node, position) or isinstance(self._known.get(name), list)
        }
        operation = Operation(node, operator, known, self._mode)
        reads = tuple(
            None if name == ABSENT else name for position, name in enumerate(node.inputs) if position not in known
        )
        if is_known:
            self._count_folded(operation, reads)
        results = self._run(operation, reads, is_known)
        self._refuse_unread(operation)
        if is_known:
            self._known.update(zip(node.outputs, results, strict=False))
            return
        self._data.update((name, result) for name, result in zip(node.outputs, results, strict=False) if name)
        self._steps.append(Step(operation, reads, node.outputs, ()))

    def _take_branch(self, node: Node) -> None:
        """Add the nodes of the graph that the condition chooses."""
        condition = self._known_value(node, node.inputs[0])
        if isinstance(condition, list) or condition.numel() != 1:
            raise WorkloadError(self._refusal(node, "its condition is not one number"))
        graph = node.attributes["then_branch" if condition.item() else "else_branch"]
        made = [stored.name for stored in graph.initializer] + [name for each in graph.node for name in each.output]
        outer, self._branches = self._renamed, self._branches + 1
        # Two branches may use the same name for different values.
        self._renamed = outer | {name: f"{name}.branch{self._branches}" for name in made if name != ABSENT}
        for stored in graph.initializer:
            self._known[self._renamed[stored.name]] = self._tensor(stored)
        for inner in _nodes(graph, node.opset, self._path, self._renamed):
            self.take(inner)
        for result, name in zip(graph.output, node.outputs, strict=True):
            source = self._renamed.get(result.name, result.name)
            self.take(Node("Identity", f"{node.name}_{result.name}", node.opset, (source,), (name,)))
        self._renamed = outer

    def _known_value(self, node: Node, name: str) -> Value:
        if name not in self._known:
            raise WorkloadError(self._refusal(node, f"its input {name!r} depends on the data, but shapes are fixed"))
        return self._known[name]

    def _argument(self, node: Node, position: int) -> Any:
        name = node.inputs[position]
        if name == ABSENT:
            return None
        value = self._known_value(node, name)
        if isinstance(value, list):  # an empty one: a sequence that is to be filled
            return value
        if self._as_number(node, position):
            return value.item()
        if math.prod(value.shape) > _MOST_HOST_NUMBERS:
            raise WorkloadError(self._refusal(node, f"its input {name!r} has {math.prod(value.shape)} elements"))
        return HostNumbers(value)

    def _as_number(self, node: Node, position: int) -> bool:
        """Whether an input is a scalar constant beside a tensor: PyTorch's ops save nothing for a Python number."""
        operator, name = OPERATORS[node.kind], node.inputs[position]
        if position not in operator.numbers or name not in self._known:
            return False
        known = self._known[name]
        if isinstance(known, list) or known.dim():
            return False
        others = [other for other in node.inputs if other != name]
        # Not two numbers, nor a number beside a known tensor: types would be lost.
        return any(other in self._data for other in others)

    def _count_folded(self, operation: Operation, reads: Sequence[str | None]) -> None:
        """Count the elements of folded constants, using meta tensors, and refuse more than a model can need.

        Raises:
            WorkloadError: there are too many; gives the number of elements.
        """
        arguments = [None if name is None else self._value(operation.node, name, False) for name in reads]
        try:
            with torch.no_grad(), torch.device("meta"):
                made = operation(*arguments)
        except Exception:  # noqa: BLE001 - needs contents or cannot run: running it will show
            return
        tensors = made if isinstance(made, tuple) else (made,)
        elements = sum(math.prod(each.shape) for each in tensors if isinstance(each, torch.Tensor))
        self._foldable_elements -= elements
        if self._foldable_elements < 0:
            text = f"it makes a constant of {elements} elements, which exceeds the limit on all constants of this file"
            raise WorkloadError(self._refusal(operation.node, text))

    def _refuse_unread(self, operation: Operation) -> None:
        """Refuse an attribute that was not looked at: newer versions of an operator have more of them."""
        node = operation.node
        for name in operation.unread():
            if node.attributes[name] != _default(node, name):
                text = f"this form is not supported: {name}={node.attributes[name]!r}"
                raise WorkloadError(self._refusal(node, text))

    def _run(self, operation: Operation, reads: Sequence[str | None], is_known: bool) -> tuple[Value, ...]:
        arguments = [None if name is None else self._value(operation.node, name, is_known) for name in reads]
        try:
            with torch.no_grad():
                made = operation(*arguments)
        except UnsupportedVariant as error:
            raise WorkloadError(self._refusal(operation.node, f"this form is not supported: {error}")) from error
        except Exception as error:  # PyTorch raises many types for shapes and types that do not fit
            text = error_text(error, type(error).__name__)
            raise WorkloadError(self._refusal(operation.node, text)) from error
        return made if isinstance(made, tuple) else (made,)

    def _value(self, node: Node, name: str, is_known: bool) -> Value:
        if name in self._known:
            known = self._known[name]
            return known if is_known or isinstance(known, list) else known.to("meta")
        if name in self._data:
            return self._data[name]
        raise WorkloadError(self._refusal(node, f"no node computes its input {name!r}"))

    def _refusal(self, node: Node, text: str) -> str:
        return (
            f"{self._path}: the node {node.name!r} ({node.kind}) cannot run at these shapes: {text}: "
            "export the model at the shapes to train, or without this node"
        )

    def finish(self) -> None:
        """Store constants that steps read as buffers, and release every value after its last read."""
        for step in self._steps:
            for name in step.reads:
                known = None if name is None else self._known.get(name)
                if isinstance(known, torch.Tensor) and name is not None and not self._model.has_stored(name):
                    self._model.store(name, known.contiguous(), "constant")
        constant = [name for name in self._model.output_names if name not in self._data]
        if constant:
            raise WorkloadError(
                f"{self._path}: the output {constant[0]!r} does not depend on the inputs: export the model without it"
            )
        self._model.outputs_like = [self._output_like(name) for name in self._model.output_names]
        later: set[str] = set(self._model.output_names)
        finished: list[Step] = []
        for step in reversed(self._steps):
            reads = {name for name in step.reads if name is not None and not self._model.has_stored(name)}
            makes = tuple(name if name in later else ABSENT for name in step.makes)  # unread results are not held
            finished.append(Step(step.operation, step.reads, makes, tuple(sorted(reads - later))))
            later |= reads
        for step in reversed(finished):
            self._model.add(step)

    def _output_like(self, name: str) -> torch.Tensor:
        value = self._data[name]
        if isinstance(value, list):
            raise WorkloadError(f"{self._path}: the output {name!r} is a sequence: export the model without it")
        return value


def _default(node: Node, attribute: str) -> Any:
    """Return what an attribute is where a node leaves it out; None if that is not defined."""
    defined = onnx.defs.get_schema(node.kind, node.opset).attributes.get(attribute)
    return _attribute(defined.default_value) if defined is not None and defined.default_value.name else None


def _nodes(graph: onnx.GraphProto, opset: int, path: Path, renamed: Mapping[str, str] | None = None) -> list[Node]:
    read = Counter(name for node in all_nodes(graph.node) for name in node.input)
    read.update(value.name for value in graph.output)
    return [_node(node, opset, read, path, renamed or {}) for node in graph.node]


def _node(node: onnx.NodeProto, opset: int, read: Mapping[str, int], path: Path, renamed: Mapping[str, str]) -> Node:
    name = node.name or f"{node.op_type}_{next((each for each in node.output if each), '')}"
    try:
        graphs = {each.name: each.g for each in node.attribute if each.HasField("g") and node.op_type == BRANCH}
        attributes = graphs or {each.name: _attribute(each) for each in node.attribute}
    except UnsupportedVariant as error:
        raise WorkloadError(
            f"{path}: the node {name!r} ({node.op_type}) has {error}: export the model without it"
        ) from error
    wanted = frozenset(position for position, output in enumerate(node.output) if output and read[output])
    return Node(
        kind=node.op_type,
        name=name.strip("/").rpartition("/")[2],
        opset=opset,
        inputs=tuple(renamed.get(each, each) for each in node.input),
        outputs=tuple(renamed.get(each, each) for each in node.output),
        attributes=attributes,
        path=_module_path(node, name),
        read_outputs=wanted,
        origin=next(reversed(_literal_list(_metadata(node, _CLASSES))), ""),
    )


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return tensor_of(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int | float):
        return value
    items = list(value) if isinstance(value, Sequence) or hasattr(value, "__iter__") else None
    if items is None or any(not isinstance(item, int | float | bytes) for item in items):
        raise UnsupportedVariant(f"the attribute {attribute.name!r}")
    return tuple(item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items)


def _module_path(node: onnx.NodeProto, name: str) -> tuple[str, ...]:
    """Return the module that a node came from, according to its metadata or the slashes in its name."""
    scopes = _literal_list(_metadata(node, _SCOPES))
    if scopes:
        return path_of(scopes[-2]) if len(scopes) > 1 and scopes[-2] else ()
    parts = [part for part in name.split("/")[:-1] if part]
    # The older exporter repeats the preceding part: /layer1/layer1.0/conv1.
    steps = [part.removeprefix(f"{before}.") for before, part in zip(["", *parts], parts, strict=False)]
    return path_of("/".join(steps)) if steps else ()


def _metadata(node: onnx.NodeProto, key: str) -> str:
    return next((str(entry.value) for entry in node.metadata_props if entry.key == key), "")


def _literal_list(text: str) -> list[str]:
    """Parse a list of strings that the exporter wrote in Python syntax, as data."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in found] if isinstance(found, list) else []

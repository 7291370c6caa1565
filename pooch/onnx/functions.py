"""The functions that an ONNX file defines: their calls are replaced by their nodes before anything is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx
import onnx.inliner

from ..ground.errors import WorkloadError
from ..ground.wording import error_text

MOST_NODES = 2**18  # after inlining: a few functions that call one another twice each are more nodes than memory holds

_Name = tuple[str, str, str]  # domain, name and overload


def without_functions(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Inline the functions that the file defines.

    Raises:
        WorkloadError: a function calls itself, there would be too many nodes, or the onnx package refuses.
    """
    if not model.functions:
        return model
    if _inlined_nodes(model, path) > MOST_NODES:
        raise WorkloadError(
            f"the functions defined in {path} make more than {MOST_NODES} nodes: export it with less repetition"
        )
    try:
        return onnx.inliner.inline_local_functions(model)
    except Exception as error:
        raise WorkloadError(
            f"the functions defined in {path} cannot be inlined: {error_text(error)}: export it without functions"
        ) from error


def _inlined_nodes(model: onnx.ModelProto, path: Path) -> int:
    """Return the number of nodes that the graph has once all calls are inlined."""
    calls = {
        _named(function.domain, function.name, function): [_called(node) for node in all_nodes(function.node)]
        for function in model.functions
    }
    nodes: dict[_Name, int] = {}
    try:
        for name in TopologicalSorter(calls).static_order():
            nodes[name] = sum(nodes[called] for called in calls[name]) if name in calls else 1
    except CycleError as error:
        raise WorkloadError(f"a function defined in {path} calls itself: export it without functions") from error
    return sum(nodes.get(_called(node), 1) for node in all_nodes(model.graph.node))


def _called(node: onnx.NodeProto) -> _Name:
    return _named(node.domain, node.op_type, node)


def _named(domain: str, name: str, of: onnx.NodeProto | onnx.FunctionProto) -> _Name:
    return "" if domain == "ai.onnx" else domain, name, getattr(of, "overload", "")  # which older files do not have


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, and those of the graphs within them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from all_nodes(graph.node)

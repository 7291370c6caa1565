"""Which nodes of a graph share memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node


class Aliases:
    """Which nodes of a graph share memory, as far as operators say it."""

    def __init__(self, graph: Graph) -> None:
        self._root: dict[Node, Node] = {}
        self._last: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.op == "output":
                continue
            self._root[node] = self._root[base] if (base := base_of(node)) is not None else node
            for each in [node, *node.all_input_nodes]:
                self._last[self._root[each]] = node

    def root(self, node: Node) -> Node:
        """Return the node that made the memory of a node."""
        return self._root[node]

    def of(self, nodes: Iterable[Any]) -> set[Node]:
        """Return the nodes that made the memory of some nodes."""
        return {self._root[node] for node in nodes if isinstance(node, Node)}

    def last_use(self, node: Node) -> Node:
        """Return the last node that uses the memory of a node."""
        return self._last[self._root[node]]


def base_of(node: Node) -> Node | None:
    """Return the node of which a node is a view, or None if it has memory of its own."""
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        if any(each.alias_info is not None for each in node.target._schema.returns):
            return node.all_input_nodes[0]
    elif base_of(node.all_input_nodes[0]) is not None and getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[0]  # one of several views
    storage = _storage(node)
    return next((each for each in node.all_input_nodes if storage is not None and _storage(each) == storage), None)


def _storage(node: Node) -> int | None:
    tensor = node.meta.get("val")
    is_plain = isinstance(tensor, FakeTensor) and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if is_plain else None  # type: ignore[union-attr]

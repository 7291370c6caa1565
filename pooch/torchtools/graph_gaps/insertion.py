"""Puts the operators of gaps into the forward and backward graph of what is compiled."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from .aliases import Aliases, base_of
from .operators import COME_BACK, LEAVE

LEAST_BYTES = 1024  # of a tensor that leaves: below that the call takes longer than the memory is worth


@dataclass(frozen=True)
class _Saved:
    """A tensor that a forward graph saves, and that may leave.

    Attributes:
        position: Among the results of the forward graph.
        node: That makes it.
        read: The input of the backward graph.
    """

    position: int
    node: Node
    read: Node


def insert_gaps(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Have what a forward graph saves leave after its last use, and come back before its first use in the backward
    graph.

    Args:
        forward: The forward graph. What it saves for the backward graph comes last in what it returns.
        backward: The backward graph. Inputs have the names of what the forward graph saves.
        outputs: How many of the results of the forward graph are not saved.
    """
    aliases = Aliases(forward.graph)
    (result,) = forward.graph.find_nodes(op="output")
    results = list(result.args[0])
    for each in _all_saved(forward, backward, outputs, aliases):
        results[each.position] = _insert_leave(forward.graph, each.node, aliases)
        _insert_return(backward.graph, each.read, each.node.meta["val"].device)
    result.update_arg(0, type(result.args[0])(results))
    for graph in (forward, backward):
        graph.graph.lint()
        graph.recompile()


def mark_gaps(forward: GraphModule, backward: GraphModule, outputs: int) -> None:
    """Mark what a forward graph saves and what may leave, for whoever writes the code of the two graphs.

    Nodes get other names, as these are a part of the keys under which code is cached. A backward graph may be compiled
    long after, when the partitioner's key is not in place any more, so the names tell this code from other versions.
    The arguments are those of `insert_gaps`.
    """
    found = _all_saved(forward, backward, outputs, Aliases(forward.graph))
    mark = f"{MARK}{source_hash().hex()[:8]}_"
    forward.meta[LEAVING] = tuple(each.position for each in found)
    backward.meta[RETURNING] = {}
    for number, each in enumerate(found):
        name = f"{mark}{number}"
        each.node._rename(name)
        each.read._rename(name)
        each.read.target = each.read.name
        backward.meta[RETURNING][each.read.name] = str(each.node.meta["val"].device)
    forward.recompile()
    backward.recompile()


@cache
def source_hash() -> bytes:
    """Return what tells this version of what makes gaps from others."""
    hasher = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.read_bytes())
    return hasher.digest()


MARK = "pooch_gap_"  # begins the names of nodes in gaps
LEAVING = "pooch_leaving"  # in the forward graph's `meta`: positions of results
RETURNING = "pooch_returning"  # in the backward graph's: devices by the names of inputs


def _all_saved(forward: GraphModule, backward: GraphModule, outputs: int, aliases: Aliases) -> list[_Saved]:
    """Return what leaves. Inputs and outputs of the forward graph are left alone, as the program holds them."""
    (result,) = forward.graph.find_nodes(op="output")
    results = list(result.args[0])
    held = aliases.of([*forward.graph.find_nodes(op="placeholder"), *results[:outputs]])
    inputs = {node.target: node for node in backward.graph.find_nodes(op="placeholder")}
    found = []
    for position, node in enumerate(results[outputs:], outputs):
        if not _may_leave(node) or aliases.root(node) in held or results.count(node) > 1:
            continue
        read = inputs.get(node.name)
        if read is not None and read.users:
            found.append(_Saved(position, node, read))
    return found


def _may_leave(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    tensor = node.meta.get("val")
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    # The same graph for other sizes must have the same gaps, as a plan may meet both.
    return not isinstance(tensor.numel(), int) or tensor.nbytes >= LEAST_BYTES


def _insert_leave(graph: Graph, saved: Node, aliases: Aliases) -> Node:
    with graph.inserting_after(aliases.last_use(saved)):
        left = graph.call_function(LEAVE, (saved,))
    left.meta.update({name: saved.meta[name] for name in _KEPT if name in saved.meta})
    left.meta["val"] = _fake(LEAVE, saved)
    return left


_KEPT = ("saved_tensor_with_no_vc_check", "partitioner_tag")


def _fake(operator: Any, node: Node, *arguments: Any) -> Any:
    tensor = node.meta["val"]
    with tensor.fake_mode:
        return operator(tensor, *arguments)


def _insert_return(graph: Graph, read: Node, device: torch.device) -> None:
    """Put the return before the first node that reads the memory. Views before it move behind the return."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    views, readers = _readers(read)
    first = min(readers, key=order.__getitem__)
    read.meta["val"] = _fake(LEAVE, read)
    with graph.inserting_before(first):
        back = graph.call_function(COME_BACK, (read, device))
    back.meta["val"] = _fake(COME_BACK, read, device)
    read.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    for view in sorted((each for each in views if order[each] < order[first]), key=order.__getitem__):
        first.prepend(view)


def _readers(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the views of a node, and what reads its memory."""
    views: list[Node] = []
    readers: list[Node] = []
    for user in node.users:
        if user.users and user.all_input_nodes == [node] and base_of(user) is not None:
            more, deeper = _readers(user)
            views += [user, *more]
            readers += deeper
        else:
            readers.append(user)
    return views, readers

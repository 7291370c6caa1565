"""How Inductor lowers the operators of gaps. Importing this imports Inductor.

What a graph saves is lowered as if it were still among its results, so that its layout, and with it all bits, are those
of the graph without gaps. To Inductor, memory is free once the last op that it knows of has read it, and goes to the
next buffer of that size. What has left may be held for longer, and what has come back may be held besides. So such
buffers are freed, but never used again. What comes back depends on nothing that is computed, and would do so at the
beginning: it waits for the last kernel that its first reader waits for anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.codegen.wrapper import FreeLine
from torch._inductor.graph import GraphLowering
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V
from torch.fx import Node

from .operators import COME_BACK, LEAVE


class _Gap(ir.FallbackKernel):
    """A call of one of the operators."""

    def codegen(self, wrapper: Any) -> None:
        """Write the call."""
        _free_only(wrapper)
        super().codegen(wrapper)


class _Held(set[str]):
    """Names of buffers of a graph that are freed, but not used again."""


def _held() -> _Held:
    graph: Any = V.graph
    if not hasattr(graph, "pooch_held"):
        graph.pooch_held = _Held()
    return graph.pooch_held  # type: ignore[no-any-return]


def _hold(tensor: Any) -> None:
    _held().add(tensor.get_name())
    V.graph.never_reuse_buffers.add(tensor.get_name())


def _free_only(wrapper: Any) -> None:
    """Have the code of a graph let go of buffers that must not be used again, which it would hold to its end."""
    if "codegen_free" in vars(wrapper):
        return
    free, held = wrapper.codegen_free, _held()

    @wraps(free)
    def codegen_free(buffer: Any) -> None:
        if buffer.get_name() not in held:
            free(buffer)
        elif buffer.get_name() not in wrapper.freed:
            wrapper.freed.add(buffer.get_name())
            wrapper.writeline(FreeLine(wrapper, buffer))

    wrapper.codegen_free = codegen_free


@register_lowering(LEAVE, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _leave(tensor: Any) -> Any:
    tensor.realize()
    _hold(tensor)
    place = _boxed(_Gap.create(LEAVE, tensor))
    # Inductor gives what a graph returns the strides that it had when it was traced: these are those of the tensor.
    node = V.graph.current_node
    strides = [V.graph.sizevars.optimization_hint(each) for each in place.get_stride()]
    node.meta["val"] = torch.empty_strided(node.meta["val"].shape, strides, dtype=place.get_dtype(), device="meta")
    return place


@register_lowering(COME_BACK, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _come_back(place: Any, device: torch.device) -> Any:
    _hold(place)
    tensor = _boxed(_Gap.create(COME_BACK, place, device))
    _hold(tensor)
    awaited = _awaited_kernel(V.graph.current_node)
    if awaited is not None:
        V.graph.additional_buffer_deps[V.graph.operations[-1].get_operation_name()].add(awaited)
    return tensor


def _boxed(result: Any) -> Any:
    return result if isinstance(result, ir.TensorBox) else ir.TensorBox.create(result)


def _awaited_kernel(node: Node) -> str | None:
    """Return the last kernel of a library's before a node that its first reader needs. It is fused with nothing, so
    waiting for it changes no kernel.
    """
    order = _order(node)
    first = min(node.users, key=order.__getitem__)
    waiting = [-order[each] for each in first.all_input_nodes if each is not node]
    nodes, seen = list(order), set(waiting)
    heapq.heapify(waiting)
    while waiting:
        each = nodes[-heapq.heappop(waiting)]
        kernel = _library_kernel(V.graph.env.get(each))
        if kernel is not None:
            return kernel
        for source in each.all_input_nodes:
            if -order[source] not in seen:
                seen.add(-order[source])
                heapq.heappush(waiting, -order[source])
    return None


def _order(node: Node) -> dict[Node, int]:
    graph: Any = V.graph
    if not hasattr(graph, "pooch_order"):
        graph.pooch_order = {each: position for position, each in enumerate(node.graph.nodes)}
    return graph.pooch_order  # type: ignore[no-any-return]


def _library_kernel(lowered: Any) -> str | None:
    """Return the name of the buffer of a node that is a kernel of a library's, or None."""
    while isinstance(lowered, (ir.MutableBox, ir.BaseView)):
        lowered = lowered.data
    if isinstance(lowered, ir.MultiOutput):
        kernel: Any = lowered.inputs[0]
    else:
        kernel = lowered
    if not isinstance(kernel, ir.ExternKernel) or isinstance(kernel, _Gap):
        return None
    return lowered.get_name()  # type: ignore[no-any-return]


def _as_result(run_node: Callable[..., Any]) -> Callable[..., Any]:
    """Lower what leaves as if the graph returned it."""

    @wraps(run_node)
    def run(self: Any, node: Node) -> Any:
        leaves = [user for user in node.users if user.target is LEAVE]
        if not leaves:
            return run_node(self, node)
        users = dict(node.users)
        for leave in leaves:
            del node.users[leave]
        node.users[next(iter(self.graph.find_nodes(op="output")))] = None
        try:
            return run_node(self, node)
        finally:
            node.users.clear()
            node.users.update(users)

    return run


GraphLowering.run_node = _as_result(GraphLowering.run_node)  # type: ignore[method-assign]

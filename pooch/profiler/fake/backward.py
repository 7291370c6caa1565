"""Records backward operators of a fake world with a dispatch mode.

Autograd accumulates gradients out of place if a mode is active or a tensor is of a subclass, as fake tensors are. Plain
training adds them in place if nothing else holds the first one. `BackwardRecorder` therefore checks the same reference
counts as autograd, and records such a sum as written into the memory of its first operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...torchtools.effects import argument_keys, new_tensors, written_tensors
from ...torchtools.operators import operator_facts
from ...torchtools.tensors import find_tensors, has_plain_storage
from .costs import OpCosts
from .kernels import distinct_results
from .trace import FakeTrace
from .world import FakeWorld

_ADD = torch.ops.aten.add.Tensor


class BackwardRecorder(TorchDispatchMode):
    """Records every backward operator in a trace."""

    def __init__(self, trace: FakeTrace, costs: OpCosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._costs = trace, costs
        self._between_nodes = self._begun = False
        self._once = _counts_of_one_holder()

    @contextmanager
    def following(self, loss: torch.Tensor) -> Iterator[None]:
        """Context manager that records the backward pass from this loss."""
        handles = [handle for node in _nodes_below(loss) for handle in self._watch(node)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, node: Any) -> tuple[Any, Any]:
        """Tracks when no node is running: ops between two nodes are autograd's own and accumulate gradients."""

        def begins(gradients: Any) -> None:
            self._begun, self._between_nodes = True, False

        def ended(inputs: Any, outputs: Any) -> None:
            self._between_nodes = True

        return node.register_prehook(begins), node.register_hook(ended)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = operator_facts(func)
        if facts.is_view or func.namespace == "prim":
            return func(*args, **kwargs)
        is_sum = func is _ADD and self._between_nodes and len(args) == 2
        in_place = is_sum and self._is_held_once(args[0])
        written, read_keys = written_tensors(facts, args, kwargs), argument_keys(args, kwargs)
        start = self._trace.now()
        result = self._costs.corrected(func, args, kwargs, distinct_results(func(*args, **kwargs)))
        if not new_tensors(written, find_tensors(result), read_keys):
            return result
        cost = self._costs.cost(func, args, kwargs, result)
        if in_place and self._trace.knows(args[0].untyped_storage()):
            self._trace.took_over(result.untyped_storage(), args[0].untyped_storage())
        else:
            self._trace.results(args, kwargs, result)
            self._trace.passing(cost.workspace_bytes)
        if self._begun:  # before that comes the gradient of the loss itself, which no node computes
            node = torch._C._current_autograd_node()
            name = "aten::add_" if in_place else func._schema.name
            self._trace.operator(name, start, cost.time_ms, "" if node is None else node.name())
        return result

    def _is_held_once(self, gradient: torch.Tensor) -> bool:
        """Returns whether only autograd holds it and adds in place (`can_accumulate_inplace` in input_buffer.cpp)."""
        return has_plain_storage(gradient) and _is_dense(gradient) and _counts(gradient) <= self._once


def _nodes_below(loss: torch.Tensor) -> list[Any]:
    """Returns all nodes of the graph except those that only accumulate a gradient."""
    found: dict[Any, None] = {}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in found or hasattr(node, "variable"):
            continue
        found[node] = None
        waiting.extend(following for following, _ in node.next_functions)
    return list(found)


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the reference counts of a tensor and of its storage, as seen within a dispatch mode."""
    counted: Any = tensor
    storages: Any = torch._C
    return counted._use_count(), int(storages._storage_Use_Count(tensor.untyped_storage()._cdata))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether its elements fill a contiguous range of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _FirstSum(TorchDispatchMode):
    """Records the reference counts of the first gradients that are added."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            self.counts.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _counts_of_one_holder() -> tuple[int, int]:
    """Returns the counts of a gradient with exactly one holder, to which versions of dispatch add differently."""
    looking = _FirstSum()
    with FakeWorld().entered():
        start = torch.ones(2, requires_grad=True)
        middle = start.exp()
        loss = (middle.sin() * middle.cos()).sum()
        with looking:
            loss.backward()
    return looking.counts[0]

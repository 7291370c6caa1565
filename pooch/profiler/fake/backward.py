"""Backward operators of a fake world, seen by a dispatch mode.

Autograd looks whether a mode is active (or a tensor is of a subclass, as fake ones are) and then adds gradients that
meet out of place. Plain training adds them in place where nobody else holds the first one: `BackwardRecorder` asks the
same reference counts as autograd does, and books such a sum as written into the memory of its first part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.profiler.fake.costs import OpCosts
from pooch.profiler.fake.kernels import distinct_results
from pooch.profiler.fake.trace import FakeTrace
from pooch.profiler.fake.world import FakeWorld
from pooch.torchtools.effects import argument_keys, effects_of, written_tensors
from pooch.torchtools.operators import operator_facts
from pooch.torchtools.tensors import find_tensors, has_plain_storage

_ADD = torch.ops.aten.add.Tensor


class BackwardRecorder(TorchDispatchMode):
    """Books every backward operator into a trace."""

    def __init__(self, trace: FakeTrace, costs: OpCosts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._costs = trace, costs
        self._between_nodes = self._begun = False
        self._once = _counts_of_one_holder()

    @contextmanager
    def following(self, loss: torch.Tensor) -> Iterator[None]:
        """Record the backward pass from this loss that is run inside."""
        handles = [handle for node in _nodes_below(loss) for handle in self._watch(node)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _watch(self, node: Any) -> tuple[Any, Any]:
        """What runs after a node's own work and before the next node's is autograd's: it adds gradients that meet."""

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
        if not effects_of(written, list(find_tensors(result)), read_keys).tensors:
            return result
        cost = self._costs.cost(func, args, kwargs, result)
        if in_place and self._trace.knows(args[0].untyped_storage()):
            self._trace.took_over(result.untyped_storage(), args[0].untyped_storage())
        else:
            self._trace.results(args, kwargs, result)
            self._trace.passing(cost.workspace_bytes)
        if self._begun:  # what comes before is the loss's own gradient, which no node makes
            node = torch._C._current_autograd_node()
            name = "aten::add_" if in_place else func._schema.name
            self._trace.operator(name, start, cost.time_ms, "" if node is None else node.name())
        return result

    def _is_held_once(self, gradient: torch.Tensor) -> bool:
        """Whether autograd alone holds it, so that it adds in place (`can_accumulate_inplace` in input_buffer.cpp)."""
        return has_plain_storage(gradient) and _is_dense(gradient) and _counts(gradient) <= self._once


def _nodes_below(loss: torch.Tensor) -> list[Any]:
    """All nodes of the graph except those that only collect a gradient."""
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
    """References to a tensor, and to its storage, as seen from within a dispatch mode."""
    counted: Any = tensor
    storages: Any = torch._C
    return counted._use_count(), int(storages._storage_Use_Count(tensor.untyped_storage()._cdata))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class _FirstSum(TorchDispatchMode):
    """Looks at the counts of the first gradients that meet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ADD:
            self.counts.append(_counts(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _counts_of_one_holder() -> tuple[int, int]:
    """The counts of a gradient that is certainly held once: what dispatch itself adds differs by version of PyTorch."""
    looking = _FirstSum()
    with FakeWorld().entered():
        start = torch.ones(2, requires_grad=True)
        middle = start.exp()
        loss = (middle.sin() * middle.cos()).sum()
        with looking:
            loss.backward()
    return looking.counts[0]

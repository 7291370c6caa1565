"""What a compiled graph makes again in its backward graph rather than saving it, where that is allowed.

It is never by itself: code that Inductor makes rounds in another way where it is fused in another way. Whoever holds a
budget and may recompute says how much room a graph has (`ROOMS`). A graph is then partitioned as PyTorch does it under
`activation_memory_budget`, at the largest share of what it saves at which all of its memory fits. What is still saved
has gaps as ever, so the share need not be right for the budget to be held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..operators import operator_facts
from .aliases import Aliases, base_of

Partitioned = tuple[Any, ...]  # forward graph, backward graph, and maybe others
Partition = Callable[[GraphModule], Partitioned]
# At 0 PyTorch would make everything again, also what is marked to be saved.
_SHARES = (*(tenths / 10 for tenths in range(10, 0, -1)), 0.01)


@dataclass(frozen=True)
class GraphMemory:
    """What a graph takes beside its inputs.

    Attributes:
        saved_bytes: That it holds between its forward and its backward pass.
        gradient_bytes: Of what its backward graph returns.
        peak_bytes: The highest live bytes in one of both passes.
    """

    saved_bytes: int
    gradient_bytes: int
    peak_bytes: int

    def of_calls(self, calls: int) -> int:
        """Return what it takes if it is called several times in a step: while one call is in its backward pass, others
        hold what they have saved, or the gradients that they have made.

        Args:
            calls: How often.
        """
        return self.peak_bytes + (calls - 1) * max(self.saved_bytes, self.gradient_bytes)


@dataclass(frozen=True)
class Room:
    """How much room there is in a step for a compiled graph.

    Attributes:
        budget_bytes: The budget, or None if it is a share of what the step takes that is not known yet.
        share: That share, or 1.
        taken_bytes: What is live during all of the step.
        calls_of: Returns how many graphs of a kind share the room, given the bytes of parameters and buffers of one.
        made_again: Called with what a graph takes by itself, what it takes now, and how many share the room.
    """

    budget_bytes: int | None
    share: float
    taken_bytes: int
    calls_of: Callable[[int], int]
    made_again: Callable[[GraphMemory, GraphMemory, int], None]

    def limit_bytes(self, whole: GraphMemory, calls: int) -> int:
        """Return how much such graphs may take.

        Args:
            whole: What one takes that makes nothing again.
            calls: How many there are.
        """
        if self.budget_bytes is not None:
            return self.budget_bytes - self.taken_bytes
        return int(self.share * (self.taken_bytes + whole.of_calls(calls))) - self.taken_bytes


ROOMS: list[Callable[[], Room | None]] = []  # who may have graphs make things again; None: not in this thread, now


def room_now() -> Room | None:
    """Return the room for a graph that is compiled now, or None if nothing is made again in it."""
    return next((room for each in ROOMS if (room := each()) is not None), None)


def partition_within(
    room: Room, joint: GraphModule, partition: Partition, outputs_of: Callable[[Partitioned], int], *, fuses: bool
) -> Partitioned:
    """Partition a joint graph so that it fits, making as little again as possible.

    Args:
        room: The room.
        joint: The joint graph. It stays as it is.
        partition: Partitions one under `activation_memory_budget`.
        outputs_of: Returns how many results of the forward graph are not saved.
        fuses: Whether results that are only read by what is fused with what makes them take no memory.

    Returns:
        What `partition` has returned: of the largest share that fits, or else of the one that takes least.
    """
    theirs, changed = float(config.activation_memory_budget), _changed_inputs(joint)
    if changed is None:
        return partition(joint)

    def tried(share: float) -> tuple[Partitioned, GraphMemory]:
        trial = GraphModule(joint, deepcopy(joint.graph))
        trial.meta.update(joint.meta)
        if share < theirs:
            _hold(trial, changed, fuses=fuses)
        with config.patch(activation_memory_budget=share):
            found = partition(trial)
        return found, memory_of(found[0], found[1], outputs_of(found), fuses=fuses)

    calls, shares = room.calls_of(_static_bytes(joint)), iter(share for share in _SHARES if share < theirs)
    best, whole = found, memory = tried(theirs)
    limit_bytes, least = room.limit_bytes(memory, calls), memory
    while memory.of_calls(calls) > limit_bytes and (share := next(shares, None)) is not None:
        found, memory = tried(share)
        if memory.of_calls(calls) < least.of_calls(calls):
            best, least = found, memory
    room.made_again(whole, least, calls)
    return best


_METADATA: ContextVar[Any] = ContextVar("_METADATA", default=None)


@contextmanager
def knowing_inputs(joint: GraphModule, metadata: Any) -> Iterator[None]:
    """Have it known while a joint graph is partitioned which of its inputs are written to.

    Args:
        joint: The joint graph. Of one that calls others nothing is known, as these are partitioned meanwhile as well.
        metadata: What AOTAutograd knows of the inputs.
    """
    calls_others = any(isinstance(each, GraphModule) for each in joint.children())
    token = _METADATA.set(None if calls_others else metadata)
    try:
        yield
    finally:
        _METADATA.reset(token)


def _changed_inputs(joint: GraphModule) -> set[str] | None:
    """Return the inputs that are written to while the forward graph runs, or None if that is not known."""
    infos = getattr(_METADATA.get(), "input_info", None)
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if str(node.target).startswith("primals")]
    if infos is None or len(infos) != len(inputs):
        return None
    return {node.name for node, info in zip(inputs, infos, strict=True) if info.mutates_data}


def _static_bytes(joint: GraphModule) -> int:
    """Return the bytes of the parameters and buffers that a graph reads."""
    places = getattr(_METADATA.get(), "static_input_indices", None) or ()
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if str(node.target).startswith("primals")]
    return sum(_bytes(inputs[place]) for place in places if place < len(inputs))


def _hold(trial: GraphModule, changed: set[str], *, fuses: bool) -> None:
    """Have saved what would be something else if it were made again: random numbers, what operators give that may not
    be replayed, and what is made of inputs that have been written to by then.

    Under Inductor also what it computes by calling a library, such as matrix products. It runs such calls early in the
    backward graph, where their results take as much memory as if they had been saved, or more.
    """
    for node in trial.graph.nodes:
        is_changed = node.op == "placeholder" and node.name in changed
        for each in _readers(node) if is_changed else (node,):
            is_held = is_changed or _is_not_repeatable(each.target) or (fuses and _is_called(each))
            if each.op == "call_function" and is_held:
                each.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _is_not_repeatable(operator: Any) -> bool:
    if not isinstance(operator, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return False
    facts = operator_facts(operator)
    return facts.random or facts.refusal is not None


def _is_called(node: Node) -> bool:
    """Whether Inductor makes no kernel of a node."""
    is_kernel = _has_tag(node, torch.Tag.pointwise) or _has_tag(node, _REDUCTION)
    return isinstance(node.target, torch._ops.OpOverload) and not is_kernel and base_of(node) is None


def memory_of(forward: GraphModule, backward: GraphModule, outputs: int, *, fuses: bool) -> GraphMemory:
    """Return what a graph takes beside its inputs.

    Args:
        forward: The forward graph.
        backward: The backward graph. Inputs have the names of what the forward graph saves.
        outputs: How many results of the forward graph are not saved.
        fuses: As above.
    """
    results = _results(forward)
    made = _Sizes(forward, fuses=fuses)
    saved = {node.name: node for node in results[outputs:] if isinstance(node, Node)}
    saved_bytes = made.total(saved.values())
    forward_peak_bytes = made.peak_bytes({}, kept=results)
    within = _Sizes(backward, fuses=fuses)
    inputs = list(backward.graph.find_nodes(op="placeholder"))
    given: dict[Node, int] = {}
    counted: set[Node] = set()  # several saved tensors may share memory
    for node in inputs:
        source = saved.get(node.target)
        root = None if source is None else made.aliases.root(source)
        if root is None:
            given[node] = _bytes(node)
        elif root.op != "placeholder" and root not in counted:
            counted.add(root)
            given[node] = _bytes(root)
    gradients = _results(backward)
    backward_peak_bytes = within.peak_bytes(given, kept=gradients)
    return GraphMemory(saved_bytes, within.total(gradients), max(forward_peak_bytes, backward_peak_bytes))


class _Sizes:
    """How many bytes the nodes of a graph take."""

    def __init__(self, module: GraphModule, *, fuses: bool) -> None:
        self._graph, self._fuses = module.graph, fuses
        self.aliases = Aliases(module.graph)
        results = [node for node in _results(module) if isinstance(node, Node)]
        self._results = {self.aliases.root(node) for node in results}

    def _bytes(self, root: Node) -> int:
        if self._fuses and root not in self._results and _is_fused(root):
            return 0
        return _bytes(root)

    def total(self, nodes: Iterable[Any]) -> int:
        """Return the bytes of some nodes that the graph has made."""
        roots = {self.aliases.root(node) for node in nodes if isinstance(node, Node)}
        return sum(_bytes(root) for root in roots if root.op != "placeholder")

    def peak_bytes(self, given: dict[Node, int], kept: Iterable[Any]) -> int:
        """Return the highest live bytes.

        Args:
            given: Inputs that are freed after they were last read, and their bytes.
            kept: What is not freed.
        """
        staying = {self.aliases.root(node) for node in kept if isinstance(node, Node)}
        sizes_bytes = dict(given)
        leaving: dict[Node, list[Node]] = {}
        for root in self._roots():
            if root.op != "placeholder":
                sizes_bytes[root] = self._bytes(root)
            if root not in staying:
                leaving.setdefault(self.aliases.last_use(root), []).append(root)
        live_bytes = highest_bytes = sum(given.values())
        for node in self._graph.nodes:
            if node in sizes_bytes and node not in given:
                live_bytes += sizes_bytes[node]
                highest_bytes = max(highest_bytes, live_bytes)
            live_bytes -= sum(sizes_bytes.get(root, 0) for root in leaving.get(node, ()))
        return highest_bytes

    def _roots(self) -> Iterator[Node]:
        return (node for node in self._graph.nodes if node.op != "output" and self.aliases.root(node) is node)


def _results(module: GraphModule) -> list[Any]:
    (result,) = module.graph.find_nodes(op="output")
    return list(result.args[0])


def _is_fused(node: Node) -> bool:
    """Whether Inductor computes a node within what reads it."""
    return _has_tag(node, torch.Tag.pointwise) and all(
        _has_tag(user, torch.Tag.pointwise) or _has_tag(user, _REDUCTION) for user in _readers(node)
    )


_REDUCTION = getattr(torch.Tag, "reduction", torch.Tag.pointwise)  # of PyTorch 2.12 and later


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function" and base_of(user) is not None:
            yield from _readers(user)
        else:
            yield user


def _has_tag(node: Node, tag: torch.Tag) -> bool:
    return tag in getattr(node.target, "tags", ())


def _bytes(node: Node) -> int:
    tensor = node.meta.get("val")
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return 0
    size_bytes: Any = tensor.untyped_storage().nbytes()
    if not isinstance(size_bytes, torch.SymInt):
        return int(size_bytes)
    return int(size_bytes.node.hint) if size_bytes.node.has_hint() else 0  # asking for it would be a guard

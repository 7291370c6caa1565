"""Has graphs that are compiled meanwhile get gaps, through Inductor's `custom_partitioner_fn`.

Its `uuid` is a part of the key of compiled code, so code with gaps and code without never take each other's place in a
cache. Other backends have no such place: for them the function of AOTAutograd that partitions a graph is wrapped.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from .insertion import insert_gaps
from .recompute import ROOMS, knowing_inputs, partition_within, room_now


class Gaps:
    """Counts who wants gaps, and has graphs get them while anybody does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Have what is compiled from here on get gaps, until `end`."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo = [_wrap_aot(), _set_partitioner(), _keep_cache_away()]

    def end(self) -> None:
        """Want none any more."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for undo in self._undo:
                    undo()
                self._undo = []

    @contextmanager
    def wanted(self) -> Iterator[None]:
        """Have what is compiled inside of this context get gaps."""
        self.begin()
        try:
            yield
        finally:
            self.end()


GAPS = Gaps()


def _wrap_aot() -> Callable[[], None]:
    module: Any = _loaded("torch._functorch._aot_autograd.graph_compile")
    for name, with_gaps in (
        ("_partition_joint_graph_into_fw_bw", _partition_with_gaps),
        ("_aot_stage2a_partition", partial(_stage_with_gaps, module)),  # of PyTorch 2.11, which has no such function
    ):
        original = getattr(module, name, None)
        if original is not None:
            return _wrapped(module, name, original, wraps(original)(partial(with_gaps, original)))
    return _nothing


def _wrapped(module: Any, name: str, original: Callable[..., Any], mine: Callable[..., Any]) -> Callable[[], None]:
    setattr(module, name, mine)

    def undo() -> None:
        if getattr(module, name) is mine:
            setattr(module, name, original)

    return undo


def _partition_with_gaps(partition: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    joint, _, metadata, *_ = arguments
    with knowing_inputs(joint, metadata):
        if _is_of_inductor(options.get("partition_fn", arguments[-1])):
            return partition(*arguments, **options)
        forward, backward, outputs = _partitioned(partition, arguments, options)
    insert_gaps(forward, backward, outputs)
    return forward, backward, outputs


def _stage_with_gaps(
    module: Any, stage: Callable[..., Any], joint: Any, inputs: Any, subclasses: Any, metadata: Any, configuration: Any
) -> Any:
    """Run a stage that partitions in its midst, by the function that the configuration names."""
    theirs, inner = configuration.partition_fn, module._get_inner_meta(subclasses, metadata)

    def counted(*arguments: Any, num_fwd_outputs: int, **options: Any) -> Any:
        return *theirs(*arguments, num_fwd_outputs=num_fwd_outputs, **options), num_fwd_outputs

    def partition(graph: Any, its_inputs: Any, **options: Any) -> Any:
        if its_inputs is not inputs:  # a graph that the joint one calls
            return theirs(graph, its_inputs, **options)
        with knowing_inputs(graph, inner):
            if _is_of_inductor(theirs):
                return theirs(graph, its_inputs, **options)
            forward, backward, outputs = _partitioned(counted, (graph, its_inputs), options)
        insert_gaps(forward, backward, outputs)
        return forward, backward

    configuration.partition_fn = partition
    try:
        return stage(joint, inputs, subclasses, metadata, configuration)
    finally:
        configuration.partition_fn = theirs


def _partitioned(partition: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    room = room_now()
    if room is None:
        return partition(*arguments, **options)
    joint, *others = arguments
    return partition_within(
        room, joint, lambda trial: partition(trial, *others, **options), lambda found: int(found[2]), fuses=False
    )


def _is_of_inductor(chosen: Any) -> bool:
    """Whether Inductor partitions a graph, and so our partitioner.

    Args:
        chosen: The function that partitions, or the configuration that names it, as in PyTorch 2.12.
    """
    function = getattr(chosen, "partition_fn", chosen)
    while hasattr(function, "func"):
        function = function.func
    return str(getattr(function, "__module__", "")).startswith("torch._inductor")


def _set_partitioner() -> Callable[[], None]:
    config: Any = _loaded("torch._inductor.config")
    if not hasattr(config, "custom_partitioner_fn"):
        return _nothing
    from .partitioner import PartitionerWithGaps

    theirs = config.custom_partitioner_fn
    mine = config.custom_partitioner_fn = PartitionerWithGaps(theirs)

    def undo() -> None:
        if config.custom_partitioner_fn is mine:
            config.custom_partitioner_fn = theirs

    return undo


def _keep_cache_away() -> Callable[[], None]:
    """Have graphs partitioned anew where they may make values again: how much is no part of the key of a cache.

    Inductor's own cache knows the graphs that come of it. It is not asked how much room there is, which may take long:
    each compiled call begins so.
    """
    config: Any = _loaded("torch._functorch.config")
    if not ROOMS or not getattr(config, "enable_autograd_cache", False):
        return _nothing
    config.enable_autograd_cache = False
    return partial(setattr, config, "enable_autograd_cache", True)


def _loaded(name: str) -> Any:
    """Import a module of PyTorch's, unless this version has none such."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _nothing() -> None:
    """What is to be undone where nothing was done."""

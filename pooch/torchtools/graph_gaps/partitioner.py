"""The partitioner that Inductor is given. Importing this imports a part of Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from .generated_code import rewrite_code
from .insertion import mark_gaps, source_hash
from .recompute import partition_within, room_now


class PartitionerWithGaps(CustomPartitionerFn):
    """Partitions as Inductor does otherwise, and puts gaps into both graphs.

    Args:
        theirs: The partitioner that the program has set, or None.
    """

    def __init__(self, theirs: CustomPartitionerFn | None) -> None:
        self._theirs = theirs

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the forward and the backward graph of a joint graph."""
        outputs = options["num_fwd_outputs"]
        forward, backward = self._partitioned(gm, joint_inputs, options)
        if not config.cpp_wrapper:  # it writes no Python, in which our operators are called
            rewrite_code()
            mark_gaps(forward, backward, outputs)
        return forward, backward

    def _partitioned(
        self, joint: GraphModule, inputs: Sequence[object], options: dict[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        if self._theirs is not None:  # what it makes again is for it to say
            return self._theirs(joint, inputs, **options)

        def partition(trial: GraphModule) -> tuple[GraphModule, GraphModule]:
            return min_cut_rematerialization_partition(trial, inputs, **options)

        room = room_now()
        if room is None:
            return partition(joint)
        outputs = options["num_fwd_outputs"]
        found = partition_within(room, joint, partition, lambda _: outputs, fuses=True)
        return found[0], found[1]

    def uuid(self) -> Any:
        """Return what tells code that this has made from other code."""
        return source_hash() if self._theirs is None else (source_hash(), self._theirs.uuid())

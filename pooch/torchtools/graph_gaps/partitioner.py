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
        partition = min_cut_rematerialization_partition if self._theirs is None else self._theirs
        forward, backward = partition(gm, joint_inputs, **options)
        if not config.cpp_wrapper:  # it writes no Python, in which our operators are called
            rewrite_code()
            mark_gaps(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> Any:
        """Return what tells code that this has made from other code."""
        return source_hash() if self._theirs is None else (source_hash(), self._theirs.uuid())

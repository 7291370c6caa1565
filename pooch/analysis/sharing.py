"""Values that autograd does not save, and that are worth holding because many replays read them.

The keys of additive attention are the example: each step of the decoder saves tanh(keys + query) but not the keys.
If the keys are held, each of these is cheap to make again; if not, each replay begins with the keys' own product.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ..ir.profile import Profile, Value

# A hold costs its bytes from the forward pass to the last replay, which must be small beside what it frees.
SMALLEST_SHARE = 4


def shared_values(
    profile: Profile, activations: Iterable[Value], recipe_ops: Mapping[int, tuple[int, ...]]
) -> set[int]:
    """Ids of unsaved values that recipes of several activations make again and again.

    Looks at bytes alone, not at times, so that what a replay reads does not change from one measurement to the next.

    Args:
        profile: the measured step.
        activations: of the region.
        recipe_ops: {activation: ops that make it again} where only saved values are held.

    Returns:
        Values that serve activations of different anchors, of at least `SMALLEST_SHARE` times their own bytes.
    """
    served_bytes: Counter[int] = Counter()
    anchors: defaultdict[int, set[int]] = defaultdict(set)
    for activation in activations:
        for op in recipe_ops.get(activation.id, ()):
            for value in profile.ops[op].writes:
                served_bytes[value] += activation.allocated_bytes
                anchors[value].add(activation.first_unpack)
    values = profile.values
    return {
        value
        for value, served in served_bytes.items()
        if len(anchors[value]) > 1
        and not values[value].saved
        and values[value].overwritten_at < 0
        and served >= SMALLEST_SHARE * values[value].allocated_bytes
    }

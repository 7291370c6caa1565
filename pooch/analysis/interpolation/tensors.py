"""Values and fingerprints at the asked shape, where every size is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...ground.units import round_up
from ...ir.profile import Op, Profile, Value
from .dimensions import CannotTell, Row, SizeRule
from .structure import is_too_small, result_shapes, smallest_activation_bytes, with_shapes

# By what bytes of a profile count: the allocator rounds blocks up to a multiple of this.
GRANULE_BYTES = {"requested": 1, "rounded": 512, "allocated": 512}


def predicted_fingerprint(known: Sequence[Op], rule: SizeRule) -> str:
    """The fingerprint of an op, given the same op at every known shape.

    Raises:
        CannotTell: A size of a result cannot be predicted.
    """
    if all(op.fingerprint == known[0].fingerprint for op in known):
        return known[0].fingerprint
    results = zip(*map(result_shapes, known), strict=True)
    try:
        return with_shapes(known[0].fingerprint, [_predicted_shape(shapes, rule) for shapes in results])
    except CannotTell as reason:
        raise CannotTell(f"op {known[0].index} ({known[0].name}): {reason}") from None


def _predicted_shape(known: Sequence[Row], rule: SizeRule) -> Row:
    return tuple(rule.predict(sizes) for sizes in zip(*known, strict=True))


def predicted_values(profiles: Sequence[Profile], rule: SizeRule) -> tuple[tuple[Value, ...], list[Row]]:
    """The values at the asked shape.

    Args:
        profiles: The known steps.
        rule: For their sizes.

    Returns:
        The values, and the numbers of elements of those that are not empty, as rows of the known shapes and the asked
        one.

    Raises:
        CannotTell: A size cannot be predicted.
    """
    smallest_bytes = max(map(smallest_activation_bytes, profiles))
    granule_bytes = GRANULE_BYTES[profiles[0].sizes]
    made: list[Value] = []
    sizes: list[Row] = []
    for known in zip(*(profile.values for profile in profiles), strict=True):
        try:
            value, row = _predicted_value(known, rule, granule_bytes)
        except CannotTell as reason:
            raise CannotTell(f"value {known[0].id} ({known[0].label}): {reason}") from None
        made.append(replace(value, fixed=_why_fixed(known, value.size_bytes, smallest_bytes, made)))
        if min(row) > 0:
            sizes.append(row)
    return tuple(made), sizes


def _predicted_value(known: Sequence[Value], rule: SizeRule, granule_bytes: int) -> tuple[Value, Row]:
    shape = _predicted_shape([value.shape for value in known], rule)
    counts = (*(prod(value.shape) for value in known), prod(shape))
    size_bytes = _predicted_bytes([value.size_bytes for value in known], counts, rule)
    granule_bytes = granule_bytes if known[0].producer >= 0 else 1  # inputs are told as they were asked for
    padding_bytes = max(v.allocated_bytes - round_up(v.size_bytes, granule_bytes) for v in known)
    value = replace(
        known[0],
        shape=shape,
        size_bytes=size_bytes,
        packs=all(value.packs for value in known),
        allocated_bytes=max(0, round_up(size_bytes, granule_bytes) + padding_bytes),
    )
    return value, counts


def _predicted_bytes(known: Sequence[int], counts: Row, rule: SizeRule) -> int:
    """Bytes of a storage: in proportion to the elements of its first tensor, which may be a part of it."""
    if all(size * counts[0] == known[0] * count for size, count in zip(known, counts[:-1], strict=True)) and counts[0]:
        size_bytes, rest = divmod(known[0] * counts[-1], counts[0])
        if rest:
            raise CannotTell("its bytes would not be a whole number")
        return size_bytes
    return rule.predict(tuple(known))


def _why_fixed(known: Sequence[Value], size_bytes: int, smallest_bytes: int, earlier: Sequence[Value]) -> str | None:
    """Whether a plan can decide on the value, where only its size may make the difference."""
    if known[0].fixed is not None and not is_too_small(known[0]):
        return known[0].fixed
    if size_bytes < smallest_bytes:
        return f"smaller than {smallest_bytes} bytes"
    if any(value.fixed is None for value in known):
        return None
    # It is too small at every known shape, so the profiler's last question was never asked.
    before = known[0].overwrites
    while before >= 0:
        if earlier[before].saved:
            return "autograd also holds its storage for earlier contents"
        before = earlier[before].overwrites
    return None

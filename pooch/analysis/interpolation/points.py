"""Live bytes at every point of the step, and times, at the asked shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from ...ir.profile import Profile, Value
from .fits import Array, bounded_sums, nearest_sums
from .tensors import GRANULE_BYTES

_ROUNDED_BLOCKS = 4  # unrecorded blocks that live at one time and grow with the shape; most ops have two or three


@dataclass(frozen=True, slots=True)
class Points:
    """Live bytes at the asked shape.

    Attributes:
        point_bytes: At the entry and in the body of each slot, in turns: the highest that agree with the known steps.
        uncertain_bytes: By how much the lowest that agree are lower, where this is most.
    """

    point_bytes: list[int]
    uncertain_bytes: int


@dataclass(frozen=True, slots=True)
class Sums:
    """Some numbers of bytes at the asked shape.

    Attributes:
        most: The highest that agree with the known steps.
        grows: Whether each is another number at another known shape.
        uncertain_bytes: By how much the lowest that agree are lower, where this is most.
    """

    most: list[int]
    grows: list[bool]
    uncertain_bytes: int

    def raised(self, by_bytes: int) -> Array:
        """The highest numbers, those that grow raised by some bytes."""
        raised = [n + by_bytes * grows for n, grows in zip(self.most, self.grows, strict=True)]
        return numpy.array(raised, dtype=numpy.int64)


def predicted_persistent(profiles: Sequence[Profile], values: Sequence[Value], terms: Array) -> int:
    """Persistent bytes at the asked shape, those of the inputs being known exactly.

    Args:
        profiles: The known steps.
        values: At the asked shape.
        terms: See `fits.chosen_terms`.
    """
    others = [profile.persistent_bytes - _input_bytes(profile.values) for profile in profiles]
    return predicted_sums([others], terms).most[0] + _input_bytes(values)


def _input_bytes(values: Sequence[Value]) -> int:
    return sum(value.allocated_bytes for value in values if value.role == "external")


def predicted_points(
    profiles: Sequence[Profile], values: Sequence[Value], persistent_bytes: int, terms: Array
) -> Points:
    """Live bytes at the two points of each slot.

    What the recorded values take is known exactly. Only the rest is estimated: what is live at the entries of slots
    besides them and what is persistent (mostly gradients), and how far each body rises above its entry.

    Args:
        profiles: The known steps.
        values: At the asked shape.
        persistent_bytes: At the asked shape.
        terms: See `fits.chosen_terms`.
    """
    slots = len(profiles[0].ops)
    rests, heights = [], []
    for profile in profiles:
        entries = numpy.array([op.entry_bytes for op in profile.ops], dtype=numpy.int64)
        peaks = numpy.array([op.peak_bytes for op in profile.ops], dtype=numpy.int64)
        rests.append(entries - profile.persistent_bytes - _held_by_values(profile.values, slots))
        heights.append(peaks - entries)
    rest, height = (predicted_sums(numpy.stack(sums, axis=1), terms) for sums in (rests, heights))
    rounding_bytes = _rounding_bytes(profiles, values)
    entry = persistent_bytes + _held_by_values(values, slots) + rest.raised(rounding_bytes)
    points = numpy.empty(2 * slots, dtype=numpy.int64)
    points[0::2] = entry
    # A body is never below the entry that follows it.
    points[1::2] = numpy.maximum(entry + height.raised(rounding_bytes), numpy.append(entry[1:], 0))
    return Points(points.tolist(), rest.uncertain_bytes + height.uncertain_bytes)


def _rounding_bytes(profiles: Sequence[Profile], values: Sequence[Value]) -> int:
    """What the allocator's rounding may add to a sum: where it rounds recorded values, it rounds others too."""
    known = profiles[0].values
    grown = (v for v, k in zip(values, known, strict=True) if v.producer >= 0 and v.size_bytes != k.size_bytes)
    is_rounding = any(v.size_bytes != v.allocated_bytes for v in grown)
    return _ROUNDED_BLOCKS * GRANULE_BYTES[profiles[0].sizes] if is_rounding else 0


def _held_by_values(values: Sequence[Value], slots: int) -> Array:
    """By slot: bytes that the values made by the step take at its entry, each storage counted once."""
    change = numpy.zeros(slots + 2, dtype=numpy.int64)
    in_own_storage = [False] * len(values)
    for value in values:
        in_own_storage[value.id] = in_own_storage[value.overwrites] if value.overwrites >= 0 else value.role == "made"
        if value.role != "made" or not in_own_storage[value.id]:
            continue
        last = min(value.death, slots) if value.overwritten_at < 0 else value.overwritten_at
        if last > value.producer:
            change[value.producer + 1] += value.allocated_bytes
            change[last + 1] -= value.allocated_bytes
    return numpy.cumsum(change)[:slots]


def predicted_sums(known: Array | Sequence[Sequence[int]], terms: Array) -> Sums:
    """The most bytes that sums of terms can be at the asked shape.

    Args:
        known: Of shape (sums, known shapes).
        terms: See `fits.chosen_terms`.
    """
    unique, where = numpy.unique(numpy.asarray(known, dtype=numpy.int64), axis=0, return_inverse=True)
    bounds = bounded_sums(unique.astype(numpy.float64), terms)
    most = [_whole(most, least) for most, least in zip(bounds.most, bounds.least, strict=True)]
    uncertain = max(most[i] - int(bounds.least[i]) if most[i] - bounds.least[i] > 1 else 0 for i in range(len(most)))
    grows = (unique != unique[:, :1]).any(axis=1)
    return Sums([most[i] for i in where.ravel()], [bool(grows[i]) for i in where.ravel()], uncertain)


def _whole(most: float, least: float) -> int:
    """Bytes are whole numbers: rounded where they are certain, else rounded up."""
    return round(most) if most - least < 0.5 and abs(most - round(most)) < 0.1 else int(numpy.ceil(most))


def times_of(known: Sequence[Sequence[float]], terms: Array) -> list[float]:
    """Times at the asked shape, of those at the known shapes; arguments and result are by known shape, then by op."""
    return [float(t) for t in nearest_sums(numpy.array(known).T, terms)]

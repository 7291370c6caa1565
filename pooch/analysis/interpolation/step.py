"""The profile of a step at a shape at which it never ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ground.units import format_bytes
from ...ir.consistency import check_profile
from ...ir.profile import Profile
from .dimensions import CannotTell, Row, SizeRule, varying_dimensions
from .fits import chosen_terms
from .points import Points, predicted_persistent, predicted_points, predicted_sums, times_of
from .structure import difference
from .tensors import predicted_fingerprint, predicted_values

_MOST_KNOWN = 6  # shapes nearest to the asked one that are used; more add time and nothing else
_CERTAIN = 1e-3  # share of the peak by which the bounds of certain bytes may differ


@dataclass(frozen=True, slots=True)
class KnownStep:
    """A step that was profiled.

    Attributes:
        shapes: All sizes of all tensor arguments of the model's call, in order: (8, 512, 8, 512) for tokens and labels
            of shape (8, 512).
        profile: Of the step.
    """

    shapes: tuple[int, ...]
    profile: Profile


@dataclass(frozen=True, slots=True)
class Interpolation:
    """The answer of `interpolated_profile`.

    Attributes:
        profile: Of the asked shape; None if the known steps do not tell it.
        reason: Why there is none, in one line; "" if there is one.
        is_certain: Whether the known steps determine the bytes at every point of the step to 0.1% of its peak.
        uncertain_bytes: By how much the true bytes may be lower at the point where this is most.
    """

    profile: Profile | None
    reason: str = ""
    is_certain: bool = False
    uncertain_bytes: int = 0


def interpolated_profile(known: Sequence[KnownStep], shapes: tuple[int, ...]) -> Interpolation:
    """Predict the profile of a step at other input shapes.

    Sizes of tensors are predicted exactly, or not at all. Bytes at the points of the step, which also contain what no
    op reported (gradients, workspaces), are the most that agrees with the known steps.

    Args:
        known: Steps of the same model, in the same training mode, at other shapes.
        shapes: The asked shape, in the form of `KnownStep.shapes`.
    """
    same = next((step for step in known if step.shapes == shapes), None)
    if same is not None:
        return Interpolation(same.profile, is_certain=True)
    try:
        return _interpolated(_comparable(known, shapes), shapes)
    except CannotTell as reason:
        return Interpolation(None, str(reason))


def _comparable(known: Sequence[KnownStep], shapes: Row) -> list[KnownStep]:
    """The known steps that can tell something about the asked one, the nearest first.

    A size of 0 or 1 takes other paths than larger ones (broadcasting, batches of one): a step is left out if a size is
    0 or 1 there and not in the asked one, or the other way around.

    Raises:
        CannotTell: Fewer than two are left, or they differ in more than sizes.
    """
    alike = [s for s in known if len(s.shapes) == len(shapes)]
    if not alike:
        raise CannotTell("no known step has as many input sizes")
    alike = [s for s in alike if all(a == b for a, b in zip(s.shapes, shapes, strict=True) if min(a, b) < 2)]
    alike = sorted({s.shapes: s for s in alike}.values(), key=lambda s: _distance(s.shapes, shapes))[:_MOST_KNOWN]
    if len(alike) < 2:
        raise CannotTell("one known shape tells nothing about others: record the step at a second one")
    for other in alike[1:]:
        found = difference(alike[0].profile, other.profile)
        if found:
            raise CannotTell(f"the steps at {alike[0].shapes} and {other.shapes} take different paths: {found}")
    return alike


def _distance(known: Row, asked: Row) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(known, asked, strict=True) if a != b)


def _interpolated(known: Sequence[KnownStep], shapes: Row) -> Interpolation:
    dimensions = varying_dimensions([*(step.shapes for step in known), shapes])
    rule = SizeRule(dimensions)
    profiles = [step.profile for step in known]
    nearest = profiles[0]
    values, sizes = predicted_values(profiles, rule)
    terms = chosen_terms([*sizes, *dimensions])
    persistent_bytes = predicted_persistent(profiles, values, terms)
    hooked = predicted_sums([[p.ops[slot].hooked_bytes for p in profiles] for slot in range(len(nearest.ops))], terms)
    points = predicted_points(profiles, values, persistent_bytes, terms)
    times_ms = times_of([[op.time_ms for op in p.ops] for p in profiles], terms)
    host_ms = times_of([[op.host_ms for op in p.ops] for p in profiles], terms)
    ops = tuple(
        replace(
            op,
            time_ms=times_ms[slot],
            host_ms=host_ms[slot],
            entry_bytes=points.point_bytes[2 * slot],
            peak_bytes=points.point_bytes[2 * slot + 1],
            hooked_bytes=hooked.most[slot],
            fingerprint=predicted_fingerprint([p.ops[slot] for p in profiles], rule),
        )
        for slot, op in enumerate(nearest.ops)
    )
    peak_bytes = max(op.peak_bytes for op in ops)
    made = replace(
        nearest,
        ops=ops,
        values=values,
        persistent_bytes=persistent_bytes,
        step_ms=sum(times_ms) * _step_share(nearest),
        peak_bytes=peak_bytes,
        reserved_bytes=0,
        batch_size=_batch_size(profiles, rule),
        notes=(_note(known, shapes, points, peak_bytes),),
        split=None,
        persistent=(),
    )
    fault = check_profile(made)
    if fault is not None:
        raise CannotTell(f"the prediction is not consistent: {fault}")
    return Interpolation(made, "", points.uncertain_bytes <= _CERTAIN * peak_bytes, points.uncertain_bytes)


def _step_share(profile: Profile) -> float:
    """The time of a step as a share of those of its ops, which is 1 unless they are on a scale of their own."""
    ops_ms = sum(op.time_ms for op in profile.ops)
    return profile.step_ms / ops_ms if ops_ms > 0 else 1.0


def _batch_size(profiles: Sequence[Profile], rule: SizeRule) -> int:
    try:
        return rule.predict(tuple(p.batch_size for p in profiles))
    except CannotTell:
        return 0  # unknown: it is only for the reader


def _note(known: Sequence[KnownStep], shapes: Row, points: Points, peak_bytes: int) -> str:
    others = " and ".join(str(step.shapes) for step in known)
    text = f"modelled for the shape {shapes} from the steps at {others}"
    if points.uncertain_bytes > _CERTAIN * peak_bytes:
        text += f"; approximate: bytes may be up to {format_bytes(points.uncertain_bytes)} lower"
    return text

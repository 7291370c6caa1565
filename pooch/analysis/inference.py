"""The forward pass of a profile without gradients, as a profile of its own.

Under `torch.no_grad` autograd saves nothing, so a value dies where the program lets go of it. A profile of a training
step knows that point for each value: its `release`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ..ir.profile import HookCosts, Op, Profile, Value
from .dataflow import Dataflow
from .remainder import remainders, storages


def inference_of(profile: Profile) -> Profile:
    """Return the profile of a forward pass up to the model's last op, in which nothing is saved for a backward pass.

    What exists before are the parameters, buffers and inputs that it reads, without gradients and optimizer state. A
    step that never calls the model keeps all of its forward pass, the loss included.

    Args:
        profile: of a training step.
    """
    end = profile.model_end if profile.model_end > profile.model_begin else profile.forward_ops
    forward = profile.ops[:end]
    count = 1 + max((value for op in forward for value in (*op.reads, *op.writes)), default=-1)
    values = tuple(_unsaved(value, end) for value in profile.values[:count])
    outside_bytes = sum(value.allocated_bytes for value in values if value.role in ("parameter", "buffer", "external"))
    closing = Op(end, "pooch.end", "backward", "", 0.0, 0, 0)
    step = replace(
        profile, ops=(*forward, closing), values=values, anchors=(), forward_ops=end,
        model_begin=min(profile.model_begin, end), model_end=min(profile.model_end, end),
        persistent_bytes=outside_bytes, step_ms=sum(op.time_ms for op in forward), reserved_bytes=0, hooks=HookCosts(),
        splits=(), split=None, persistent=(),
        notes=(*profile.notes, "its forward pass without gradients"),
    )  # fmt: skip
    points = _points(profile, step, outside_bytes)
    ops = tuple(
        replace(op, entry_bytes=points[2 * op.index], peak_bytes=max(points[2 * op.index : 2 * op.index + 2]))
        for op in step.ops
    )
    return replace(step, ops=ops, peak_bytes=max(points))


def _unsaved(value: Value, end: int) -> Value:
    """The value as autograd leaves it alone: what the program holds after the forward pass outlives it."""
    release = value.release if value.release < end else end + 1
    return replace(
        value, saved=False, saved_outside_model=False, first_unpack=-1, release=release, death=release,
        overwritten_at=value.overwritten_at if value.overwritten_at < end else -1,
        fixed="not saved" if value.fixed is None else value.fixed,
        touches=None if value.touches is None else tuple(slot for slot in value.touches if slot < end),
    )  # fmt: skip


def _points(profile: Profile, step: Profile, outside_bytes: int) -> Sequence[int]:
    """Live bytes at each point: what exists before, storages, and what no value of the training step explains."""
    n_points = 2 * len(step.ops)
    change = [outside_bytes] + [0] * n_points
    training = Dataflow(profile)
    unexplained, _ = remainders(training, storages(training))
    spans = [(each.first_point, each.end_point, each.size_bytes) for each in storages(Dataflow(step))]
    made = (each for each in unexplained if each.kind in ("program", "temporary"))
    spans += [(each.first_point, each.end_point, each.size_bytes) for each in made if each.first_point < n_points - 2]
    for first_point, end_point, size_bytes in spans:
        change[first_point] += size_bytes
        change[min(end_point, n_points)] -= size_bytes
    return list(accumulate(change))[:n_points]

"""Whether a profiled step calls the model that it was profiled with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..ir import Profile

if TYPE_CHECKING:
    import torch

CALLS_PARTS = (
    "forward calls parts of the model, or model.forward, but never the model itself: plan with region='step', and "
    "train with `with run.step():`"
)


def calls_model(profile: Profile, model: torch.nn.Module) -> bool:
    """Whether the step calls the model itself, rather than parts of it.

    Args:
        profile: of the step.
        model: that was given with it.

    Raises:
        UsageError: the step uses nothing of the model, so that it must be another one.
    """
    if profile.model_begin < profile.model_end:
        return True
    if not _uses_any_of(profile) and next(model.parameters(), None) is not None:
        raise UsageError(
            f"forward uses nothing of this model ({type(model).__name__}): give the model that forward calls"
        )
    return False


def _uses_any_of(profile: Profile) -> bool:
    """Whether an op of the forward pass is called by a module of the model, or reads a parameter or buffer of it."""
    forward = profile.ops[: profile.forward_ops]
    owned = {value.id for value in profile.values if value.role in ("parameter", "buffer", "transient")}
    return any(op.module or not owned.isdisjoint(op.reads) for op in forward)

"""What each activation of a profile costs to swap and to recompute, as a pandas table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..ir.arguments import profile_of
from ..ir.plan import Region
from ..ir.profile import Profile
from .dataflow import Dataflow

if TYPE_CHECKING:
    import pandas


def activation_costs(profile: Profile | str | Path, region: Region = "step") -> pandas.DataFrame:
    """One row per activation in forward order, indexed by `activation` (its id).

    The columns are `label`, `size_bytes`, `copy_out_ms`, `copy_in_ms`, `replay_ms` (the time of its own recipe with its
    sources at hand; nan where it cannot be recomputed) and `refusal` (why not, else None).

    Args:
        profile: the measured step, or the path of a saved profile.
        region: which activations: those saved in calls of the model ("model"), or all of the step.
    """
    import pandas

    profile = profile_of(profile, "activation_costs")
    dataflow, link = Dataflow(profile, region), profile.link
    rows = [
        {
            "label": value.label,
            "size_bytes": value.size_bytes,
            "copy_out_ms": link.out_ms(value.size_bytes, packs=value.packs),
            "copy_in_ms": link.in_ms(value.size_bytes, packs=value.packs),
            "replay_ms": dataflow.replay_ms(value.id),
            "refusal": dataflow.refusal(value.id),
        }
        for value in dataflow.activations
    ]
    return pandas.DataFrame(rows, index=pandas.Index([value.id for value in dataflow.activations], name="activation"))

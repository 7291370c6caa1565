"""Activations gathered by layer: what each module path makes, and what a plan does with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir import Plan, Profile

if TYPE_CHECKING:
    import pandas

OUTSIDE = "(outside)"
CHOICES = ("keep", "swap", "recompute")


def layer_of(module_path: str, depth: int | None = None) -> str:
    """The layer that a module path belongs to: its first `depth` names (all where None)."""
    if not module_path:
        return OUTSIDE
    names = module_path.split(".")
    return ".".join(names[:depth])


def layer_frame(profile: Profile, plan: Plan | None = None, *, depth: int | None = 2) -> pandas.DataFrame:
    """One row per layer, in forward order, indexed by `layer`: the first `depth` names of the module path (None: all).

    Columns: `activations` (how many), `size_bytes` (of them), `forward_ms` (of all its forward ops), and with a plan
    `keep_bytes`, `swap_bytes`, `recompute_bytes`.
    """
    import pandas

    profile = profile if plan is None else profile.variant(plan.splits)
    rows: dict[str, dict[str, float]] = {}
    for op in profile.ops[: profile.forward_ops]:
        row = rows.setdefault(layer_of(op.module, depth), {"activations": 0, "size_bytes": 0, "forward_ms": 0.0})
        row["forward_ms"] += op.time_ms
    decisions = plan.decisions if plan else {}
    for value in profile.activations:
        row = rows[layer_of(profile.ops[value.producer].module, depth)]
        row["activations"] += 1
        row["size_bytes"] += value.size_bytes
        if plan is not None:
            column = f"{decisions.get(value.id, 'keep')}_bytes"
            row[column] = row.get(column, 0) + value.size_bytes
    columns = ["activations", "size_bytes", "forward_ms"]
    columns += [f"{choice}_bytes" for choice in CHOICES] if plan is not None else []
    frame = pandas.DataFrame.from_dict(rows, orient="index").reindex(columns=columns)
    whole = [name for name in columns if name != "forward_ms"]
    frame = frame.fillna(0).astype(dict.fromkeys(whole, "int64"))
    return frame.rename_axis("layer")


def choice_frame(plan: Plan) -> pandas.DataFrame:
    """One row per choice, indexed by `choice`: `activations`, `size_bytes`, `copy_ms` and `replay_ms` of them."""
    frame = plan.to_frame().assign(activations=1)
    columns = ["activations", "size_bytes", "copy_ms", "replay_ms"]
    sums = frame.groupby("choice")[columns].sum().reindex(list(CHOICES), fill_value=0)
    sums.loc["keep", ["copy_ms", "replay_ms"]] = 0.0  # what is kept is neither copied nor replayed
    sums.loc["swap", "replay_ms"] = 0.0
    sums.loc["recompute", "copy_ms"] = 0.0
    return sums

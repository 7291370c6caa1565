"""Profiles, plans and comparisons as plain records, for `--json` and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from ..api.measure.comparison import ComparisonRow
from ..devices import DeviceModel
from ..ground.units import format_bytes, format_ms
from ..ir import Device, Link, PersistentMove, PersistentPlan, Plan, Profile, Timeline
from ..ir.layout import StepLayout
from ..ir.persistent import Kind
from .verdict import needs_no_plan

Record = dict[str, object]

PERSISTENT_NAMES: dict[Kind, str] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "state": "the optimizer's state",
}
_COMPARED = (
    "predicted_peak_bytes",
    "predicted_step_ms",
    "in_core_step_ms",
    "lower_bound_ms",
    "gap",
    "status",
    "keep",
    "swap",
    "recompute",
    "host_bytes",
    "planning_ms",
    "modelled",
)


def profile_record(profile: Profile) -> Record:
    """A profile in figures."""
    activations = profile.activations
    return {
        "workload": profile.workload,
        "batch_size": profile.batch_size,
        "mode": profile.mode,
        "device": profile.device.name,
        "device_kind": profile.device.kind,
        "modelled": is_modelled(profile) or profile.device.modelled,
        "tier": profile.link.tier,
        "ops": len(profile.ops),
        "forward_ops": profile.forward_ops,
        "activations": len(activations),
        "activation_bytes": sum(value.size_bytes for value in activations),
        "persistent_bytes": profile.persistent_bytes,
        "peak_bytes": profile.peak_bytes,
        "reserved_bytes": profile.reserved_bytes,
        "sizes": profile.sizes,
        "step_ms": profile.step_ms,
        "in_slices": profile_record(profile.split) if profile.split is not None else None,
        "splits": [asdict(split) for split in profile.splits],
        "out_bytes_per_ms": profile.link.out_bytes_per_ms,
        "in_bytes_per_ms": profile.link.in_bytes_per_ms,
        "hooks": asdict(profile.hooks),
        "ranks": _ranks_record(profile),
        "notes": list(profile.notes),
    }


def _ranks_record(profile: Profile) -> Record | None:
    if profile.ranks is None:
        return None
    fits = profile.peak_bytes <= profile.device.memory_bytes
    return {**asdict(profile.ranks), "modelled": True, "fits_without_a_plan": fits}


def device_record(device: Device, link: Link) -> Record:
    """A device and the cost of moving bytes between it and its swap tier."""
    figures = asdict(device) | asdict(link)
    return {name: figure for name, figure in figures.items() if name not in ("modelled", "ranks")}


def device_model_record(model: DeviceModel) -> Record:
    """A device of the catalogue, with the figures as given there."""
    return {**asdict(model), "recalled": list(model.recalled)}


def plan_record(plan: Plan) -> Record:
    """A plan in figures."""
    counts = Counter(plan.decisions.values())
    return {
        "workload": plan.workload,
        "policy": plan.policy,
        "region": plan.region,
        "status": plan.status,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "in_core_peak_bytes": plan.in_core_peak_bytes,
        "predicted_step_ms": plan.predicted_step_ms,
        "in_core_step_ms": plan.in_core_step_ms,
        "lower_bound_ms": for_json(plan.lower_bound_ms),
        "gap": for_json(plan.gap),
        "keep": counts["keep"],
        "swap": counts["swap"],
        "recompute": counts["recompute"],
        "host_bytes": plan.host_bytes,
        "microbatches_in_flight": plan.microbatches_in_flight,
        "planning_ms": plan.planning_ms,
        "modelled": is_modelled(plan),
        "notes": list(plan.notes),
        "splits": [asdict(split) for split in plan.splits],
        "bound": plan.bound,
        "fits_without_a_plan": needs_no_plan(plan),
        "arena": layout_record(plan.layout) if plan.layout is not None else None,
        "persistent": None if plan.persistent is None else _persistent_record(plan.persistent),
    }


def _persistent_record(persistent: PersistentPlan) -> Record:
    """What of what outlives the step leaves, in figures."""
    by_kind = {}
    for kind in PERSISTENT_NAMES:
        moves = [move for move in persistent.moves if move.kind == kind]
        out_bytes, in_bytes = copied_bytes(moves)
        size_bytes = sum(move.size_bytes for move in moves)
        by_kind[kind] = {
            "leave": len(moves), "size_bytes": size_bytes, "copied_out_bytes": out_bytes, "copied_in_bytes": in_bytes,
        }  # fmt: skip
    return {
        "kinds": by_kind,
        "staying_bytes": persistent.staying_bytes,
        "allowance_bytes": persistent.allowance_bytes,
        "optimizer_ms": persistent.optimizer_ms,
        "tier_bytes": persistent.tier_bytes,
    }


def copied_bytes(moves: Iterable[PersistentMove]) -> tuple[int, int]:
    """What is copied out and back in each step."""
    moves = list(moves)
    out_bytes = sum(move.copies_out * move.size_bytes for move in moves)
    return out_bytes, sum(move.size_bytes * sum(back >= 0 for _, back, _ in move.away) for move in moves)


def moves_text(persistent: PersistentPlan) -> str:
    """What of what outlives the step leaves, in one line."""
    parts = []
    for kind, name in PERSISTENT_NAMES.items():
        size_bytes = sum(move.size_bytes for move in persistent.moves if move.kind == kind)
        if size_bytes:
            parts.append(f"{format_bytes(size_bytes)} of {name}")
    copied = (
        f"{format_bytes(persistent.copied_out_bytes)} copied out and {format_bytes(persistent.copied_in_bytes)} back"
    )
    waiting = f", {format_ms(persistent.optimizer_ms)} of the step for the optimizer" if persistent.optimizer_ms else ""
    return f"{', '.join(parts)}: {copied} in each step{waiting}"


def layout_record(layout: StepLayout) -> Record:
    """A packed step in figures."""
    return {
        "policy": layout.policy,
        "blocks": len(layout.blocks),
        "arena_bytes": layout.arena_bytes,
        "bound_bytes": layout.bound_bytes,
        "ratio": layout.ratio,
        "outside_bytes": layout.outside_bytes,
        "total_bytes": layout.total_bytes,
    }


def is_modelled(document: Profile | Plan) -> bool:
    """Whether its times come from a model or from single ops rather than from the step itself."""
    return any("modelled" in note for note in document.notes)


def timeline_record(timeline: Timeline) -> Record:
    """A simulated step in figures."""
    return {name: getattr(timeline, name) for name in ("step_ms", "stall_ms", "replay_ms", "peak_bytes", "host_bytes")}


def comparison_record(row: ComparisonRow) -> Record:
    """One policy under one budget; `feasible` says whether there is a plan."""
    record: Record = {"budget_bytes": row.budget_bytes, "policy": row.policy, "feasible": row.plan is not None}
    if row.plan is None:
        return record | {"minimum_bytes": row.minimum_bytes}
    plan = plan_record(row.plan)
    record |= {name: plan[name] for name in _COMPARED}
    record["slowdown"] = _ratio(row.plan.predicted_step_ms, row.plan.in_core_step_ms)
    record |= {f"{choice}_share": share for choice, share in byte_shares(row.plan).items()}
    if row.measured is not None:
        names = ("peak_bytes", "reserved_bytes", "step_ms", "plain_step_ms")
        record |= {f"measured_{name}": getattr(row.measured, name) for name in names}
        record["measured_slowdown"] = _ratio(row.measured.step_ms, row.measured.plain_step_ms)
    return record


def byte_shares(plan: Plan) -> dict[str, float]:
    """The share of the activations' bytes under each choice."""
    sizes = dict.fromkeys(("keep", "swap", "recompute"), 0)
    for decision in plan.choices:
        sizes[decision.choice] += decision.size_bytes
    total_bytes = max(1, sum(sizes.values()))
    return {choice: size_bytes / total_bytes for choice, size_bytes in sizes.items()}


def comparison_csv(rows: Iterable[ComparisonRow]) -> str:
    """One line per policy and budget, unformatted; cells without a plan stay empty."""
    records = [comparison_record(row) for row in rows]
    columns = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _ratio(step_ms: float, of_ms: float | None) -> float | None:
    return step_ms / of_ms if of_ms else None


def for_json(value: object) -> object:
    """JSON has neither nan nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Tables for people (rich) of profiles, plans, timelines, devices and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..api.measure.comparison import ComparisonRow, Measured
from ..ground.colours import CHOICES
from ..ground.units import format_bytes, format_ms
from ..ir import Device, HookCosts, Link, PersistentPlan, Plan, Profile, Timeline
from ..ir.layout import StepLayout
from .fitting import Column, FittedTable, Kind
from .layers import choice_frame, layer_frame
from .summaries import PERSISTENT_NAMES, byte_shares, copied_bytes, is_modelled, moves_text

if TYPE_CHECKING:
    import pandas

LONGEST_TABLE = 40
_COVERS = {
    "model": "calls of the model (--region model)",
    "step": "the whole step with its loss, inside of `with run.step():` (--region step)",
}
# What goes first where the terminal is narrow; names of frames' columns.
_DROPPED = {
    **dict.fromkeys(("if_kept_ms", "if_swapped_ms", "if_recomputed_ms", "items"), 3),
    **dict.fromkeys(("copy_ms", "replay_ms", "forward_ms", "in_core_step_ms"), 2),
    **dict.fromkeys(("activations", "in_core_peak_bytes"), 1),
}
_TEXTS = ("reason",)
_POLICY = Column("policy", "label", least=22)  # the longest name, without the values of parameters
_NOTHING: Mapping[str, str] = MappingProxyType({})
_INSTEAD = {"keep": "if_kept_ms", "swap": "if_swapped_ms", "recompute": "if_recomputed_ms"}


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Two columns: names and texts."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path may be longer than the terminal is wide, and is wanted whole
    for name, text in facts.items():
        table.add_row(name, Text(text))  # so that brackets in a message are not read as markup
    return table


def profile_table(profile: Profile, *, verbose: bool = False) -> Table:
    """A profile in short; `verbose`: with what hooks cost."""
    link = profile.link
    sizes = sum(value.size_bytes for value in profile.activations)
    ops = f"{profile.forward_ops} forward and {len(profile.ops) - profile.forward_ops - 1} backward ops"
    facts = {
        "device": f"{profile.device.name} ({profile.device.kind}{', modelled' if profile.device.modelled else ''})",
        "step": f"{format_ms(profile.step_ms)} in-core{_modelled(profile)}, {ops}",
        "peak": f"{format_bytes(profile.peak_bytes)} in-core",
        "persistent": format_bytes(profile.persistent_bytes) + _could_leave(profile),
        "activations": f"{len(profile.activations)}, {format_bytes(sizes)} in all",
        "swap tier": f"{link.tier}: {_rate(link.out_bytes_per_ms)} out, {_rate(link.in_bytes_per_ms)} in",
    }
    if profile.split is not None:
        labels = ", ".join(split.label for split in profile.split.splits)
        step, peak = format_ms(profile.split.step_ms), format_bytes(profile.split.peak_bytes)
        facts["in slices"] = f"{step} and {peak} in-core with {labels} in slices of rows"
    facts |= _ranks_facts(profile)
    hooks = profile.hooks
    if verbose and hooks != HookCosts():
        costs_ms = (hooks.step_ms, hooks.op_ms, hooks.view_ms, hooks.replay_ms, hooks.copy_ms, hooks.cold_op_ms)
        step, op, view, replay, copy, cold = map(format_ms, costs_ms)
        large = f" and up to {cold} more on large tensors" if hooks.cold_op_ms else ""
        costs = f"{step} a step, {op} an op{large}, {view} a view, {replay} a replay, {copy} a copy"
        facts["hooks cost"] = f"{costs} under a plan that does anything"
    facts |= _notes(profile)
    batch = f", batch {profile.batch_size}" if profile.batch_size else ""
    return facts_table(f"profile of {profile.workload}{batch}", facts)


def _could_leave(profile: Profile) -> str:
    """How much of what outlives the step could leave under a plan."""
    could_bytes = sum(each.allocated_bytes for each in profile.persistent if each.kind != "gradient")
    return f", of which {format_bytes(could_bytes)} could leave (--moves all)" if could_bytes else ""


def _notes(document: Profile | Plan) -> dict[str, str]:
    notes = document.notes
    return {"note" if len(notes) == 1 else f"note {number}": note for number, note in enumerate(notes, start=1)}


def _ranks_facts(profile: Profile) -> dict[str, str]:
    """What several modelled ranks hold and wait for."""
    ranks = profile.ranks
    if ranks is None:
        return {}
    state, gradients = format_bytes(ranks.state_bytes), format_bytes(ranks.gradient_bytes)
    units = f" in {ranks.units} units" if ranks.units else ""
    most, at_peak = format_bytes(ranks.buffer_bytes), format_bytes(ranks.peak_buffer_bytes)
    share = ranks.waiting_ms / profile.step_ms if profile.step_ms else 0.0
    fits = "fits" if profile.peak_bytes <= profile.device.memory_bytes else "does not fit without a plan"
    return {
        "ranks": f"one of {ranks.ranks}, {ranks.kind}{units} (modelled)",
        "a rank": f"{fits} into {format_bytes(profile.device.memory_bytes)} (modelled)",
        "its state": f"{state} of parameters and optimizer state, {gradients} of gradients in the end",
        "its buffers": f"{most} at most, {at_peak} at the peak: gathered parameters, and gradients on their way",
        "collectives": f"{format_ms(ranks.collective_ms)}, of which the step waits for {format_ms(ranks.waiting_ms)} "
        f"({share:.1%}, modelled), over {ranks.link}",
    }


def _modelled(document: Profile | Plan) -> str:
    return " (modelled, not measured)" if is_modelled(document) else ""


def plan_table(plan: Plan) -> Table:
    """A plan in short."""
    budget = format_bytes(plan.budget_bytes) if plan.budget_bytes else "none"
    share = plan.predicted_step_ms / plan.in_core_step_ms if plan.in_core_step_ms else 1.0
    in_core_peak, in_core_step = format_bytes(plan.in_core_peak_bytes), format_ms(plan.in_core_step_ms)
    lost = f"({share:.3f}x){_modelled(plan)}"
    facts = {
        "budget": budget,
        "covers": _COVERS[plan.region],
        "peak": f"{format_bytes(plan.predicted_peak_bytes)} predicted, {in_core_peak} without Pooch",
        "step": f"{format_ms(plan.predicted_step_ms)} predicted, {in_core_step} without Pooch {lost}",
        "lower bound": f"{format_ms(plan.lower_bound_ms)}, gap {plan.gap:.1%}, {plan.status}",
        "swap tier": f"{format_bytes(plan.host_bytes)} taken",
        "planned in": format_ms(plan.planning_ms),
    }
    if plan.persistent is not None:
        facts["also leaves"] = moves_text(plan.persistent)
    if plan.microbatches_in_flight > 1:
        facts["microbatches"] = f"{plan.microbatches_in_flight} in flight; the times are those of one"
    if plan.layout is not None:
        facts["arena"] = arena_text(plan.layout)
    facts |= _notes(plan)
    return facts_table(f"plan of {plan.workload} by {plan.policy}", facts)


def arena_text(layout: StepLayout) -> str:
    """What a step takes with its arena, in one line."""
    parts = f"{format_bytes(layout.arena_bytes)} in the arena, {format_bytes(layout.outside_bytes)} outside of it"
    return f"{format_bytes(layout.total_bytes)} ({parts}), {layout.ratio:.4f} times its bound"


def layers_table(profile: Profile, plan: Plan | None = None, *, depth: int | None = 2) -> FittedTable:
    """One row per layer that has activations."""
    frame = layer_frame(profile, plan, depth=depth)
    return frame_table("activations by layer", frame[frame["activations"] > 0])


def choices_table(plan: Plan) -> FittedTable:
    """Keep, swap, recompute: how many, how much, and what it costs."""
    return frame_table("decisions", choice_frame(plan))


def moves_table(persistent: PersistentPlan) -> FittedTable:
    """What of what outlives the step leaves, by kind."""
    names: tuple[tuple[str, Kind, int], ...] = (
        ("kind", "word", 0),
        ("leave", "figure", 0),
        ("size", "figure", 0),
        ("copied out", "figure", 0),
        ("copied back", "figure", 0),
    )
    table = FittedTable("what outlives the step, in each step", [Column(*each) for each in names])
    for kind, name in PERSISTENT_NAMES.items():
        moves = [move for move in persistent.moves if move.kind == kind]
        if moves:
            out_bytes, in_bytes = copied_bytes(moves)
            sizes = [format_bytes(each) for each in (sum(move.size_bytes for move in moves), out_bytes, in_bytes)]
            table.add_row(name, f"{len(moves):,}", *sizes)
    return table


def splits_table(plan: Plan) -> FittedTable:
    """The calls that run in slices, and why."""
    names: tuple[tuple[str, Kind, int], ...] = (
        ("call", "label", 0),
        ("choice", "word", 0),
        ("size", "figure", 3),
        ("slices", "word", 0),
        ("peak whole", "figure", 1),
        ("peak", "figure", 0),
        ("time whole", "figure", 1),
        ("time", "figure", 0),
        ("reason", "text", 2),
    )
    table = FittedTable("calls in slices", [Column(*each) for each in names])
    for split in plan.splits:
        sizes = [format_bytes(size) for size in (split.whole_peak_bytes, split.peak_bytes)]
        times = [format_ms(time_ms) for time_ms in (split.whole_ms, split.time_ms)]
        whole = [sizes[0], sizes[1], times[0], times[1]]
        slices = f"{split.slices} of {split.rows} rows"
        table.add_row(split.label, _choice("split"), format_bytes(split.input_bytes), slices, *whole, split.reason)
    return table


def decisions_table(plan: Plan, *, longest: int = LONGEST_TABLE, reasons: bool = False) -> FittedTable:
    """The largest activations with their decisions, and how other choices would change the step.

    `reasons` shows the reasons in words instead of numbers, as it is always where other choices were not simulated.
    """
    frame = plan.to_frame()
    shown = frame.nlargest(longest, "size_bytes").sort_index().rename_axis("id")
    left_out = len(frame) - len(shown)
    title = "decisions" if not left_out else f"decisions on the {len(shown)} largest of {len(frame)} activations"
    changes = {f"{choice}_change_ms": heading for choice, heading in _INSTEAD.items()}
    if reasons or frame[list(changes)].isna().all(axis=None):
        return frame_table(title, shown[["choice", "label", "size_bytes", "reason"]])
    numbers = shown[["choice", "label", "size_bytes", "copy_ms", "replay_ms", *changes]].rename(columns=changes)
    explanation = "if ...: what the step would gain or lose if only this decision changed"
    return frame_table(title, numbers, explanations={"if kept": explanation})


def timeline_table(timeline: Timeline) -> Table:
    """A simulated step."""
    facts = {
        "step": format_ms(timeline.step_ms),
        "of it stalled": format_ms(timeline.stall_ms),
        "of it replaying": format_ms(timeline.replay_ms),
        "peak": format_bytes(timeline.peak_bytes),
        "swap tier": format_bytes(timeline.host_bytes),
    }
    return facts_table("simulated step", facts)


def devices_tables(found: Iterable[tuple[Device, Link]]) -> list[Table]:
    """Each device with its measured link."""
    return [_device_table(device, link) for device, link in found]


def _device_table(device: Device, link: Link) -> Table:
    duplex = "at once at full rate" if link.full_duplex else "share one queue"
    shares = f"{link.out_compute_share:.0%} while copying out, {link.in_compute_share:.0%} while copying in"
    facts = {
        "memory": format_bytes(device.memory_bytes),
        "swap tier": link.tier,
        "copies out": f"{_rate(link.out_bytes_per_ms)} after {format_ms(link.out_latency_ms)}",
        "copies in": f"{_rate(link.in_bytes_per_ms)} after {format_ms(link.in_latency_ms)}",
        "both ways": duplex,
        "compute lost": shares,
        "software": ", ".join(f"{name} {version}" for name, version in device.software.items()),
    }
    return facts_table(f"{device.kind}: {device.name}", facts)


def comparison_table(rows: Iterable[ComparisonRow]) -> FittedTable:
    """Every policy under every budget."""
    rows = list(rows)
    modelled = "; times are modelled" if any(row.plan and is_modelled(row.plan) for row in rows) else ""
    explanations = {"x": f"x: of the in-core step{modelled}", "k/s/r": "k/s/r: % of bytes kept, swapped, recomputed"}
    names: tuple[tuple[str, Kind, int], ...] = (
        ("peak", "figure", 0),
        ("step", "figure", 1),
        ("x", "figure", 0),
        ("k/s/r", "figure", 2),
        ("tier", "figure", 3),
        ("planned", "figure", 4),
        ("status", "text", 0),
    )
    columns = [Column("budget"), _POLICY, *(Column(*each) for each in names)]
    table = FittedTable("policies side by side", columns, explanations=explanations)
    for row in rows:
        table.add_row(format_bytes(row.budget_bytes), row.policy, *_comparison_cells(row))
    return table


def _comparison_cells(row: ComparisonRow) -> list[str]:
    plan = row.plan
    if plan is None:
        least = f"needs {format_bytes(row.minimum_bytes)}" if row.minimum_bytes else "does not fit"
        return [*"------", least]
    return [
        format_bytes(plan.predicted_peak_bytes),
        format_ms(plan.predicted_step_ms),
        _factor(plan.predicted_step_ms, plan.in_core_step_ms),
        "/".join(f"{share * 100:.0f}" for share in byte_shares(plan).values()),
        format_bytes(plan.schedule.host_bytes) if plan.schedule.host_bytes else "-",
        format_ms(plan.planning_ms),
        plan.status,
    ]


def measured_table(rows: Iterable[ComparisonRow]) -> FittedTable:
    """What was measured beside what was predicted."""
    drops = {"peak": 0, "predicted": 2, "reserved": 4, "step": 0, "plain step": 3, "x plain": 0, "predicted x": 1}
    columns = [Column("budget"), _POLICY, *(Column(name, drop=drop) for name, drop in drops.items())]
    table = FittedTable("measured (plain and planned steps took turns)", columns)
    for row in rows:
        if row.plan is not None and row.measured is not None:
            table.add_row(format_bytes(row.budget_bytes), row.policy, *_measured_cells(row.plan, row.measured))
    return table


def _measured_cells(plan: Plan, measured: Measured) -> list[str]:
    return [
        format_bytes(measured.peak_bytes),
        format_bytes(plan.predicted_peak_bytes),
        "-" if measured.reserved_bytes is None else format_bytes(measured.reserved_bytes),  # None on a CPU
        format_ms(measured.step_ms),
        "does not fit" if measured.plain_step_ms is None else format_ms(measured.plain_step_ms),
        _factor(measured.step_ms, measured.plain_step_ms),
        _factor(plan.predicted_step_ms, plan.in_core_step_ms),
    ]


def _factor(step_ms: float, plain_ms: float | None) -> str:
    return f"{step_ms / plain_ms:.3f}" if plain_ms else "-"


def frame_table(title: str, frame: pandas.DataFrame, *, explanations: Mapping[str, str] = _NOTHING) -> FittedTable:
    """Any frame as a table; columns whose names end in `_bytes` or `_ms` are shown with units."""
    index = Column(str(frame.index.name or ""), "figure" if frame.index.dtype.kind in "if" else "label")
    columns = [
        Column(_heading(name), _kind(name, frame[name].dtype.kind), _DROPPED.get(name, 0))
        for name in map(str, frame.columns)
    ]
    table = FittedTable(title, [index, *columns], explanations=explanations)
    for label, row in zip(frame.index, frame.itertuples(index=False), strict=True):
        named = zip(map(str, frame.columns), row, strict=True)
        cells = [_choice(str(value)) if name == "choice" else _cell(name, value) for name, value in named]
        table.add_row(_choice(str(label)) if index.heading == "choice" else str(label), *cells)
    return table


def _kind(name: str, dtype_kind: str) -> Kind:
    if dtype_kind in "if":
        return "figure"
    if name == "choice":
        return "word"
    return "text" if name in _TEXTS else "label"


def _choice(name: str) -> Text:
    """The choice in its colour."""
    return Text(name, style=CHOICES.get(name, ""))


def _heading(name: str) -> str:
    plain = name.removesuffix("_bytes").removesuffix("_ms").replace("_per_", "/").replace("_", " ")
    return plain.replace("in core", "in-core")


def _cell(name: str, value: object) -> str:
    if isinstance(value, float) and value != value:  # nan: unknown
        return "-"
    if name in _INSTEAD.values():
        return _change(_float(value))
    if name.endswith("_bytes"):
        return format_bytes(_float(value)) if value else "-"
    if name.endswith("_ms"):
        return format_ms(_float(value)) if value else "-"
    return "-" if value is None else str(value)


def _change(change_ms: float) -> str:
    """The change of the step: "0" for the choice made, "too big" where another one does not fit."""
    if change_ms == float("inf"):
        return "too big"
    sign = "-" if change_ms < 0 else "+"
    return f"{sign}{format_ms(abs(change_ms))}" if abs(change_ms) >= 1e-6 else "0"


def _float(value: object) -> float:
    assert isinstance(value, int | float) or hasattr(value, "__float__"), value
    return float(value)


def _rate(bytes_per_ms: float) -> str:
    return f"{format_bytes(bytes_per_ms * 1000)}/s"

"""`pooch pack`: offsets in one arena for blocks with known lifetimes, for the step of a plan, or for a model file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ground.errors import UsageError
from ..ground.plugins import provided
from ..ground.units import format_bytes, plural
from ..packing import POLICIES, Block, Layout, pack, verify
from ..packing.files import load_blocks, save_offsets
from .options import PATH, output_option, plot_option, profile_option, results_options
from .output import print_json, print_written, progress_shown, say

if TYPE_CHECKING:
    from ..ir import Plan, Profile


@click.command("pack")
@click.argument("path", metavar="FILE.csv|PLAN.json|P.json|MODEL.onnx", type=PATH)
@profile_option()
@click.option("--inference", is_flag=True, help="Of a profile: the forward pass alone, without gradients.")
@click.option("--training", is_flag=True, help="Of a model file: a training step instead of the forward pass.")
@click.option("--batch-size", type=int, metavar="N", help="Of a model file: items per pass.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Of a model file: a setting.")
@click.option("--policy", type=click.Choice(list(POLICIES)), default="ours", show_default=True, help="How to pack.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="CPU time of the search of `ours`, which ends earlier at the bound.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Seed of the search."
)
@click.option(
    "--capacity", metavar="BYTES", help="Of a CSV file: end the search of `ours` at an arena that is no larger."
)
@output_option("-o", "--output", metavar="OFFSETS.csv", help="Write the blocks with their offsets.")
@plot_option("Draw the arena")
@results_options
def command(
    path: Path,
    profile_path: Path | None,
    inference: bool,
    training: bool,
    batch_size: int | None,
    settings: tuple[str, ...],
    policy: str,
    time_limit_s: float,
    seed: int,
    capacity: str | None,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Place blocks in one arena, as low as they get.

    FILE.csv has the columns id, lower, upper, size and, if wanted, alignment. A block lives from lower until just
    before upper; blocks that live at the same time do not overlap.

    PLAN.json is a plan: the blocks of its step are predicted from its schedule, with those of gradients, temporaries
    and replays. It needs --profile. P.json is a profile: the blocks are those of the step without a plan, or with
    --inference of its forward pass under torch.no_grad.

    MODEL.onnx is profiled first. The blocks are those of its forward pass under torch.no_grad, or with --training of
    its training step.
    """
    suffix = path.suffix.lower()
    is_model = suffix in provided("workload_files")
    if not is_model and (training or batch_size is not None or settings):
        raise UsageError(f"{path} is no model: --training, --batch-size and --set go with a file that ends in .onnx")
    if is_model or suffix == ".json":
        if seed or capacity is not None:
            raise UsageError(f"{'--seed' if seed else '--capacity'} is for CSV files: leave it out")
        plan = None
        if is_model:
            profile = _profile_of_model(path, profile_path, inference, training, batch_size, settings)
        else:
            profile, plan = _documents(path, profile_path)
            if inference:
                profile, plan = _inference_of(path, profile, plan), None
        _pack_step(profile, plan, policy, time_limit_s, output, plot, as_json)
        return
    if inference:
        raise UsageError(f"{path} is no profile: --inference goes with a profile, a file that ends in .json")
    if profile_path is not None:
        raise UsageError(f"{path} is no plan: --profile goes with a plan, a file that ends in .json")
    blocks = load_blocks(path)
    started_s = time.process_time()
    capacity_bytes = 0 if capacity is None else _capacity_bytes(capacity)
    layout = pack(blocks, policy=policy, time_limit_s=time_limit_s, seed=seed, capacity_bytes=capacity_bytes)
    seconds = time.process_time() - started_s
    verify(blocks, layout)
    if plot is not None:
        from ..report.arena import draw_layout
        from ..report.figures import save_figure

        save_figure(draw_layout(blocks, layout), plot)
    _tell_missing_compiler(layout)
    _save_offsets(output, blocks, layout)
    if as_json:
        fits = None if capacity is None else layout.arena_bytes <= capacity_bytes
        print_json(_record(blocks, layout) | {"seconds": seconds, "verified": True, "fits": fits})
        return
    say(f"{_told(blocks, layout)}, {seconds:.2f} CPU s, verified")
    if capacity is not None:
        does_it = "fits" if layout.arena_bytes <= capacity_bytes else "does not fit"
        say(f"  it {does_it} into {format_bytes(capacity_bytes)}")
    print_written(output, plot)


def _capacity_bytes(capacity: str) -> int:
    from ..api.budgets import parse_budget

    return parse_budget(capacity, None, name="capacity", takes_share=False, fewest_bytes=1)


def _pack_step(
    profile: Profile,
    plan: Plan | None,
    policy: str,
    time_limit_s: float,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from ..api.step_layouts import layout_of
    from ..report.summaries import layout_record

    started_s = time.process_time()
    packed = layout_of(profile, plan, policy=policy, time_limit_s=time_limit_s)
    seconds = time.process_time() - started_s
    blocks = [block.block for block in packed.blocks]
    verify(blocks, packed.layout)
    _save_offsets(output, blocks, packed.layout)
    if plot is not None:
        from ..report.arena import draw_step_layout
        from ..report.figures import save_figure

        save_figure(draw_step_layout(profile, packed, plan), plot)
    fits = None if plan is None or not plan.budget_bytes else packed.total_bytes <= plan.budget_bytes
    if as_json:
        budget_bytes = plan.budget_bytes if plan is not None else None
        record = layout_record(packed) | {"seconds": seconds, "verified": True}
        print_json(record | {"budget_bytes": budget_bytes, "fits": fits})
        return
    say(f"{_told(blocks, packed.layout)}, {seconds:.2f} CPU s, verified")
    outside = f"with {format_bytes(packed.outside_bytes)} outside of it, {format_bytes(packed.total_bytes)}"
    if plan is not None and fits is not None:
        within = "within" if fits else "over"
        outside += f": {within} the budget of {format_bytes(plan.budget_bytes)}"
    say(f"  {outside}")
    if fits is False:
        say("  `pooch plan --bound arena` makes a plan whose arena fits")
    print_written(output, plot)


def _profile_of_model(
    path: Path,
    profile_path: Path | None,
    inference: bool,
    training: bool,
    batch_size: int | None,
    settings: tuple[str, ...],
) -> Profile:
    from ..analysis.inference import inference_of
    from ..api.profiling import profile_workload
    from ..workloads import WorkloadFactory, parse_settings

    if inference and training:
        raise UsageError("--inference and --training exclude each other: give one")
    if profile_path is not None:
        raise UsageError(f"{path} is no plan: --profile goes with a plan, a file that ends in .json")
    factory = WorkloadFactory(str(path), batch_size, None, parse_settings(settings))
    with progress_shown() as progress:
        profile = profile_workload(factory, progress=progress)
    return profile if training else inference_of(profile)


def _inference_of(path: Path, profile: Profile, plan: Plan | None) -> Profile:
    from ..analysis.inference import inference_of

    if plan is not None:
        raise UsageError(f"{path} is a plan for a training step: give its profile with --inference")
    return inference_of(profile)


def _documents(path: Path, profile_path: Path | None) -> tuple[Profile, Plan | None]:
    from ..ir import Plan, Profile
    from ..ir.files import Document, load_document

    document: Document = load_document(path, Plan, Profile)
    if isinstance(document, Profile):
        if profile_path is not None:
            raise UsageError(f"{path} is a profile itself: leave out --profile, or give a plan")
        return document, None
    if profile_path is None:
        raise UsageError(f"{path} is a plan, which needs the profile that it was made for: give it with --profile")
    return Profile.load(profile_path), Plan.load(path)


def _save_offsets(output: Path | None, blocks: Sequence[Block], layout: Layout) -> None:
    if output is not None:
        save_offsets(output, blocks, layout)


def _tell_missing_compiler(layout: Layout) -> None:
    if layout.policy == "ours" and not layout.is_native:
        say("  no C++ compiler: nothing was searched, so the arena may be larger; install g++", err=True)


def _record(blocks: Sequence[Block], layout: Layout) -> dict[str, object]:
    record: dict[str, object] = {"policy": layout.policy, "blocks": len(blocks), "arena_bytes": layout.arena_bytes}
    return record | {"bound_bytes": layout.bound_bytes, "ratio": layout.ratio, "proven": layout.is_proven}


def _told(blocks: Sequence[Block], layout: Layout) -> str:
    smallest = ", the smallest that there is" if layout.is_proven and layout.ratio > 1 else ""
    return (
        f"{plural(len(blocks), 'block')} by {layout.policy}: arena {format_bytes(layout.arena_bytes)} "
        f"({layout.arena_bytes} bytes), bound {format_bytes(layout.bound_bytes)} ({layout.bound_bytes} bytes), "
        f"ratio {layout.ratio:.4f}{smallest}"
    )

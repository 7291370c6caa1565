"""Options that several commands share.

Some of them are combined into the object that a command works with: a `WorkloadFactory`, or `PlanOptions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ..ground.errors import UsageError
from ..ground.units import MOST_RANKS
from .checks import device_name, refuse_missing_device, spill_directory

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]

PATH = click.Path(path_type=Path)


def _together(*decorators: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which `--help` shows them."""

    def decorate(function: Function) -> Function:
        return functools.reduce(lambda decorated, each: each(decorated), reversed(decorators), function)

    return decorate


def device_option(help: str) -> Decorator:  # noqa: A002 - as click has it
    """--device."""
    return click.option("--device", metavar="cpu|cuda", callback=device_name, help=help)


def choice_option(name: str, choices: Sequence[str], default: str, help: str) -> Decorator:  # noqa: A002
    """An option that takes one of some words."""
    return click.option(name, type=click.Choice(choices), default=default, show_default=True, help=help)


def count_option(name: str, default: int | None, help: str, **attributes: Any) -> Decorator:  # noqa: A002
    """An option that takes a number from 1 on."""
    how = {"type": click.IntRange(min=1), "default": default, "show_default": True, "metavar": "N", "help": help}
    return click.option(name, **how | attributes)


def profile_option(*, required: bool = False) -> Decorator:
    """--profile, beside a plan."""
    about = "The profile that the plan was made for."
    return click.option("--profile", "profile_path", type=PATH, required=required, metavar="P.json", help=about)


def spill_option(**attributes: Any) -> Decorator:
    """--spill-directory."""
    about = "Where a machine without a GPU keeps what is swapped (default: POOCH_SPILL_DIRECTORY, or the system's "
    about += "temporary directory, which may be in RAM)."
    return click.option("--spill-directory", type=PATH, metavar="DIRECTORY", help=about, **attributes)


spill_directory_option = spill_option(expose_value=False, callback=spill_directory)


def workload_options(function: Function) -> Function:
    """WORKLOAD, --batch-size, --device and --set, which the command gets as `factory`."""

    @functools.wraps(function)
    def command(
        workload: str, batch_size: int | None, device: str | None, settings: tuple[str, ...], **others: Any
    ) -> Any:
        from ..workloads import WorkloadFactory, parse_settings

        if others.get("measure") or (others.get("mode") != "fake" and others.get("device_model") is None):
            refuse_missing_device(device)  # fake tensors need none
        return function(factory=WorkloadFactory(workload, batch_size, device, parse_settings(settings)), **others)

    return _together(click.argument("workload"), _options_of_workload("", "the workload's own"))(command)


def measure_options(about: str, default: str) -> Decorator:
    """--measure WORKLOAD with what belongs to a workload, which the command gets as `factory`; None: not asked for.

    Args:
        about: What --measure does.
        default: What batch size and device are otherwise.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(
            workload: str | None, batch_size: int | None, device: str | None, settings: tuple[str, ...], **others: Any
        ) -> Any:
            from ..workloads import WorkloadFactory, parse_settings

            if workload is None:
                if settings or batch_size is not None or device is not None:
                    raise UsageError("--batch-size, --device and --set are for --measure: add --measure WORKLOAD")
                return function(factory=None, **others)
            refuse_missing_device(device)
            return function(factory=WorkloadFactory(workload, batch_size, device, parse_settings(settings)), **others)

        measure = click.option("--measure", "workload", metavar="WORKLOAD", help=about)
        return _together(measure, _options_of_workload("With --measure: ", default))(command)

    return decorate


def _options_of_workload(when: str, default: str) -> Decorator:
    def told(text: str) -> str:
        return f"{when}{text}" if when else text[0].upper() + text[1:]

    return _together(
        click.option("--batch-size", type=int, metavar="N", help=told(f"items per step (default: {default}).")),
        device_option(told(f"where to train (default: {default}).")),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=told("a setting of the workload.")),
        spill_directory_option,
    )


time_limit_option = click.option(
    "--time-limit",
    "time_limit_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Limit on the planning time.",
)
effort_option = choice_option(
    "--effort",
    ["full", "fast"],
    "full",
    "How long to search: fast takes a good plan after a few simulations.",
)
bound_option = choice_option(
    "--bound",
    ["live", "arena"],
    "live",
    "What the budget bounds: live bytes, or the arena in which they lie.",
)
moves_option = choice_option(
    "--moves",
    ["activations", "all"],
    "activations",
    "What may leave the device: activations, or also parameters, buffers, gradients and the optimizer's state.",
)
in_flight_option = count_option(
    "--microbatches-in-flight",
    1,
    "Most forward passes that run before the first of their backward passes, as in a pipeline.",
)
host_budget_option = click.option(
    "--host-budget", metavar="BYTES", help="Limit on the bytes in the swap tier (default: none)."
)


def planning_options(region: str) -> Decorator:
    """The options of planning, --policy to --bound, which the command gets as `options`."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(policy: str, policy_options: tuple[str, ...], **others: Any) -> Any:
            from ..api.options import PlanOptions

            names = ("host_budget", "time_limit_s", "region", "effort", "bound")
            shared = {name: others.pop(name) for name in names}
            return function(options=PlanOptions(policy, options_of_policy(policy_options, policy), **shared), **others)

        about = "How decisions are made; `pooch compare` lists all policies."
        policy_option = click.option("--policy", default="ilp", show_default=True, metavar="POLICY", help=about)
        return _together(policy_option, shared_planning_options(region), effort_option, bound_option)(command)

    return decorate


def shared_planning_options(region: str) -> Decorator:
    """--policy-option, --time-limit, --host-budget and --region, as texts and numbers."""
    return _together(
        click.option(
            "--policy-option",
            "policy_options",
            multiple=True,
            metavar="[POLICY.]NAME=VALUE",
            help="A parameter of a policy, such as tflms.n_tensors=3.",
        ),
        time_limit_option,
        host_budget_option,
        choice_option(
            "--region",
            ["model", "step"],
            region,
            "What the plan covers: calls of the model, for `pooch.apply(plan, model)` alone, or the whole step "
            "with the loss, for training inside `with run.step():`, as `pooch run` does.",
        ),
    )


verify_option = choice_option(
    "--verify",
    ["always", "first", "off"],
    "first",
    "Compare what is recomputed with what it replaces: in every step (always), in full in the first steps and by "
    "samples afterwards (first), or not at all (off).",
)
allow_recompute_option = choice_option(
    "--allow-recompute",
    ["exact", "rounding"],
    "exact",
    "What may be recomputed: only what gives the same bits, so nothing inside of compiled graphs (exact); or values "
    "inside of these too, where the last digits of losses and gradients may differ (rounding).",
)
training_options = _together(
    count_option("--steps", 3, "Number of training steps."),
    click.option("--check", is_flag=True, help="Compare bitwise with plain training; exit code 1 if it differs."),
    click.option(
        "--hard-limit",
        is_flag=True,
        help="Also train in processes that the operating system or the allocator limits to the budget.",
    ),
    click.option("--arena", is_flag=True, help="Also train with all memory of a step taken from one arena."),
    count_option(
        "--repeats",
        None,
        "Timed steps, plain and planned in turns (default: as many as --steps); `optimize` also profiles N.",
    ),
    verify_option,
)
verbose_option = click.option(
    "--verbose", is_flag=True, help="Also print what Pooch did inside the step, and what that cost."
)
budget_option = click.option(
    "--budget",
    required=True,
    metavar="BYTES",
    help="16GiB, 800MB, a number of bytes, 60% of the peak without Pooch, min: the smallest budget that has a plan, or "
    "auto: what is free now, less a margin.",
)
ranks_option = count_option(
    "--ranks", 1, "Processes that copy over the same link at the same time.", type=click.IntRange(1, MOST_RANKS)
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print results as JSON.")
mode_option = choice_option(
    "--mode",
    ["auto", "run", "offload", "fake"],
    "auto",
    "How to profile: as it is (run), with saved tensors off the device (offload), without running it (fake), or "
    "whichever fits (auto).",
)
memory_limit_option = click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Limit on the memory while profiling (default: what the device has left, within ulimit and control groups).",
)
device_model_option = click.option(
    "--device-model",
    metavar="NAME|FILE.toml",
    help="Model the step on a device of `pooch devices --all` or of a catalogue file; nothing is run.",
)


def modelled_ranks_options(function: Function) -> Function:
    """--ranks, --sharding, --unit and --link-gbps, which the command gets as `ranks`."""

    @functools.wraps(function)
    def command(ranks: int | None, sharding: Any, unit: str | None, link_gbps: float | None, **others: Any) -> Any:
        from ..api.modelled_ranks import RanksOptions

        if ranks is None and (sharding, unit, link_gbps) != (None, None, None):
            raise UsageError("--sharding, --unit and --link-gbps are for several ranks: add --ranks")
        modelled = None if ranks is None else RanksOptions(ranks, sharding or "fsdp", unit, link_gbps)
        return function(ranks=modelled, **others)

    options = _together(
        click.option(
            "--ranks", type=int, metavar="N", help="Model one of N ranks, on a device each (with --device-model)."
        ),
        click.option(
            "--sharding",
            type=click.Choice(["fsdp", "ddp"]),
            help="What ranks share: parameters, gradients and optimizer state (fsdp, the default), or nothing (ddp).",
        ),
        click.option("--unit", metavar="CLASS", help="Modules gathered together (default: those of nn.ModuleLists)."),
        click.option(
            "--link-gbps",
            type=float,
            metavar="GB/S",
            help="Rate between two devices each way, 10^9 bytes per second (default: that of the device).",
        ),
    )
    return options(command)


def options_by_policy(texts: tuple[str, ...], policies: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Read --policy-option; the policy may be left out if there is only one.

    Raises:
        UsageError: a text does not parse.
    """
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        policy, dot, option = name.rpartition(".")
        if not equals or not option or not value:
            raise UsageError(f"--policy-option {text!r} does not parse: give it as tflms.n_tensors=3")
        if not dot and len(policies) != 1:
            raise UsageError(f"--policy-option {text!r} does not name its policy: give it as POLICY.{text}")
        found.setdefault(policy or policies[0], {})[option] = value
    return found


def options_of_policy(texts: tuple[str, ...], policy: str) -> dict[str, object]:
    """Read --policy-option for one policy.

    Raises:
        UsageError: a text does not parse, or names another policy.
    """
    found = options_by_policy(texts, (policy,))
    for other in found.keys() - {policy}:
        raise UsageError(f"--policy-option is for policy {other!r}, but {policy!r} decides: choose it with --policy")
    return found.get(policy, {})


# Files that a command writes are checked before it does any work ---------------------------------------------------

_FORCE, _OUTPUTS = "pooch.force", "pooch.outputs"


def _remember_force(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    context.meta[_FORCE] = is_given


force_option = click.option(
    "--force", is_flag=True, is_eager=True, expose_value=False, callback=_remember_force, help="Overwrite output files."
)
results_options = _together(json_option, force_option)


def refuse_existing(context: click.Context, path: Path) -> None:
    """Refuse to overwrite a file without `--force`.

    Raises:
        UsageError: the file exists, and `--force` was not given.
    """
    if path.exists() and not context.meta.get(_FORCE):
        raise UsageError(f"{path} exists already: give --force to overwrite it, or another name")


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        if str(path) == "-":
            raise UsageError("'-' is not standard output here: give the name of a file, or print results with --json")
        refuse_existing(context, path)
        if not path.resolve().parent.is_dir():
            raise UsageError(f"the folder of {path} does not exist: make it first, or give another name")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is a folder, pipe or device: give the name of a file")
        _refuse_the_same(context, parameter.opts[-1], path)
    return path


def _refuse_the_same(context: click.Context, option: str, path: Path) -> None:
    """Refuse a file that another option names too, as the second one to be written would replace the first.

    Raises:
        UsageError: there is one.
    """
    outputs: dict[Path, str] = context.meta.setdefault(_OUTPUTS, {})
    other = outputs.setdefault(path.resolve(), option)
    if other != option:
        raise UsageError(f"{path} is named by {other} and by {option}: give them different names")


def _drawable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    if path is not None:
        from ..report.figures import check_figure_path

        check_figure_path(path)
    return _writable(context, parameter, path)


def output_option(*names: str, help: str, **attributes: Any) -> Decorator:  # noqa: A002 - as click has it
    """An option for a file that the command writes, -o/--output unless it has other names."""
    names = names or ("-o", "--output")
    return click.option(*names, type=PATH, callback=_writable, help=help, **{"metavar": "FILE", **attributes})


def plot_option(what: str) -> Decorator:
    """--plot."""
    return click.option("--plot", type=PATH, metavar="FILE", callback=_drawable, help=f"{what} (.png, .pdf or .svg).")


export_option = output_option(
    "--export",
    "export_path",
    metavar="FILE.onnx",
    help="Write the trained model as ONNX and compare its outputs in onnxruntime.",
)

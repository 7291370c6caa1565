"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pooch.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH = click.Path(path_type=Path)


def workload_options(function: Function) -> Function:
    """WORKLOAD, --batch-size, --device, --set."""
    for decorate in reversed(
        (
            click.argument("workload"),
            click.option("--batch-size", type=int, metavar="N", help="Items per step (default: the workload's own)."),
            click.option("--device", metavar="cpu|cuda", help="Where to train (default: the workload's own)."),
            click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the workload."),
        )
    ):
        function = decorate(function)
    return function


def planning_options(function: Function) -> Function:
    """--policy, --policy-option, --time-limit, --host-budget."""
    for decorate in reversed(
        (
            click.option("--policy", default="ilp", show_default=True, help="Who decides."),
            policy_option_option,
            time_limit_option,
            host_budget_option,
        )
    ):
        function = decorate(function)
    return function


def training_options(function: Function) -> Function:
    """--steps, --check, --hard-limit."""
    for decorate in reversed(
        (
            click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to train."),
            click.option(
                "--check", is_flag=True, help="Compare bitwise with plain training; exit code 1 if it differs."
            ),
            click.option("--hard-limit", is_flag=True, help="Make the budget physical: a plan that lies dies."),
        )
    ):
        function = decorate(function)
    return function


budget_option = click.option(
    "--budget",
    required=True,
    metavar="BYTES",
    help="16GiB, 800MB, a number of bytes, 60% of the peak, or min: the smallest that there is a plan for.",
)
time_limit_option = click.option(
    "--time-limit",
    "time_limit_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Most seconds to plan for.",
)


host_budget_option = click.option(
    "--host-budget", metavar="BYTES", help="Most bytes in the swap tier (default: no limit)."
)
ranks_option = click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that copy over the same link at the same time.",
)
policy_option_option = click.option(
    "--policy-option",
    "policy_options",
    multiple=True,
    metavar="[POLICY.]NAME=VALUE",
    help="A parameter of a policy, such as tflms.n_tensors=3.",
)


def options_by_policy(texts: tuple[str, ...], policies: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """Read --policy-option; the policy may be left out where there is but one.

    Raises:
        UsageError: a text is not of that form.
    """
    found: dict[str, dict[str, object]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        policy, dot, option = name.rpartition(".")
        if not equals or not option or not value:
            raise UsageError(f"--policy-option {text!r} does not parse: give it as tflms.n_tensors=3")
        if not dot and len(policies) != 1:
            raise UsageError(f"--policy-option {text!r} does not say of which policy: give it as POLICY.{text}")
        found.setdefault(policy or policies[0], {})[option] = value
    return found


def options_of_policy(texts: tuple[str, ...], policy: str) -> dict[str, object]:
    """Read --policy-option where one policy decides.

    Raises:
        UsageError: a text is not of that form, or names another policy.
    """
    found = options_by_policy(texts, (policy,))
    for other in found.keys() - {policy}:
        raise UsageError(f"--policy-option is for policy {other!r}, but {policy!r} decides: choose it with --policy")
    return found.get(policy, {})


def region_option(default: str) -> Decorator:
    """--region."""
    return click.option(
        "--region",
        type=click.Choice(["model", "step"]),
        default=default,
        show_default=True,
        help="What the plan covers: calls of the model, or the whole step with the loss.",
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable results on stdout.")
force_option = click.option("--force", is_flag=True, help="Overwrite the output files.")
mode_option = click.option(
    "--mode",
    type=click.Choice(["auto", "run", "offload", "fake"]),
    default="auto",
    show_default=True,
    help="How to profile: plainly, with everything swapped, whichever fits, or without running the step.",
)
memory_limit_option = click.option(
    "--memory-limit",
    metavar="BYTES",
    help="Most memory to take while profiling (default: what the device has left; ulimit and control groups count).",
)
device_model_option = click.option(
    "--device-model",
    metavar="NAME|FILE",
    help="Model the step on a device of `pooch devices --all`, or of a catalogue file; nothing is run.",
)


export_option = click.option(
    "--export",
    "export_path",
    type=PATH,
    metavar="FILE.onnx",
    help="Write the trained model as ONNX and compare its outputs in onnxruntime.",
)


def output_option(help_text: str, *, required: bool = False) -> Decorator:
    """-o/--output."""
    return click.option("-o", "--output", type=PATH, required=required, metavar="FILE", help=help_text)


def refuse_overwriting(path: Path | None, force: bool) -> None:
    """Stop before any work is done where an output file is there already.

    Raises:
        UsageError: it is, and `--force` was not given.
    """
    if path is None:
        return
    refuse_existing(path, force)
    if not path.resolve().parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist: make it first, or give another name")


def refuse_existing(path: Path, force: bool) -> None:
    """Stop where the file is there already and `--force` was not given.

    Raises:
        UsageError: so it is.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists already: give --force to overwrite it, or another name")

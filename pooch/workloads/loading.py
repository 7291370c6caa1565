"""From what was typed (`resnet50`, `train.py:make`, `model.onnx`) to a checked `Workload`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pooch.errors import PoochError, WorkloadError
from pooch.plugins import provided
from pooch.workloads.base import Workload
from pooch.workloads.catalogue import built_in_workloads
from pooch.workloads.registry import BATCH_SIZE, BuiltIn, Growth
from pooch.workloads.settings import Setting, call_arguments, check_batch_size
from pooch.workloads.user_file import first_line, load_function

SEED = 1234  # of every build and every training, so that two of them can be compared


def load_workload(
    name: str,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> Workload:
    """Build a workload, from the same random numbers each time; the caller's random states stay as they are.

    Args:
        name: a built-in name, one with a size (`resnet50@pooch`), `file.py:function` or `model.onnx`.
        batch_size, device: handed to the function; None leaves them to its defaults.
        settings: further keyword arguments; they and the two above win against those of a size.

    Raises:
        UsageError: the batch size is not positive, or the function does not take what was asked for.
        WorkloadError: the workload is unknown, cannot be loaded, or does not return what it must.
    """
    from pooch.torchtools.training_state import seeded

    check_batch_size(batch_size)
    with seeded(SEED):  # the user's file too may draw numbers when it is imported
        return _load(name, batch_size, device, settings or {})


def _load(name: str, batch_size: int | None, device: str | None, settings: Mapping[str, Setting]) -> Workload:
    function, fixed = find_function(name)
    given = dict(settings)
    if batch_size is None and "batch_size" not in given:
        batch_size = fixed.pop("batch_size", None)  # type: ignore[assignment]
    fixed.pop("batch_size", None)
    arguments = call_arguments(function, name, batch_size=batch_size, device=device, settings=fixed | given)
    return _complete(_call(function, name, arguments), name, arguments)


@dataclass(frozen=True)
class WorkloadFactory:
    """Builds the same workload afresh at each call: same weights, same data. Plain data, so another process can
    have it.

    Attributes:
        name, batch_size, device, settings: as `load_workload` takes them.
    """

    name: str
    batch_size: int | None = None
    device: str | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __call__(self) -> Workload:
        """Build it."""
        return load_workload(self.name, batch_size=self.batch_size, device=self.device, settings=self.settings)


def workload_factory(
    name: str,
    *,
    batch_size: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Setting] | None = None,
) -> WorkloadFactory:
    """What builds a workload, as it was typed."""
    return WorkloadFactory(name, batch_size, device, settings or {})


def find_function(name: str) -> tuple[Callable[..., Any], dict[str, Setting]]:
    """The function behind a workload's name, and the settings that the name stands for.

    Raises:
        UsageError: the built-in workload has no such size.
        WorkloadError: there is no such workload.
    """
    entry = built_in(name)
    if entry is not None:
        _, _, size = name.partition("@")
        preset = dict(entry.preset(size).settings) if "@" in name else {}
        return entry.function(), dict(entry.defaults or {}) | preset
    for suffix, reader in provided("workload_files").items():
        if name.endswith(suffix):
            return reader.load()(name), {}
    path, colon, function_name = name.rpartition(":")
    if colon and path and function_name:
        return load_function(path, function_name), {}
    raise WorkloadError(_unknown(name))


def built_in(name: str) -> BuiltIn | None:
    """The built-in workload that a typed name means, with or without a size; None where it means something else."""
    return built_in_workloads().get(name.partition("@")[0])


def workload_growth(name: str, setting: str = "batch_size") -> Growth:
    """How a setting makes the workload's step bigger: its smallest value and the distance between legal ones.

    Of a user's own function, any setting is taken to grow in steps of one.

    Raises:
        UsageError: the setting does not make that built-in workload bigger.
    """
    entry = built_in(name)
    if entry is not None:
        return entry.growth(setting)
    return BATCH_SIZE if setting == BATCH_SIZE.setting else Growth(setting)


def _unknown(name: str) -> str:
    if name.endswith((".py", ".py:")):
        return f"the workload {name!r} names no function: write {name.rstrip(':')}:function"
    close = difflib.get_close_matches(name, built_in_workloads(), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(built_in_workloads())}"
    return f"there is no workload {name!r}: {hint}; or give file.py:function or model.onnx"


def _call(function: Callable[..., Any], name: str, arguments: Mapping[str, Any]) -> object:
    try:
        return function(**arguments)
    except PoochError:
        raise
    except (Exception, SystemExit) as error:  # a user's mistake, or a setting that it cannot take
        raise WorkloadError(
            f"building workload {name!r} raised {type(error).__name__}: {first_line(error)}: "
            "check its function and the settings given to it"
        ) from error


def _complete(built: object, name: str, arguments: Mapping[str, Any]) -> Workload:
    """Check what a builder returned; fill in the name and the batch size where it left them out."""
    if not isinstance(built, Workload):
        raise WorkloadError(
            f"workload {name!r} returned {type(built).__name__}: "
            "it must return pooch.Workload(model, forward, optimizer)"
        )
    _check_parts(built, name)
    batch_size = built.batch_size or int(arguments.get("batch_size", 0))
    return replace(built, name=built.name or name, batch_size=batch_size)


def _check_parts(built: Workload, name: str) -> None:
    import torch

    model: object = built.model  # what the annotation promises is what is checked here
    optimizer: object = built.optimizer
    if not isinstance(model, torch.nn.Module):
        raise WorkloadError(f"the model of workload {name!r} is {type(model).__name__}: give a torch.nn.Module")
    if not callable(built.forward):
        raise WorkloadError(f"the forward of workload {name!r} is not callable: give a function that returns the loss")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise WorkloadError(f"the optimizer of workload {name!r} is {kind}: give a torch.optim.Optimizer or None")
